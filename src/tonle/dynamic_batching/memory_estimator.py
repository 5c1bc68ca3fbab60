"""`MemoryEstimator`: what one sequence costs in a padded forward pass, from the shape of a transformer.

Does: count activations at the peak of a layer, logits, keys and values. Does not: count weights, which do not depend on
the batch, or import torch.

The counts are those of eager PyTorch, where a layer's arrays live until the next one replaces them; tests compare them
with measured allocations (within 15 %). In units of one array of the hidden size, for H = hidden, I = intermediate size:

    feed-forward, gated     3 I + 4 H     gate and up, their product; residual, input and norms
    feed-forward, plain     2 I + 3 H     before and after the activation function
    attention, eager        2 S + 9 H (gated models) or 2 S + 5 H, with S = heads × length: scores and their softmax
    logits                  vocabulary + H
"""

from __future__ import annotations

from typing import Any

from tonle.errors import ConfigError

MIB = 1024**2
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8, "int8": 1, "float8": 1}


class MemoryEstimator:
    """All sizes are those of the model's configuration."""

    def __init__(
        self,
        model_hidden_size: int,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        dtype: Any = "bfloat16",
        vocab_size: int = 0,
        *,
        head_size: int | None = None,
        intermediate_size: int | None = None,
        is_gated: bool = True,
        keeps_kv: bool = True,
        eager_attention: bool = False,
    ) -> None:
        """`num_kv_heads`: as `num_heads` unless given. `dtype`: a name or a torch dtype. `vocab_size`: 0 for a model that
        returns hidden states instead of logits of every position. `intermediate_size`: 4 × hidden unless given.
        `keeps_kv`: keys and values of all layers are kept, as for generation. Raises `ConfigError`."""
        sizes = {"model_hidden_size": model_hidden_size, "num_layers": num_layers, "num_heads": num_heads}
        for name, value in sizes.items():
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be an integer of at least 1, not {value!r}", param=name)
        dtype_name = str(dtype).removeprefix("torch.").split("_")[0]
        if dtype_name not in _BYTES:
            raise ConfigError(f"dtype must be one of {', '.join(_BYTES)}, not {dtype!r}", param="dtype")
        self._element_bytes = _BYTES[dtype_name]
        self._hidden = model_hidden_size
        self._num_heads = num_heads
        self._vocab = vocab_size
        self._eager = eager_attention
        self._is_gated = is_gated
        intermediate = intermediate_size or 4 * model_hidden_size
        self._feed_forward = 3 * intermediate + 4 * self._hidden if is_gated else 2 * intermediate + 3 * self._hidden
        head = head_size or model_hidden_size // num_heads
        self._kv = 2 * num_layers * (num_kv_heads or num_heads) * head if keeps_kv else 0

    @classmethod
    def of(cls, model: Any) -> MemoryEstimator:
        """From a live transformers model, or its configuration. Raises `ConfigError`."""
        config = getattr(model, "config", model)
        config = getattr(config, "text_config", None) or config

        def size(*names: str) -> int | None:
            return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)

        hidden, layers = (
            size("hidden_size", "d_model", "dim", "n_embd"),
            size("num_hidden_layers", "n_layers", "n_layer"),
        )
        heads = size("num_attention_heads", "n_heads", "n_head")
        if hidden is None or layers is None or heads is None:
            raise ConfigError(
                f"{type(config).__name__} does not name its hidden size, layers and heads; give them: "
                "MemoryEstimator(model_hidden_size=…, num_layers=…, num_heads=…)",
                param="model",
            )
        kv_heads = size("num_key_value_heads")
        is_decoder = kv_heads is not None or bool(getattr(config, "is_decoder", False))
        has_logits = hasattr(model, "get_output_embeddings") and model.get_output_embeddings() is not None
        dtype = getattr(model, "dtype", None) or getattr(config, "dtype", None) or "float32"
        return cls(
            hidden, layers, heads, kv_heads, dtype,
            (size("vocab_size") or 0) if has_logits else 0,
            head_size=size("head_dim"),
            intermediate_size=size("intermediate_size", "hidden_dim", "ffn_dim", "n_inner"),
            is_gated=kv_heads is not None,
            keeps_kv=is_decoder and bool(getattr(config, "use_cache", True)),
            eager_attention=getattr(config, "_attn_implementation", None) == "eager",
        )  # fmt: skip

    def kv_mb(self, length: int) -> float:
        """MiB of keys and values of one sequence."""
        return self._kv * length * self._element_bytes / MIB

    def activation_mb(self, length: int) -> float:
        """MiB at the peak of a forward pass, for one sequence."""
        scores = self._num_heads * length if self._eager else 0
        feed_forward = self._feed_forward + scores
        attention = 2 * scores + (9 if self._is_gated else 5) * self._hidden if scores else 0
        logits = self._vocab + self._hidden if self._vocab else 0
        return max(feed_forward, attention, logits) * length * self._element_bytes / MIB

    def sequence_mb(self, length: int) -> float:
        """MiB of one sequence in a batch that is padded to `length`."""
        return self.kv_mb(length) + self.activation_mb(length)

    def estimate_mb(self, batch_size: int, length: int) -> float:
        """MiB of a batch that is padded to `length`."""
        return batch_size * self.sequence_mb(length)
