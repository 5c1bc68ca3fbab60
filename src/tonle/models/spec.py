"""`ModelSpec`: what a model is, in numbers. Families declare their differences in one table, `FAMILIES`.

Does: hold the shape of a model and how its positions are encoded. Does not: read files (`read_spec.py`), hold weights,
or need torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tonle.errors import ModelError

RopeKind = Literal["default", "linear", "llama3", "yarn", "factors"]


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
class ModelSpec:
    """The shape of one model. Sizes count numbers, not bytes."""

    architecture: str  # the transformers class, also for GGUF files
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeSpec
    windows: tuple[int | None, ...]  # per layer: how many of the latest tokens a token sees; None = all
    max_positions: int  # longest sequence the model was made for, tokens
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    dtype: str = "float32"  # as stored: a torch name, or a GGML type such as Q4_1

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
                     "head_dim", "max_positions"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ModelError(f"the model's {name} must be at least 1, not {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key-value heads evenly"
            )
        if self.head_dim % 2:
            raise ModelError(f"rotary positions need an even head_dim, not {self.head_dim}")
        if len(self.windows) != self.num_layers:
            raise ModelError(f"the model names {len(self.windows)} attention windows for {self.num_layers} layers")

    @property
    def sliding_window(self) -> int | None:
        """The narrowest window of any layer; None if every layer sees everything."""
        return min((window for window in self.windows if window is not None), default=None)

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


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
