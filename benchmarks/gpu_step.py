"""How long one step takes on the device, without scheduler or mailbox: the ceiling of everything above it.

    python -m benchmarks.gpu_step qwen2.5-1.5b --rows 1,16,100,256 --prompts 32,512,4096 --profile 1,100

Prints milliseconds per step, share of the memory floor, and (with --profile) where the time goes, kernel by kernel.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.workload import READ_BYTES_PER_S, SHAPES, weight_bytes, write_config
from tonle.config.engine import EngineConfig
from tonle.engine.build_cuda import cuda_machine
from tonle.engine.plan import Plan
from tonle.engine.run.cuda import CudaRunner
from tonle.models.decoder import Decoder
from tonle.models.layers import LinearPart, Quantized
from tonle.models.read_spec import read_spec
from tonle.models.source import ModelSource
from tonle.models.weights import Weights


def machine(
    name: str,
    rows: int,
    tokens: int,
    kv_cache_dtype: str = "auto",
    *,
    adapter_slots: int = 0,
    quantize: Callable[[torch.Tensor], Quantized] | None = None,
    lm_head: bool = True,
) -> CudaRunner:
    """`quantize`: makes few-bit weights of all matrices, of the output matrix if `lm_head`."""
    with tempfile.TemporaryDirectory() as root:
        spec = read_spec(ModelSource("folder", write_config(name, Path(root)), name))
    decoder = Decoder.random(spec, torch.device("cuda"), torch.bfloat16)
    if quantize is not None:
        for part in matrices_of(decoder.weights, lm_head=lm_head):
            part.weight = quantize(part.dense)
    config = EngineConfig(max_batch_size=rows, max_num_batched_tokens=tokens, max_sequence_length=tokens,
                          memory_pool_size=16 * 2**30, kv_cache_dtype=kv_cache_dtype)  # fmt: skip
    made = cuda_machine(decoder, config, adapter_slots=adapter_slots)
    assert made is not None and isinstance(made.runner, CudaRunner)
    if made.kv.k_scales is None:
        made.kv.k.normal_()  # zeros may be read, and multiplied, faster than others
        made.kv.v.normal_()
    return made.runner


def matrices_of(weights: Weights, *, lm_head: bool) -> list[LinearPart]:
    linears = [linear for layer in weights.layers for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    return [part for linear in [*linears, *([weights.lm_head] if lm_head else [])] for part in linear.parts]


def plan_of(rows: int, context: int, prompt: int = 0) -> Plan:
    """`rows` decoding rows of `context` tokens, and one more with a prompt of so many."""
    plan = Plan()
    per_row = -(-(context + 1) // 16)
    for row in range(rows):
        plan.new_blocks.append((row, 0, list(range(row * per_row, (row + 1) * per_row))))
        plan.rows.append(row)
        plan.starts.append(context)
        plan.chunks.append(None)
        plan.samples.append(True)
    if prompt:
        first = rows * per_row
        plan.new_blocks.append((rows, 0, list(range(first, first - (-prompt // 16)))))
        plan.rows.append(rows)
        plan.starts.append(0)
        plan.chunks.append([7 + i % 1000 for i in range(prompt)])
        plan.samples.append(True)
    return plan


_PROMPTS = (32, 128, 512, 2048, 8192)  # tokens


def longest_row(name: str, context: int, prompts: list[int]) -> int:
    """Tokens that the block table of a row must have room for: the longest prompt or a decoding row with its next token."""
    longest, limit = max([context + 1, *prompts]), SHAPES[name]["max_position_embeddings"]
    if longest > limit:
        raise SystemExit(
            f"{name} was made for {limit} tokens: lower --prompts, --beside or --context, one asks for {longest}"
        )
    return longest


def fits(runner: CudaRunner, plan: Plan) -> bool:
    """Whether the KV cache has all blocks that the plan names: a step over others would read and write foreign memory."""
    needed = 1 + max((max(blocks) for _, _, blocks in plan.new_blocks), default=0)
    return runner._net.kv is not None and needed <= runner._net.kv.num_blocks


def median_ms(work: Callable[[], None], repeats: int = 40) -> float:
    for _ in range(3):
        work()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in marks:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    times = sorted(begin.elapsed_time(end) for begin, end in marks)
    return times[len(times) // 2]


def step_work(runner: CudaRunner, plan: Plan) -> Callable[[], None]:
    """The step's device work alone: its integers are on the device already."""
    runner.collect(runner.launch(plan))
    packed = runner._packer.pack(plan)
    samples = len(plan.rows)
    last = runner._net.last
    tokens = torch.randint(10, 30000, last.shape, dtype=last.dtype, device=last.device)

    def work() -> None:
        last.copy_(tokens)  # each row its own: rows of the same tokens would choose the same experts
        if packed.num_tiles is None:
            runner._graphs.decode(packed.num_tokens, adapted=packed.adapted)
        else:
            runner._graphs.body(packed.num_tokens, packed.num_tiles, adapted=packed.adapted)
            runner._graphs.head(samples, adapted=packed.adapted)

    return work


def kernel_shares(work: Callable[[], None]) -> list[tuple[str, float, int]]:
    """(kernel, milliseconds per step, launches per step), longest first."""
    repeats = 5
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            work()
        torch.cuda.synchronize()
    total: defaultdict[str, float] = defaultdict(float)
    count: defaultdict[str, int] = defaultdict(int)
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            total[event.name] += event.device_time / 1e3 / repeats
            count[event.name] += 1
    ranked = sorted(total.items(), key=lambda pair: -pair[1])
    return [(name, ms, count[name] // repeats) for name, ms in ranked]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("model", choices=SHAPES)
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,100,256")
    parser.add_argument("--prompts", help="default: 32,128,512,2048,8192, up to what the model was made for")
    parser.add_argument("--context", type=int, default=400)
    parser.add_argument(
        "--beside", type=int, default=0, help="also each number of rows with a prompt of so many tokens"
    )
    parser.add_argument("--kv-cache-dtype", choices=["auto", "fp8"], default="auto")
    parser.add_argument("--profile", default="")
    options = parser.parse_args()
    rows = [int(n) for n in options.rows.split(",") if n]
    if options.prompts is None:
        prompts = [n for n in _PROMPTS if n <= SHAPES[options.model]["max_position_embeddings"]]
    else:
        prompts = [int(n) for n in options.prompts.split(",") if n]
    profiled = [int(n) for n in options.profile.split(",") if n]
    context = longest_row(options.model, options.context, [*prompts, options.beside])
    tokens = max(8192, context, max(rows) + options.beside)  # of a step, and of a row
    runner = machine(options.model, max(rows) + 1, tokens, options.kv_cache_dtype)
    floor = weight_bytes(options.model) / READ_BYTES_PER_S * 1e3
    print(
        f"{options.model}: {runner._graphs.num_graphs} graphs in {runner._graphs.capture_s:.2f} s; weights {floor:.3f} ms"
    )
    with torch.inference_mode():
        for count in rows:
            if not fits(runner, plan_of(count, options.context, options.beside)):
                print(f"  decode {count:4d} x {options.context}: more than the KV cache of 16 GiB holds", flush=True)
                continue
            work = step_work(runner, plan_of(count, options.context))
            ms = median_ms(work)
            floor = weight_bytes(options.model, count) / READ_BYTES_PER_S * 1e3
            rate = f"{count / ms * 1e3:8.0f} tok/s  {floor / ms:5.1%} of floor"
            print(f"  decode {count:4d} x {options.context}: {ms:7.3f} ms  {rate}", flush=True)
            if count in profiled:
                for name, part, launches in kernel_shares(work)[:14]:
                    print(f"      {part:7.3f} ms {launches:4d} x {name[:90]}")
            if options.beside:
                mixed = median_ms(step_work(runner, plan_of(count, options.context, options.beside)))
                print(f"  decode {count:4d} and a prompt of {options.beside}: {mixed:7.3f} ms", flush=True)
        for count in prompts:
            ms = median_ms(step_work(runner, plan_of(0, 0, count)), 10)
            print(f"  prompt {count:5d}: {ms:7.3f} ms  {count / ms * 1e3:8.0f} tok/s", flush=True)
            if count in profiled:
                for name, part, launches in kernel_shares(step_work(runner, plan_of(0, 0, count)))[:14]:
                    print(f"      {part:7.3f} ms {launches:4d} x {name[:90]}")


if __name__ == "__main__":
    main()
