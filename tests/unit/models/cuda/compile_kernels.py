"""Compile the kernels of some models for GPUs that are not here, down to their machine code.

    python -m tests.unit.models.cuda.compile_kernels 8.0 8.6 [--only CASE]

Does: take what `CudaModel.compile` would compile on such a GPU (on tensors without memory), compile it with that GPU as target,
and print one line of JSON for each kernel. Does not: run anything, or need a GPU. A process of its own, since Triton's
interpreter, which other tests use, cannot be turned off in one that has imported it.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import pkgutil
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from triton._utils import canonicalize_dtype
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import tonle.models.cuda
from tonle.models.cuda import gpu_features, quantized_matrix
from tonle.models.cuda.batch import Sizes
from tonle.models.cuda.cuda_layer import unsupported
from tonle.models.cuda.decode_tiling import max_items
from tonle.models.cuda.gemv_adapter import begin
from tonle.models.cuda.launch import compiling_only
from tonle.models.cuda.mask import put_drawn
from tonle.models.cuda.model import CudaModel
from tonle.models.decoder import Decoder
from tonle.models.inputs import KVCache
from tonle.models.layers import Weight
from tonle.models.packed import Form, Packed, places_of
from tonle.models.spec import AttentionSpec, LayerSpec, MixerSpec, ModelSpec, RopeSpec
from tonle.models.weights import EMBEDDING, Owned, assemble, tensor_shapes

Launch = tuple[JITFunction[Any], ASTSource, dict[str, Any]]  # a kernel, what it is compiled for, Triton's options

META = torch.device("meta")
_ATTENTION = ("_decode", "_prefill")
# Shared memory that one program may have, as NVIDIA's programming guide has it.
SHARED_BYTES = {(8, 0): 163 * 1024, (8, 6): 99 * 1024, (8, 9): 99 * 1024, (9, 0): 227 * 1024}


@dataclass(frozen=True)
class Case:
    """A model whose kernels are compiled; sizes as real models have them, layers few."""

    spec: ModelSpec
    dtype: torch.dtype = torch.bfloat16
    fp8: bool = False
    adapters: bool = False
    form: Form | None = None  # of its matrices, where they have few bits


def _spec(attention: AttentionSpec, *, mixer: MixerSpec | None = None, **rest: Any) -> ModelSpec:
    layer = LayerSpec(attention=attention, mixer=mixer or MixerSpec(size=8192))
    given: dict[str, Any] = {"architecture": "any", "vocab_size": 128256, "hidden_size": 3072, "norm_eps": 1e-6,
                             "max_positions": 4096, "layers": (layer,)}  # fmt: skip
    return ModelSpec(**(given | rest))


_USUAL = AttentionSpec(num_heads=24, num_kv_heads=8, head_dim=128, rope=RopeSpec())
_GEMMA = AttentionSpec(num_heads=8, num_kv_heads=4, head_dim=256, rope=RopeSpec(), scale=0.0625, soft_cap=50.0, window=4096,
                       qk_norm=True)  # fmt: skip
_GELU = MixerSpec(size=9216, activation="gelu_tanh")
_WHOLE = AttentionSpec(num_heads=16, num_kv_heads=16, head_dim=128, rope=RopeSpec(), qk_norm=True, qk_norm_whole=True)
_PARTS = AttentionSpec(num_heads=32, num_kv_heads=32, head_dim=96, rope=RopeSpec(rotated=72), sinks=True, qkv_bias=True)
_EXPERTS = MixerSpec(kind="experts", size=768, num_experts=128, experts_per_token=8, shared_size=1024, shared_gate=True)
_CLAMPED = MixerSpec(kind="experts", size=2880, num_experts=32, experts_per_token=4, activation="swigluoai", clamp=7.0,
                     bias=True, router_bias=True)  # fmt: skip
_GEMMA_2 = _spec(_GEMMA, hidden_size=2304, embedding_scale=48.0, logit_soft_cap=30.0, layers=(
    LayerSpec(attention=_GEMMA, mixer=_GELU, norm_after=True),))  # fmt: skip
CASES: dict[str, Case] = {
    "usual": Case(_spec(_USUAL), adapters=True),
    "usual, fp8 cache": Case(_spec(_USUAL), fp8=True),
    "usual, float32": Case(_spec(_USUAL), torch.float32),
    "gemma": Case(_GEMMA_2),
    "gemma, fp8 cache": Case(_GEMMA_2, fp8=True),
    "gemma, float32": Case(_GEMMA_2, torch.float32),
    "norms over all heads, after": Case(_spec(_WHOLE, hidden_size=2048, layers=(
        LayerSpec(attention=_WHOLE, mixer=MixerSpec(size=8192), norm_before=False, norm_after=True),))),
    "heads of 96": Case(_spec(_PARTS), torch.float16),
    "heads of 96, fp8 cache": Case(_spec(_PARTS), torch.float16, fp8=True),
    "experts": Case(_spec(_USUAL, mixer=_EXPERTS)),
    "experts as in gpt-oss": Case(_spec(_USUAL, mixer=_CLAMPED)),
    "experts, float32": Case(_spec(_USUAL, mixer=_EXPERTS), torch.float32),
    "experts, int4": Case(_spec(_USUAL, mixer=_EXPERTS), form="int4"),
    "experts, fp8": Case(_spec(_USUAL, mixer=_EXPERTS), form="fp8"),
    "int4": Case(_spec(_USUAL), form="int4", adapters=True),
    "int8": Case(_spec(_USUAL, layers=(LayerSpec(attention=_USUAL, mixer=MixerSpec(size=8192)),
                                       LayerSpec(attention=_USUAL, mixer=_EXPERTS))), form="int8"),
    "fp8": Case(_spec(_USUAL), form="fp8"),
    "experts in int4": Case(_spec(_USUAL, mixer=_EXPERTS), form="int4"),
    "nf4": Case(_spec(_USUAL), torch.float16, form="table"),
}  # fmt: skip
_FEW = ("usual", "usual, fp8 cache", "gemma", "gemma, float32", "norms over all heads, after", "heads of 96, fp8 cache",
        "experts", "experts as in gpt-oss", "int4", "int8", "fp8", "nf4",
        "experts in int4")  # fmt: skip


def pretend(capability: tuple[int, int]) -> None:
    """From now on the GPU is one of these, as far as our code asks."""
    gpu_features.capability = lambda: capability  # type: ignore[assignment]
    gpu_features.shared_bytes = lambda: SHARED_BYTES[capability]
    for asked in vars(gpu_features).values():
        if hasattr(asked, "cache_clear"):
            asked.cache_clear()


def model_of(case: Case) -> CudaModel:
    spec, shapes = case.spec, tensor_shapes(case.spec)

    def fetch(name: str) -> Weight:
        if case.form is None or len(shapes[name]) == 1 or name == EMBEDDING:
            return torch.empty(shapes[name], device=META)
        return _packed(*shapes[name], case.form)

    weights = assemble(spec, fetch, Owned(META, case.dtype))
    sizes = Sizes(
        64, 256 if case.form is None else 2048, 64, max_items(64, spec.num_kv_heads), 2 if case.adapters else 0
    )
    model = CudaModel(Decoder(spec, weights), sizes, 64, 1024)
    model.kv = KVCache(
        num_layers=spec.num_layers, num_blocks=1, block_size=16, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim,
        dtype=torch.float8_e4m3fn if case.fp8 else case.dtype, device=META,
    )  # fmt: skip
    if case.adapters:
        model.enable_adapters(2, 16)
    return model


def _packed(outputs: int, inputs: int, form: Form) -> Packed:
    """Integers and tables in groups of 128 numbers, e4m3 with a scale for each output."""
    group = 0 if form == "fp8" else 128
    words = torch.empty(outputs, inputs // places_of(form), dtype=torch.int32, device=META)
    scale = torch.empty(outputs, inputs // group if group else 1, device=META)
    table = torch.zeros(16) if form == "table" else None  # compared with others, which takes memory
    minimum = torch.empty_like(scale) if form == "int4" else None
    return Packed(words, scale, minimum, table, 32 // places_of(form), inputs, form, group)


def launches_of(case: Case) -> dict[str, Launch]:
    """What is launched for it, each once: by a text that tells them apart."""
    found: dict[str, Launch] = {}

    def note(kernel: JITFunction[Any], *arguments: Any, grid: Any, **options: Any) -> None:
        source, rest = _source(kernel, arguments, options)
        found[f"{kernel.fn.__name__} {source.signature} {source.constants} {rest}"] = kernel, source, rest

    original = JITFunction.warmup
    JITFunction.warmup = note
    try:
        model = model_of(case)
        for forms in (frozenset(), frozenset({"int4", "int8", "fp8"}) if case.form else None):
            if forms is not None:  # one row of few-bit numbers, by either way
                quantized_matrix.IN_PAIRS = forms
                model.compile()
        with compiling_only():
            _beside(model)
    finally:
        JITFunction.warmup = original
    return found


def _beside(model: CudaModel) -> None:
    """What is compiled when it is first launched."""
    few = torch.zeros(4, dtype=torch.int32, device=META)
    put_drawn(few, few.long(), few, few)
    for layer in model.adapters.layers if model.adapters is not None else []:
        alone = replace(layer.o.one_row, fused=False)
        begin(alone, torch.zeros(1, model.spec.q_size, dtype=model.logits.dtype, device=META), None, 4)


def _source(
    kernel: JITFunction[Any], arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[ASTSource, dict[str, Any]]:
    """As Triton's own launcher specializes: whole multiples of 16 are known to be such."""
    parameters = list(inspect.signature(kernel.fn).parameters.values())
    values = dict(zip((parameter.name for parameter in parameters), arguments, strict=False))
    values |= {name: options.pop(name) for name in list(options) if name in kernel.arg_names}
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(parameters):
        value = values[parameter.name]
        if parameter.annotation == "tl.constexpr" or value is None:
            signature[parameter.name], constants[place,] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + canonicalize_dtype(value.dtype)
            attributes[place,] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32"
            if value % 16 == 0:
                attributes[place,] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes), options


def launches(cases: list[str], *, few: bool) -> Iterator[tuple[str, Launch]]:
    """Of all these cases. Few: of some, and attention as it is launched first, of other kernels those whose flags differ."""
    seen: set[str] = set()
    for case in [case for case in cases if case in _FEW or not few]:
        for kernel, source, options in launches_of(CASES[case]).values():
            name = kernel.fn.__name__
            flags = [value for value in source.constants.values() if isinstance(value, bool | None)]
            kind = f"{case} {name}" if name in _ATTENTION else f"{name} {flags}"
            if not few or kind not in seen:
                seen.add(kind)
                yield case, (kernel, source, options)


def compiled(capability: tuple[int, int], case: str, launch: Launch) -> dict[str, Any]:
    """What became of one kernel, for JSON."""
    kernel, source, options = launch
    line = {"case": case, "capability": capability, "kernel": kernel.fn.__name__}
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    try:
        made = triton.compile(source, target=target, options=options)
    except Exception as error:  # whatever a compiler finds wrong
        return line | {"error": f"{type(error).__name__}: {error}", "constants": str(source.constants)}
    return line | {"shared": made.metadata.shared, "code": len(made.asm["cubin"])}


def all_kernels() -> list[str]:
    """Those of our package: they take the flag of `launch.py`, and no other one calls them."""
    for module in pkgutil.iter_modules(tonle.models.cuda.__path__):
        importlib.import_module(f"tonle.models.cuda.{module.name}")
    modules = [module for name, module in sys.modules.items() if name.startswith("tonle.models.cuda.")]
    found = {each.fn: each for module in modules for each in vars(module).values() if isinstance(each, JITFunction)}
    called = {name for each in found.values() for name in re.findall(r"(\w+)\(", each.src.partition(":\n")[2])}
    return sorted(fn.__name__ for fn, each in found.items() if "PDL" in each.arg_names and fn.__name__ not in called)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("capability", nargs="+", help="compute capability, such as 8.6")
    parser.add_argument("--only", choices=CASES, help="one model alone")
    parser.add_argument("--few", action="store_true", help="not every form of every kernel")
    asked = parser.parse_args()
    print(json.dumps({"kernels": all_kernels()}))
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for text in asked.capability:
            major, minor = (int(part) for part in text.split("."))
            pretend((major, minor))
            cases = [asked.only] if asked.only else list(CASES)
            for case in list(cases):
                if (why := unsupported(CASES[case].spec)) is not None:
                    print(json.dumps({"case": case, "capability": [major, minor], "refused": why}))
                    cases.remove(case)
            made = [
                threads.submit(compiled, (major, minor), case, launch)
                for case, launch in launches(cases, few=asked.few)
            ]
            for each in made:
                print(json.dumps(each.result()), flush=True)


if __name__ == "__main__":
    main()
