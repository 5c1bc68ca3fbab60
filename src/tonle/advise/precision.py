"""In which precisions weights, keys and values can be kept, what they cost, and which of them Tonle's engine serves on a GPU.

Does: bytes per number, which rate of the data sheet products run at, what is not served and why. Does not: know models or
devices.
"""

from __future__ import annotations

from typing import Literal

import msgspec

PrecisionName = Literal["bf16", "fp8", "int8", "int4"]
KvName = Literal["bf16", "fp8"]
_GROUP = 128  # weights of an int4 checkpoint that share a scale (2 bytes) and a zero point (half a byte)


class Precision(msgspec.Struct, frozen=True, kw_only=True):
    """Of the layers' weights."""

    name: PrecisionName
    bytes_per_weight: float
    how: str  # the arithmetic of `bytes_per_weight`
    rate: Literal["bf16", "fp8", "int8"]  # operations per second that products run at, if the GPU has them
    served: bool  # by Tonle's engine on a GPU, in this version
    why_not: str = ""
    accuracy: str = ""


PRECISIONS: dict[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision(name="bf16", bytes_per_weight=2.0, how="2 bytes per weight", rate="bf16", served=True,
                  accuracy="as it was trained"),
        Precision(name="fp8", bytes_per_weight=1.0, how="1 byte per weight", rate="fp8", served=False,
                  why_not="Tonle's engine serves such weights, but this sizing has no times of it for them yet; it has vLLM's",
                  accuracy="usually within 1 % of bf16 on benchmarks; measure your own task"),
        Precision(name="int8", bytes_per_weight=1.0, how="1 byte per weight", rate="int8", served=False,
                  why_not="Tonle's engine serves such weights, but this sizing has no times of it for them yet; it has vLLM's",
                  accuracy="usually within 1 % of bf16 on benchmarks; measure your own task"),
        Precision(name="int4", bytes_per_weight=0.5 + 2.5 / _GROUP,
                  how=f"half a byte per weight, and 2.5 bytes of scale and zero point for {_GROUP} of them",
                  rate="bf16", served=False,
                  why_not="Tonle's engine serves such weights, but this sizing has no times of it for them yet; it has vLLM's",
                  accuracy="one to a few per cent below bf16; measure your own task"),
    )
}  # fmt: skip


class KvPrecision(msgspec.Struct, frozen=True, kw_only=True):
    """Of the cache of keys and values."""

    name: KvName
    bytes_per_number: float


KV_PRECISIONS: dict[str, KvPrecision] = {
    "bf16": KvPrecision(name="bf16", bytes_per_number=2.0),
    "fp8": KvPrecision(name="fp8", bytes_per_number=1.0),
}

# Families that Tonle's engine serves on a GPU: docs/models.md and docs/gpu.md have the details. A test compares it with the
# engine's table.
SERVED_ARCHITECTURES = tuple(
    f"{name}ForCausalLM"
    for name in (
        "Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3", "Phi3", "Granite", "Olmo2", "Olmo3", "SmolLM3",
        "Glm", "Glm4", "Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "GptOss",
    )
)  # fmt: skip
