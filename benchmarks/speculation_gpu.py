"""Speculative decoding on a GPU against plain decoding: one engine, guesses switched on and off, in turns.

    python -m benchmarks.speculation --device cuda --shape l3b,qwen2.5-1.5b
    TRITON_INTERPRET=1 python -m benchmarks.speculation --device cuda --shape smallest   # the benchmark itself, on a CPU

Does: drive the engine's loop in this process, with random weights; record what a model says, let a scripted proposer guess that
with errors at a stated rate (`scripted_guesses.py`), and compare the times of the runs of a turn. With the engine's own
proposer and sampled text, of which nothing repeats, guesses bring nothing: what remains is what looking for them costs. Does
not: need files, HTTP or rich. Exits with 1 if a target is missed.

Layers add little to the random embeddings (`faint_layers`), so a greedy text repeats its last token, by a wide margin. With
usual random weights many tokens are nearly as likely, steps with guesses round otherwise than those without, and a recorded text
would not be said again. Time does not depend on the numbers. The share of tokens that are those of the plain run is printed, too.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.scripted_guesses import ScriptedSpeculator
from benchmarks.workload import SHAPES, write_config
from tonle.config.engine import EngineConfig
from tonle.engine.mailbox import ThreadMailbox
from tonle.engine.messages import Step, Submit, ToFront
from tonle.engine.request import GenerationConfig, Request
from tonle.engine.schedule import Drafts
from tonle.engine.speculate import AheadSpeculator
from tonle.engine.text.no_text import NoText
from tonle.models.source import ModelSource

NAMES = {"l3b": "llama-3.2-3b", "q1.5b": "qwen2.5-1.5b"}
SHAPES["smallest"] = {**SHAPES["tiny"], "vocab_size": 320, "bos_token_id": 1, "eos_token_id": 2}
_FAINT = 2e-4  # of what layers add to the embeddings usually
_HOT = 100.0  # the temperature at which such a model says anything


@dataclass
class Workload:
    name: str
    users: int
    rate: float | None  # of the scripted proposer's guesses that are right; None: the engine's own proposer
    target: float | None = None  # at least, of tokens per second with guesses to those without
    ratios: list[float] = field(default_factory=list)
    tokens_per_s: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    drafted: int = 0
    accepted: int = 0
    same: float = 1.0


def workloads() -> list[Workload]:
    return [
        Workload("guesses all wrong", 1, 0.0, 0.9),
        Workload("half of the guesses right", 1, 0.5),
        Workload("0.8 of the guesses right", 1, 0.8, 2.5),
        Workload("all guesses right", 1, 1.0, 2.5),
        Workload("0.8 of the guesses right", 16, 0.8),
        Workload("sampled, own proposer", 1, None, 0.98),
        Workload("sampled, own proposer", 16, None, 0.98),
        Workload("sampled, own proposer", 100, None, 0.98),
        Workload("guesses all wrong", 16, 0.0, 0.98),
        Workload("guesses all wrong", 100, 0.0, 0.98),
    ]


class Engine:
    """A loop that is driven by hand."""

    def __init__(self, shape: str, folder: Path, config: EngineConfig) -> None:
        from tonle.engine.build import build  # brings torch

        source = ModelSource("folder", write_config(shape, folder), shape)
        self.vocab_size = SHAPES[shape]["vocab_size"]
        self._tokens: dict[int, list[int]] = {}
        self._left: set[int] = set()
        self._handle = 0
        self._mailbox = ThreadMailbox(self._receive)
        self.loop, self.card = build(source, config, self._mailbox, text=NoText())
        self.scheduler, self._runner = self.loop._scheduler, self.loop._runner

    def drafts_of(self, speculator: AheadSpeculator) -> Drafts:
        return Drafts(
            speculator, ahead=speculator, may_check=self._runner.checks_drafts, max_entries=self._runner.max_entries
        )

    def run(
        self, prompts: list[list[int]], config: GenerationConfig, drafts: Drafts | None, seed: int = 0
    ) -> tuple[float, list[list[int]]]:
        """Seconds, and what was said."""
        self.scheduler.drafts = drafts
        self.scheduler.pool.drop_idle()
        requests = []
        for number, prompt in enumerate(prompts):
            self._handle += 1
            own = 1000 * seed + number
            requests.append(Request(handle=self._handle, prompt=prompt, config=config.resolved(), seed=own))
        self._tokens = {request.handle: [] for request in requests}
        self._left = set(self._tokens)
        gc.collect()
        began = time.perf_counter()
        self._mailbox.put(Submit(requests))
        while self._left:
            self.loop.step()
        seconds = time.perf_counter() - began
        while self.loop._launched:
            self.loop.step()
        return seconds, list(self._tokens.values())

    def _receive(self, message: ToFront) -> None:
        if isinstance(message, Step):
            assert not message.refused, message.refused
            offset = 0
            for handle, count in zip(message.handles, message.counts, strict=True):
                self._tokens[handle] += message.tokens[offset : offset + count]
                offset += count
            self._left -= set(message.finished)


def measure(engine: Engine, work: Workload, turns: int, new_tokens: int, prompt_tokens: int) -> None:
    rng = random.Random(work.users)
    prompts = [[rng.randrange(10, engine.vocab_size) for _ in range(prompt_tokens)] for _ in range(work.users)]
    config = GenerationConfig(max_length=new_tokens, do_sample=False, early_stopping=False)
    limits = engine.scheduler.limits
    speculator: AheadSpeculator
    if work.rate is None:
        config.do_sample, config.temperature = True, _HOT
        speculator = AheadSpeculator(limits.max_num_seqs, limits.max_num_batched_tokens)
    else:
        speculator = scripted(engine, work, prompts, config)
    drafts = engine.drafts_of(speculator)
    engine.run(prompts, config, drafts, seed=turns)  # learns what steps take
    drafted, accepted = drafts.num_tokens, drafts.num_accepted
    same = []
    for turn in range(turns):
        seconds, said = {}, {}
        for guessing in (True, False) if turn % 2 else (False, True):
            seconds[guessing], said[guessing] = engine.run(prompts, config, drafts if guessing else None, turn)
            work.tokens_per_s[guessing].append(work.users * new_tokens / seconds[guessing])
        work.ratios.append(seconds[False] / seconds[True])
        pairs = [pair for one, two in zip(said[False], said[True], strict=True) for pair in zip(one, two, strict=True)]
        same.append(sum(one == two for one, two in pairs) / len(pairs))
    work.drafted, work.accepted = drafts.num_tokens - drafted, drafts.num_accepted - accepted
    work.same = statistics.mean(same)


def scripted(engine: Engine, work: Workload, prompts: list[list[int]], config: GenerationConfig) -> ScriptedSpeculator:
    """One that knows what will be said."""
    limits = engine.scheduler.limits
    assert work.rate is not None
    made = ScriptedSpeculator(
        limits.max_num_seqs, limits.max_num_batched_tokens, vocab_size=engine.vocab_size, rate=work.rate
    )
    _, said = engine.run(prompts, config, None)
    for prompt, answer in zip(prompts, said, strict=True):
        made.record(prompt, answer)
    return made


def faint_layers() -> None:
    """Random weights from now on: what attention and MLP add to a token is small beside its embedding."""
    from tonle.models import weights

    usual = weights._random_spread

    def spread(name: str, shape: weights.Shape) -> float:
        return usual(name, shape) * (_FAINT if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0)

    weights._random_spread = spread


def line(cells: list[str]) -> str:
    widths = (28, 6, 12, 12, 8, 14, 16, 8, 16)
    return "".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def table(shape: str, works: list[Workload]) -> list[str]:
    lines = [f"{shape}: speculative decoding, tokens/s of turns (median)"]
    lines.append(line(["workload", "users", "plain", "guesses", "ratio", "low, high", "accepted", "same", "target"]))
    for work in works:
        ratio = statistics.median(work.ratios)
        verdict = "" if work.target is None else f">= {work.target} {'holds' if ratio >= work.target else 'MISSED'}"
        plain, guessed = (statistics.median(work.tokens_per_s[guessing]) for guessing in (False, True))
        lines.append(line([
            work.name, str(work.users), f"{plain:.0f}", f"{guessed:.0f}", f"{ratio:.3f}",
            f"{min(work.ratios):.2f}, {max(work.ratios):.2f}", f"{work.accepted}/{work.drafted}", f"{work.same:.1%}", verdict,
        ]))  # fmt: skip
    return lines


def main(shapes: list[str], *, turns: int = 5, only_users: list[int] | None = None) -> int:
    began = time.monotonic()
    interpreted = not _has_cuda()
    if interpreted:
        use_interpreter()
    faint_layers()
    lines: list[str] = []
    missed = False
    for shape in shapes:
        shape = NAMES.get(shape, shape)
        works = [work for work in workloads() if only_users is None or work.users in only_users]
        with tempfile.TemporaryDirectory() as root:
            engine = Engine(shape, Path(root), _config(interpreted=interpreted))
            print(f"{shape}: ready after {time.monotonic() - began:.0f} s", flush=True)
            for work in works:
                if interpreted:
                    work.users = min(work.users, 2)
                measure(engine, work, turns, *((6, 8) if interpreted else (512 if work.users == 1 else 192, 128)))
                print(f"{time.monotonic() - began:4.0f} s  {table(shape, [work])[-1]}", flush=True)
            lines += table(shape, works)
            missed |= any(work.target and statistics.median(work.ratios) < work.target for work in works)
            del engine
            gc.collect()
    print("\n" + "\n".join(lines), flush=True)
    return int(missed)


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _config(*, interpreted: bool) -> EngineConfig:
    usual = EngineConfig(
        load_format="random", speculation="suffix", generation_config="none", max_sequence_length=2048,
        device="cuda", max_batch_size=128, max_num_batched_tokens=4096, memory_pool_size=8 * 2**30,
    )  # fmt: skip
    small: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_batch_size": 2, "max_num_batched_tokens": 40,
                             "max_sequence_length": 96, "memory_pool_size": 2**22}  # fmt: skip
    return replace(usual, **small) if interpreted else usual


def use_interpreter() -> None:
    """The CUDA machine on this CPU, for the smallest model."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        sys.exit(
            "no CUDA device is there; to try the benchmark itself on a CPU, set TRITON_INTERPRET=1 and --shape smallest"
        )
    from triton.runtime import interpreter

    from tonle.engine import build
    from tonle.engine.build_cuda import cuda_machine
    from tonle.models.cuda import decode_attention, decode_tiling, gemv, sample

    changed: Any = SimpleNamespace(build=build, gemv=gemv, sample=sample, interpreter=interpreter)
    changed.build._cuda_machine = lambda decoder, config: cuda_machine(decoder, config, capture=False)
    tiling: Callable[..., Any] = lambda rows, kv_heads, fp8=False: decode_tiling.DecodeTiling(32, 4, 3, 8, False)  # noqa: E731
    for module in (decode_tiling, decode_attention):
        module.decode_tiling = tiling  # type: ignore[attr-defined]
    changed.gemv.gemv_tiling = lambda outputs, inputs, norm: gemv.GemvTiling(64, 32, warps=1)
    changed.sample._STRETCHES, changed.sample._BLOCK = 2, 256
    original = changed.interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        """Newer numpy refuses int(array of one), which the interpreter relies on for loop bounds."""
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    changed.interpreter._patch_lang_tensor = patched
