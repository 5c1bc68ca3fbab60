"""`find_model`: the shape of the model that a user names: a folder, a GGUF file, a cached hub model or a known name.

Does: read `config.json` or a GGUF file's metadata, and nothing else. Does not: fetch anything, read weights or need torch.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from tonle.advise.gguf_head import read_gguf_head
from tonle.advise.known_shapes import KNOWN_SHAPES, known_shape
from tonle.advise.shape import ModelShape, dense_shape
from tonle.config.cache_dir import hub_dir
from tonle.config.gguf_parts import whole_models
from tonle.config.model_json import read_json
from tonle.errors import ModelError

_MAX_SIZE = 2**31


def find_model(name: str) -> ModelShape:
    """Raises `ModelError` with what to do instead."""
    path = Path(name).expanduser()
    if path.is_file():
        return _of_gguf(path)
    if path.is_dir():
        if (path / "config.json").is_file():
            return shape_of_config(read_json(path / "config.json"), name=name, origin=str(path / "config.json"))
        files = whole_models(path.glob("*.gguf"))
        if len(files) == 1:
            return _of_gguf(files[0])
        raise ModelError(
            f"{path} has no config.json"
            + (f" and {len(files)} GGUF models: name one of them" if files else " and no GGUF file")
        )
    if cached := _cached_config(name):
        return shape_of_config(read_json(cached), name=name, origin="config.json in the hub's cache")
    if shape := known_shape(name):
        return shape
    near = difflib.get_close_matches(name.rsplit("/", 1)[-1].lower(), KNOWN_SHAPES, n=1, cutoff=0.5)
    raise ModelError(
        f"the sizes of {name!r} are not known: it is no path on this machine, not in the hub's cache and not in the table"
        + (f" (did you mean {near[0]}?)" if near else "")
        + ". Fetch it (tonle pull), or give its numbers: --params 70B --layers 80 --kv-heads 8 --head-size 128. In the table: "
        + ", ".join(KNOWN_SHAPES)
    )


def _cached_config(name: str) -> Path | None:
    """Of a hub model that was fetched before."""
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json", cache_dir=hub_dir())
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def shape_of_config(config: dict[str, Any], *, name: str, origin: str) -> ModelShape:
    """From the dictionary of a `config.json`. Raises `ModelError`."""
    architectures = config.get("architectures")
    architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    quantization = config.get("quantization_config")
    if isinstance(config.get("text_config"), dict):  # a model that sees: its language part
        config = {**config, **config["text_config"]}
    if config.get("kv_lora_rank"):
        raise ModelError(
            f"{origin}: keys and values of this model are compressed (multi-head latent attention), which advise does not count; "
            "it needs far less KV memory than --kv-heads and --head-size would say"
        )
    numbers = _Numbers(config, origin)
    heads = numbers.need("num_attention_heads")
    experts = numbers.first("num_local_experts", "num_experts", "n_routed_experts") or 0
    per_token = numbers.first("num_experts_per_tok", "num_experts_per_token", "experts_per_token")
    if experts and not per_token:
        raise ModelError(
            f"{origin}: num_experts_per_tok is missing: how many of its {experts} experts a token asks for"
        )
    wide = numbers.need("intermediate_size")
    shared = (numbers.first("n_shared_experts") or 0) * (numbers.first("moe_intermediate_size") or wide)
    return dense_shape(
        name=name,
        origin=origin,
        architecture=architecture,
        layers=numbers.need("num_hidden_layers"),
        hidden_size=numbers.need("hidden_size"),
        heads=heads,
        kv_heads=numbers.first("num_key_value_heads") or heads,
        head_size=numbers.first("head_dim"),
        intermediate_size=(numbers.first("moe_intermediate_size") or wide) if experts else wide,
        vocab_size=numbers.need("vocab_size"),
        context_length=numbers.first("max_position_embeddings") or 2048,
        tied=bool(config.get("tie_word_embeddings", False)),
        experts=experts,
        experts_per_token=per_token or 0,
        shared_intermediate=(numbers.first("shared_expert_intermediate_size") or shared) if experts else 0,
        stored_as=_stored_as(quantization),
    )


class _Numbers:
    """Whole numbers of a config that someone else wrote."""

    def __init__(self, config: dict[str, Any], origin: str) -> None:
        self._config = config
        self._origin = origin

    def first(self, *keys: str) -> int | None:
        for key in keys:
            value = self._config.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MAX_SIZE:
                raise ModelError(f"{self._origin}: {key} should be a whole number, not {value!r}")
            return value
        return None

    def need(self, key: str) -> int:
        value = self.first(key)
        if not value:
            raise ModelError(f"{self._origin}: {key} is missing, so that the model's size cannot be counted")
        return value


def _stored_as(quantization: Any) -> str | None:
    """The precision that a quantized checkpoint is stored in."""
    if not isinstance(quantization, dict):
        return None
    text = json.dumps(quantization).lower()
    method, bits = str(quantization.get("quant_method", "")).lower(), quantization.get("bits")
    if "fp8" in method or '"type": "float"' in text:
        return "fp8"
    if bits == 4 or '"num_bits": 4' in text or method == "awq" or 'load_in_4bit": true' in text:
        return "int4"
    if bits == 8 or '"num_bits": 8' in text:
        return "int8"
    return method or None


def _of_gguf(path: Path) -> ModelShape:
    head = read_gguf_head(path)
    own = {
        key.partition(".")[2]: value for key, value in head.metadata.items() if key.startswith(f"{head.architecture}.")
    }
    numbers = _Numbers(own, str(path))
    heads, hidden = numbers.need("attention.head_count"), numbers.need("embedding_length")
    experts = numbers.first("expert_count") or 0
    wide = numbers.need("feed_forward_length")
    return dense_shape(
        name=str(path),  # what `tonle serve` takes
        origin=str(path),
        architecture=_GGUF_ARCHITECTURES.get(head.architecture, head.architecture),
        layers=numbers.need("block_count"),
        hidden_size=hidden,
        heads=heads,
        kv_heads=numbers.first("attention.head_count_kv") or heads,
        head_size=numbers.first("attention.key_length"),
        intermediate_size=(numbers.first("expert_feed_forward_length") or wide) if experts else wide,
        vocab_size=head.vocab_size,
        context_length=numbers.first("context_length") or 2048,
        tied=head.tied,
        experts=experts,
        experts_per_token=numbers.first("expert_used_count") or 0,
        file_bytes=head.file_bytes,
        stored_as=head.commonest_type,
    )


_GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
