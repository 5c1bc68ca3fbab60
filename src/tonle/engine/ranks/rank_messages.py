"""What rank 0 and the other ranks tell each other, over each rank's control socket.

To a rank: `RankSettings`, `Begin`, then `ComputeStep`, `AdapterParts` and `ReleaseCache` until the socket closes. From a rank:
`Loaded` when it has its weights, `Ready` when it has done what `Begin` asks for, or `Failed`; nothing after that.
"""

from __future__ import annotations

import msgspec
import numpy as np
import torch

from tonle.config.engine import EngineConfig
from tonle.engine.messages import Failed
from tonle.models.adapters.adapter import Adapter, AdapterPart
from tonle.models.inputs import StepInputs
from tonle.models.source import ModelSource


class RankSettings(msgspec.Struct):
    """The first message to a rank."""

    source: ModelSource
    config: EngineConfig
    rank: int
    store: str  # the file where the ranks meet
    timeout_s: float  # of everything that ranks do together
    num_threads: int  # on a CPU
    log_level: str
    log_json: bool


class Loaded(msgspec.Struct, tag="loaded", array_like=True):
    """The rank has its weights."""

    pool_bytes: int  # that it could have for keys and values


class Begin(msgspec.Struct, tag="begin", array_like=True):
    """All ranks have their weights. This is how large their caches are, and how many adapters they take."""

    num_blocks: int
    kv_dtype: str  # float32, as torch names it
    num_adapter_slots: int
    max_lora_rank: int


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """The rank has its cache, and is about to meet the others."""


class ComputeStep(msgspec.Struct, tag="step", array_like=True):
    """`StepInputs`, but for `hidden_indices`: only rank 0 looks at hidden states. Tensors as their bytes."""

    tokens: bytes  # int64, as the next two
    positions: bytes
    slots: bytes
    row_starts: list[int]
    context_lens: list[int]
    block_tables: bytes  # int32, R rows
    num_decode: int
    logit_indices: bytes  # int64
    adapter_slots: list[int] | None

    @classmethod
    def of(cls, inputs: StepInputs) -> ComputeStep:
        return cls(
            tokens=_bytes(inputs.tokens),
            positions=_bytes(inputs.positions),
            slots=_bytes(inputs.slots),
            row_starts=inputs.row_starts,
            context_lens=inputs.context_lens,
            block_tables=_bytes(inputs.block_tables),
            num_decode=inputs.num_decode,
            logit_indices=_bytes(inputs.logit_indices),
            adapter_slots=inputs.adapter_slots,
        )

    def inputs(self, device: torch.device) -> StepInputs:
        return StepInputs(
            tokens=_tensor(self.tokens, np.int64, device),
            positions=_tensor(self.positions, np.int64, device),
            slots=_tensor(self.slots, np.int64, device),
            row_starts=self.row_starts,
            context_lens=self.context_lens,
            block_tables=_tensor(self.block_tables, np.int32, device).view(len(self.context_lens), -1),
            num_decode=self.num_decode,
            logit_indices=_tensor(self.logit_indices, np.int64, device),
            adapter_slots=self.adapter_slots,
        )


class SentPart(msgspec.Struct, array_like=True):
    """An `AdapterPart`, float32."""

    layer: int
    module: str
    rank: int
    a: bytes
    b: bytes


class AdapterParts(msgspec.Struct, tag="adapter", array_like=True):
    """Some of the parts of an adapter; once `is_last` comes, the slot has all of them, and no others."""

    slot: int
    parts: list[SentPart]
    is_last: bool

    @classmethod
    def messages(cls, slot: int, adapter: Adapter | None) -> list[AdapterParts]:
        """One for each layer: an adapter may be larger than a message. None: the slot is emptied."""
        by_layer: dict[int, list[SentPart]] = {}
        for (layer, module), part in () if adapter is None else adapter.parts.items():
            sent = SentPart(layer, module, part.rank, _bytes(part.a), _bytes(part.b))
            by_layer.setdefault(layer, []).append(sent)
        return [*(cls(slot, parts, is_last=False) for parts in by_layer.values()), cls(slot, [], is_last=True)]


def adapter_of(sent: list[SentPart]) -> Adapter:
    cpu = torch.device("cpu")
    parts = {
        (each.layer, each.module): AdapterPart(
            _tensor(each.a, np.float32, cpu).view(each.rank, -1), _tensor(each.b, np.float32, cpu).view(-1, each.rank)
        )
        for each in sent
    }
    return Adapter("", parts)  # only rank 0 tells adapters apart


class ReleaseCache(msgspec.Struct, tag="release", array_like=True):
    """The cache holds nothing of worth: its memory is the system's until it is used again."""


ToRank = Begin | ComputeStep | AdapterParts | ReleaseCache
FromRank = Loaded | Ready | Failed


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().contiguous().numpy().tobytes()


def _tensor(data: bytes, dtype: type[np.generic], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype).copy()).to(device)
