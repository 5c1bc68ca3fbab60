"""`ModelSpec`: what a model is, in numbers, layer by layer.

Does: hold the shape of a model and of each layer. Does not: know families (`families.py`), read files (`read_spec.py`), hold
weights, say in which order a layer runs (`layer_order.py`), or need torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from tonle.errors import ModelError

RopeKind = Literal["default", "linear", "llama3", "yarn", "factors"]
MixerKind = Literal["gated", "plain", "experts"]
# swigluoai (gated only): (clamp(up) + 1) * clamp(gate) * sigmoid(alpha * clamp(gate)), as in gpt-oss; see `MixerSpec.clamp`
Activation = Literal["silu", "gelu", "gelu_tanh", "relu2", "swigluoai"]
SWIGLUOAI_ALPHA = 1.702


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position encoding. Which fields count depends on `kind`."""

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0  # linear, llama3, yarn: how far the context was stretched
    original_max_positions: int = 0  # llama3, yarn, long_factors: the context before it was stretched, tokens
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the ramp's ends to whole dimensions
    attention_factor: float = 1.0  # yarn, factors: scales cos and sin
    factors: tuple[float, ...] = ()  # factors: what each of the rotated / 2 frequencies is divided by
    long_factors: tuple[float, ...] = ()  # in place of these, where contexts are longer; see `ModelSpec.for_context`
    rotated: int | None = None  # how many numbers of a head are rotated, the first ones; None = all


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
    qk_norm_whole: bool = False  # with qk_norm: over all heads together, with a gain for each number of each head
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
    clamp: float = 0.0  # swigluoai: gate is kept below it, up within it
    num_experts: int = 0  # experts: gated perceptrons
    held_experts: range | None = None  # of these, in one of several parts of a model (`parallel/`); None = all
    experts_per_token: int = 0
    normed_shares: bool = True  # experts: the chosen ones' shares add up to 1
    router_bias: bool = False
    shared_size: int = 0  # experts: of a gated perceptron that every token has beside its experts; 0: there is none
    shared_gate: bool = False  # what that one gives is multiplied with the sigmoid of one more product

    @property
    def own_experts(self) -> range:
        """Those whose weights there are."""
        return range(self.num_experts) if self.held_experts is None else self.held_experts


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
    long_positions: int = 0  # likewise, with the `long_factors` of its rope; 0: it has none
    gain_offset: float = 0.0  # added to every norm's gain when weights are loaded; nothing after that knows it
    tie_embeddings: bool = False
    embedding_scale: float = 1.0  # embeddings are multiplied with it, rounded to the model's dtype
    residual_scale: float = (
        1.0  # what attention and mixer add; taken into o_proj's and down_proj's weights when they are loaded
    )
    logit_scale: float = 1.0  # logits are multiplied with it,
    logit_soft_cap: float | None = None  # then kept within this by a tanh
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
            if mixer.activation == "swigluoai" and mixer.kind == "plain":
                raise ModelError("a plain mixer cannot have the activation swigluoai, which needs a gate")
            if mixer.kind == "experts" and not 1 <= mixer.experts_per_token <= mixer.num_experts:
                raise ModelError(
                    f"a token cannot have {mixer.experts_per_token} of {mixer.num_experts} experts: at least 1, at most all"
                )
        if any(layer.residual == "parallel" and layer.norm_after for layer in self.layers):
            raise ModelError("layers with parallel residuals and norms after them are not supported")
        if self.residual_scale != 1 and any(layer.norm_after for layer in self.layers):
            raise ModelError(
                "a residual_scale with norms after attention and mixer is not supported: they would undo it"
            )
        for rope in self.ropes:
            if rope is not None:
                self._check_rope(rope)
        if len({(a.num_heads, a.num_kv_heads, a.head_dim) for a in self._attentions}) > 1:
            raise ModelError("layers with different numbers or sizes of heads are not supported")

    def _check_rope(self, rope: RopeSpec) -> None:
        rotated = self.head_dim if rope.rotated is None else rope.rotated
        if rotated % 2 or not 0 < rotated <= self.head_dim:
            raise ModelError(f"rotary positions need an even part of head_dim {self.head_dim}, not {rotated}")
        for factors in (rope.factors, rope.long_factors):
            if factors and len(factors) != rotated // 2:
                raise ModelError(f"rope scaling has {len(factors)} factors, but {rotated // 2} frequencies")

    def for_context(self, tokens: int | None) -> ModelSpec:
        """The same model for requests of up to so many tokens: with the long factors of its rope if that is more than the
        original context. Which factors a model has changes every position, so it is decided once, not by request."""
        if not self.long_positions or tokens is None or tokens <= self.max_positions:
            return self

        def long(rope: RopeSpec | None) -> RopeSpec | None:
            return replace(rope, factors=rope.long_factors, long_factors=()) if rope and rope.long_factors else rope

        layers = tuple(replace(each, attention=replace(each.attention, rope=long(each.attention.rope)))
                       for each in self.layers)  # fmt: skip
        return replace(self, layers=layers, max_positions=self.long_positions, long_positions=0)

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
