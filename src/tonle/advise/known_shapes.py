"""The sizes of models that people serve, by name: public facts from their `config.json`.

Does: find one by its name, with or without organization and endings such as -Instruct. Does not: claim to be complete: a folder,
a GGUF file or plain numbers describe any other model.
"""

from __future__ import annotations

import re
from typing import Any

from tonle.advise.shape import ModelShape, dense_shape

_LLAMA, _QWEN2, _QWEN3, _MISTRAL = "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM"
_128K, _32K = 131_072, 32_768

# name: architecture, layers, hidden, heads, KV heads, intermediate, vocabulary, context; what differs from most
_TABLE: dict[str, tuple[str, int, int, int, int, int, int, int, dict[str, Any]]] = {
    "smollm2-135m": (_LLAMA, 30, 576, 9, 3, 1536, 49_152, 8192, {"tied": True}),
    "smollm2-1.7b": (_LLAMA, 24, 2048, 32, 32, 8192, 49_152, 8192, {"tied": True}),
    "llama-2-7b": (_LLAMA, 32, 4096, 32, 32, 11_008, 32_000, 4096, {}),
    "llama-2-13b": (_LLAMA, 40, 5120, 40, 40, 13_824, 32_000, 4096, {}),
    "llama-2-70b": (_LLAMA, 80, 8192, 64, 8, 28_672, 32_000, 4096, {}),
    "llama-3-8b": (_LLAMA, 32, 4096, 32, 8, 14_336, 128_256, 8192, {}),
    "llama-3-70b": (_LLAMA, 80, 8192, 64, 8, 28_672, 128_256, 8192, {}),
    "llama-3.1-8b": (_LLAMA, 32, 4096, 32, 8, 14_336, 128_256, _128K, {}),
    "llama-3.1-70b": (_LLAMA, 80, 8192, 64, 8, 28_672, 128_256, _128K, {}),
    "llama-3.1-405b": (_LLAMA, 126, 16_384, 128, 8, 53_248, 128_256, _128K, {}),
    "llama-3.2-1b": (_LLAMA, 16, 2048, 32, 8, 8192, 128_256, _128K, {"tied": True}),
    "llama-3.2-3b": (_LLAMA, 28, 3072, 24, 8, 8192, 128_256, _128K, {"tied": True}),
    "llama-3.3-70b": (_LLAMA, 80, 8192, 64, 8, 28_672, 128_256, _128K, {}),
    "qwen2.5-0.5b": (_QWEN2, 24, 896, 14, 2, 4864, 151_936, _32K, {"tied": True}),
    "qwen2.5-1.5b": (_QWEN2, 28, 1536, 12, 2, 8960, 151_936, _32K, {"tied": True}),
    "qwen2.5-3b": (_QWEN2, 36, 2048, 16, 2, 11_008, 151_936, _32K, {"tied": True}),
    "qwen2.5-7b": (_QWEN2, 28, 3584, 28, 4, 18_944, 152_064, _32K, {}),
    "qwen2.5-14b": (_QWEN2, 48, 5120, 40, 8, 13_824, 152_064, _32K, {}),
    "qwen2.5-32b": (_QWEN2, 64, 5120, 40, 8, 27_648, 152_064, _32K, {}),
    "qwen2.5-72b": (_QWEN2, 80, 8192, 64, 8, 29_568, 152_064, _32K, {}),
    "qwen3-0.6b": (_QWEN3, 28, 1024, 16, 8, 3072, 151_936, 40_960, {"tied": True, "head_size": 128}),
    "qwen3-4b": (_QWEN3, 36, 2560, 32, 8, 9728, 151_936, 40_960, {"tied": True, "head_size": 128}),
    "qwen3-8b": (_QWEN3, 36, 4096, 32, 8, 12_288, 151_936, 40_960, {"head_size": 128}),
    "qwen3-14b": (_QWEN3, 40, 5120, 40, 8, 17_408, 151_936, 40_960, {"head_size": 128}),
    "qwen3-32b": (_QWEN3, 64, 5120, 64, 8, 25_600, 151_936, 40_960, {"head_size": 128}),
    "qwen3-30b-a3b": ("Qwen3MoeForCausalLM", 48, 2048, 32, 4, 768, 151_936, 40_960,
                      {"head_size": 128, "experts": 128, "experts_per_token": 8}),
    "mistral-7b": (_MISTRAL, 32, 4096, 32, 8, 14_336, 32_768, _32K, {}),
    "mistral-small-24b": (_MISTRAL, 40, 5120, 32, 8, 32_768, 131_072, _32K, {"head_size": 128}),
    "mixtral-8x7b": ("MixtralForCausalLM", 32, 4096, 32, 8, 14_336, 32_000, _32K, {"experts": 8, "experts_per_token": 2}),
    "mixtral-8x22b": ("MixtralForCausalLM", 56, 6144, 48, 8, 16_384, 32_768, 65_536,
                      {"experts": 8, "experts_per_token": 2}),
}  # fmt: skip
KNOWN_SHAPES = tuple(_TABLE)
_PREFIX = re.compile(r"^(meta-)(?=llama)")
_STORED_AS = {
    "awq": "int4", "gptq": "int4", "int4": "int4", "w4a16": "int4", "int8": "int8", "w8a8": "int8", "fp8": "fp8",
}  # fmt: skip
_ENDINGS = re.compile(rf"-(instruct|chat|it|hf|base|v\d+(\.\d+)?|\d{{4}}|dynamic|gguf|{'|'.join(_STORED_AS)})$")


def _known_name(name: str) -> tuple[str | None, str | None]:
    """The name in the table that a user means, and the precision that an ending such as -AWQ names:
    `meta-llama/Meta-Llama-3-70B-Instruct` is llama-3-70b."""
    bare = name.rsplit("/", 1)[-1].lower().replace("_", "-")
    bare = _PREFIX.sub("", bare)
    stored_as: str | None = None
    while bare not in _TABLE and (ending := _ENDINGS.search(bare)) is not None:
        stored_as = stored_as or _STORED_AS.get(ending[1])  # the last one counts: GPTQ-Int8 is int8
        bare = bare[: ending.start()]
    return (bare, stored_as) if bare in _TABLE else (None, None)


def known_shape(name: str) -> ModelShape | None:
    """None: no such model in the table."""
    found, stored_as = _known_name(name)
    if found is None:
        return None
    architecture, layers, hidden, heads, kv_heads, intermediate, vocabulary, context, others = _TABLE[found]
    return dense_shape(
        name=name,
        origin=f"the public sizes of {found}",
        architecture=architecture,
        layers=layers,
        hidden_size=hidden,
        heads=heads,
        kv_heads=kv_heads,
        intermediate_size=intermediate,
        vocab_size=vocabulary,
        context_length=context,
        stored_as=stored_as,
        **others,
    )
