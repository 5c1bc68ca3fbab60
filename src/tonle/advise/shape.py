"""`ModelShape`: the sizes of a model that memory and speed depend on, and what follows from them by counting.

Does: parameters, weight bytes by precision, KV bytes per token, operations per token. Does not: read files
(`read_model.py`), know names (`known_shapes.py`) or devices.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tonle.advise.precision import KvPrecision, Precision
from tonle.errors import ConfigError

_BF16_BYTES = 2


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Counts are numbers, not bytes. `block_*` are the layers' weights: what quantization makes smaller."""

    name: str
    origin: str  # where the numbers come from, for people
    architecture: str  # as config.json names it; "" if not known
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_size: int
    block_parameters: int  # of all layers
    active_block_parameters: int  # of those, the ones that one token is multiplied with: fewer with experts
    embedding_parameters: int  # of the input table: looked up, not multiplied
    head_parameters: int  # of the output matrix; it is the input table itself if `tied`
    tied: bool
    context_length: int
    experts: int = 0  # of each layer; 0: no mixture
    experts_per_token: int = 0
    file_bytes: int | None = None  # of a quantized file: what is stored
    stored_as: str | None = None  # how its files say the weights are stored: "fp8", "int4", "Q4_1"; None: 16 bits

    def __post_init__(self) -> None:
        for name in ("layers", "hidden_size", "heads", "kv_heads", "head_size", "block_parameters", "context_length"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of the model must be at least 1, not {getattr(self, name)}", param=name)
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"{self.heads} heads cannot share {self.kv_heads} KV heads evenly: check heads and kv_heads",
                param="kv_heads",
            )

    @property
    def parameters(self) -> int:
        return self.block_parameters + self.embedding_parameters + (0 if self.tied else self.head_parameters)

    @property
    def active_parameters(self) -> int:
        """That one token is multiplied with, output matrix included."""
        return self.active_block_parameters + self.head_parameters

    @property
    def attention_size(self) -> int:
        """Numbers of all query heads together."""
        return self.heads * self.head_size

    def weight_bytes(self, precision: Precision) -> int:
        """In memory. Embeddings and the output matrix stay in 16 bits, as in published quantized checkpoints."""
        ends = self.parameters - self.block_parameters
        return round(self.block_parameters * precision.bytes_per_weight + ends * _BF16_BYTES)

    def read_bytes(self, precision: Precision, tokens: int = 1) -> float:
        """Weights that a step of so many tokens reads: all but the input table; of experts, those that some token needs."""
        blocks = self.active_block_parameters
        if self.experts > self.experts_per_token and tokens > 1:
            idle = (1 - self.experts_per_token / self.experts) ** tokens  # chance that no token picks a certain expert
            blocks = self.block_parameters - round(self._expert_parameters * self.experts * idle)
        return blocks * precision.bytes_per_weight + self.head_parameters * _BF16_BYTES

    def kv_bytes_per_token(self, precision: KvPrecision) -> int:
        return round(2 * self.layers * self.kv_heads * self.head_size * precision.bytes_per_number)

    @property
    def _expert_parameters(self) -> float:
        """Of one expert, over all layers: total and active ones differ by the experts that are not asked."""
        return (self.block_parameters - self.active_block_parameters) / (self.experts - self.experts_per_token)


def dense_shape(
    *,
    name: str,
    origin: str,
    layers: int,
    hidden_size: int,
    heads: int,
    kv_heads: int,
    intermediate_size: int,
    vocab_size: int,
    context_length: int,
    head_size: int | None = None,
    tied: bool = False,
    experts: int = 0,
    experts_per_token: int = 0,
    shared_intermediate: int = 0,
    **others: Any,
) -> ModelShape:
    """From the sizes that a `config.json` names: gated mixers (three matrices), `experts` of `intermediate_size` each."""
    head_size = head_size or hidden_size // heads
    attention = hidden_size * head_size * (2 * heads + 2 * kv_heads)
    mixer = 3 * hidden_size * intermediate_size
    norms = 2 * hidden_size
    shared = 3 * hidden_size * shared_intermediate
    router = hidden_size * experts
    fixed = attention + norms + shared + router
    return ModelShape(
        name=name,
        origin=origin,
        layers=layers,
        hidden_size=hidden_size,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        block_parameters=layers * (fixed + mixer * (experts or 1)),
        active_block_parameters=layers * (fixed + mixer * (experts_per_token if experts else 1)),
        embedding_parameters=vocab_size * hidden_size,
        head_parameters=vocab_size * hidden_size,
        tied=tied,
        context_length=context_length,
        experts=experts,
        experts_per_token=experts_per_token,
        **others,
    )


def shape_of_numbers(
    *,
    parameters: int,
    layers: int,
    kv_heads: int,
    head_size: int,
    heads: int | None = None,
    hidden_size: int | None = None,
    active_parameters: int | None = None,
    context_length: int | None = None,
    vocab_size: int | None = None,
) -> ModelShape:
    """From what a model card says. What is not given is estimated, and `origin` says so."""
    active = active_parameters or parameters
    if active > parameters:
        raise ConfigError(
            f"--active-params ({active:,}) cannot be more than --params ({parameters:,})", param="active_params"
        )
    guesses = []
    if hidden_size is None:
        # A layer has about 12 · hidden² weights.
        hidden_size = heads * head_size if heads else max(64, round((active / (12 * layers)) ** 0.5 / 64) * 64)
        guesses.append(f"hidden size {hidden_size:,}")
    if heads is None:
        heads = max(kv_heads, round(hidden_size / head_size / kv_heads) * kv_heads)
        guesses.append(f"{heads} heads")
    experts = 0
    if active < parameters:  # as if each token asked for one of so many: a large batch reads all of them
        experts = max(2, round(parameters / active))
        guesses.append(f"1 of {experts} experts per token")
    ends = (vocab_size or 0) * hidden_size
    if 2 * ends >= active:
        raise ConfigError(
            f"--vocab-size {vocab_size:,} × hidden size {hidden_size:,} is more than the model's parameters; check --params",
            param="vocab_size",
        )
    return ModelShape(
        name="your model",
        origin="your numbers" + (f"; estimated: {', '.join(guesses)}" if guesses else ""),
        architecture="",
        layers=layers,
        hidden_size=hidden_size,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        block_parameters=parameters - 2 * ends,
        active_block_parameters=active - 2 * ends,
        embedding_parameters=ends,
        head_parameters=ends,
        tied=False,
        context_length=context_length or 131_072,
        experts=experts,
        experts_per_token=min(1, experts),
    )
