"""`ModelSpec`: what a model is, in numbers, layer by layer. Families declare their differences in one table, `FAMILIES`.

Does: hold the shape of a model and of each layer. Does not: read files (`read_spec.py`), hold weights, say in which order a
layer runs (`layer_order.py`), or need torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tonle.errors import ModelError

RopeKind = Literal["default", "linear", "llama3", "yarn", "factors"]
MixerKind = Literal["gated", "plain", "experts"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu2"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position encoding. Which fields count depends on `kind`."""

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0  # linear, llama3, yarn: how far the context was stretched
    original_max_positions: int = 0  # llama3, yarn: the context before it was stretched, tokens
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the ramp's ends to whole dimensions
    attention_factor: float = 1.0  # yarn: scales cos and sin
    factors: tuple[float, ...] = ()  # factors: what each of the head_dim / 2 frequencies is divided by


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """How a layer's tokens look at each other."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec | None  # None: positions are not encoded
    window: int | None = None  # how many of the latest tokens a token sees; None = all
    scale: float | None = None  # of the scores; None = head_dim ** -0.5
    soft_cap: float | None = None  # scores are kept within it by a tanh
    sinks: bool = False  # each head has a learned score that takes weight and gives no value
    qk_norm: bool = False  # queries and keys are normed per head, before the rotation
    qkv_bias: bool = False
    o_bias: bool = False

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerSpec:
    """What follows attention in a layer: one gated or plain perceptron, or several of which a router chooses."""

    kind: MixerKind = "gated"
    size: int  # between its two products; of one expert
    activation: Activation = "silu"
    bias: bool = False
    num_experts: int = 0  # experts: gated perceptrons
    experts_per_token: int = 0
    normed_shares: bool = True  # experts: the chosen ones' shares add up to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer as data. In which order its pieces run: `layer_order.py`."""

    attention: AttentionSpec
    mixer: MixerSpec
    norm_before: bool = True  # attention and mixer see normed hidden states
    norm_after: bool = False  # what they add to the hidden states is normed
    residual: Literal["sequential", "parallel"] = "sequential"  # parallel: the mixer sees what attention saw


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The shape of one model. Sizes count numbers, not bytes."""

    architecture: str  # the transformers class, also for GGUF files
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    max_positions: int  # longest sequence the model was made for, tokens
    gain_offset: float = 0.0  # added to every norm's gain when weights are loaded; nothing after that knows it
    tie_embeddings: bool = False
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    dtype: str = "float32"  # as stored: a torch name, or a GGML type such as Q4_1

    def __post_init__(self) -> None:
        if not self.layers:
            raise ModelError("the model's num_layers must be at least 1, not 0")
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim",
                     "max_positions"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ModelError(f"the model's {name} must be at least 1, not {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key-value heads evenly"
            )
        for mixer in dict.fromkeys(layer.mixer for layer in self.layers):
            if mixer.kind == "experts" and not 1 <= mixer.experts_per_token <= mixer.num_experts:
                raise ModelError(
                    f"a token cannot have {mixer.experts_per_token} of {mixer.num_experts} experts: at least 1, at most all"
                )
        if any(layer.residual == "parallel" and layer.norm_after for layer in self.layers):
            raise ModelError("layers with parallel residuals and norms after them are not supported")
        if self.head_dim % 2:
            raise ModelError(f"rotary positions need an even head_dim, not {self.head_dim}")
        if len({(a.num_heads, a.num_kv_heads, a.head_dim) for a in self._attentions}) > 1:
            raise ModelError("layers with different numbers or sizes of heads are not supported")

    @property
    def _attentions(self) -> list[AttentionSpec]:
        return [layer.attention for layer in self.layers]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    # Heads are the same in every layer: one cache holds the keys and values of all.

    @property
    def num_heads(self) -> int:
        return self.layers[0].attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.layers[0].attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.layers[0].attention.head_dim

    @property
    def q_size(self) -> int:
        return self.layers[0].attention.q_size

    @property
    def kv_size(self) -> int:
        return self.layers[0].attention.kv_size

    @property
    def intermediate_size(self) -> int:
        """The largest of any layer."""
        return max(layer.mixer.size for layer in self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Per layer."""
        return tuple(attention.window for attention in self._attentions)

    @property
    def sliding_window(self) -> int | None:
        """The narrowest window of any layer; None if every layer sees everything."""
        return min((window for window in self.windows if window is not None), default=None)

    @property
    def ropes(self) -> tuple[RopeSpec | None, ...]:
        """The different ones, in the order of their first layers."""
        return tuple(dict.fromkeys(attention.rope for attention in self._attentions))


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one architecture differs from the plain decoder. `None` = the checkpoint's own config says."""

    gguf: str | None = None  # the architecture's name in GGUF files
    gguf_interleaved: bool = False  # GGUF stores q and k rows with the two halves of each head interleaved
    qkv_bias: bool | None = False
    o_bias: bool | None = False
    mlp_bias: bool | None = False
    qk_norm: bool = False
    head_dim: int | None = None  # where the config has none; None = hidden_size / num_heads
    window: Literal["none", "all", "listed"] = "none"  # which layers `sliding_window` concerns
    default_window: int | None = None  # where the config does not mention `sliding_window`


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(gguf="llama", gguf_interleaved=True, qkv_bias=None, o_bias=None, mlp_bias=None),
    "MistralForCausalLM": Family(window="all", default_window=4096),
    "Qwen2ForCausalLM": Family(gguf="qwen2", qkv_bias=True, window="listed"),
    "Qwen3ForCausalLM": Family(gguf="qwen3", qkv_bias=None, o_bias=None, qk_norm=True, head_dim=128, window="listed"),
}


def family(architecture: str) -> Family:
    """The family's row, or `ModelError` naming the architectures there are."""
    if architecture not in FAMILIES:
        raise ModelError(f"architecture {architecture!r} is not supported; supported: {', '.join(FAMILIES)}")
    return FAMILIES[architecture]


def gguf_architecture(name: str) -> str:
    """From GGUF's name of an architecture to ours, or `ModelError` naming those there are."""
    for architecture, row in FAMILIES.items():
        if row.gguf == name:
            return architecture
    supported = ", ".join(row.gguf for row in FAMILIES.values() if row.gguf)
    raise ModelError(f"GGUF architecture {name!r} is not supported; supported: {supported}")
