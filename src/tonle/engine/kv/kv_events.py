"""KV events: which prefixes an engine has, told to routers outside in vLLM's msgpack layout.

Does: note what the block pool publishes and drops, and hand over one batch per step. Does not: send (`event_publisher.py`), or
decide anything.

An index built from the events never says that a block is there which is not: an engine that starts, and one whose events could
not be sent, begins its next batch with `AllBlocksCleared`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal, Protocol

import msgspec

DEVICE = "GPU"  # vLLM's word for the memory that an engine computes in, whatever the device


class BlockStored(msgspec.Struct, tag=True):
    """Blocks that follow each other. The fields and their order are vLLM's."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None  # of the block before the first; None: they begin a prompt
    token_ids: list[int]  # of all of them
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, tag=True):
    block_hashes: list[bytes]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


Event = BlockStored | BlockRemoved | AllBlocksCleared
Layout = Literal["array", "map"]


def encode(ts: float, events: list[Event], layout: Layout) -> bytes:
    """A batch: [unix seconds, events, data-parallel rank]. An event is [its name, its fields in order], or a map with its name
    under `type`."""
    body: list[Any] = [*events]
    if layout == "array":
        body = [[type(event).__name__, *msgspec.structs.astuple(event)] for event in events]
    return msgspec.msgpack.encode([ts, body, 0])


class Batches(Protocol):
    def put(self, ts: float, events: list[Event]) -> bool:
        """False: there is no room for it. Never waits."""
        ...

    def close(self) -> None: ...


class KvEvents:
    """The pool's observer."""

    def __init__(self, publisher: Batches, block_size: int, adapter_name: Callable[[int], str]) -> None:
        self._publisher = publisher
        self._block_size = block_size
        self._adapter_name = adapter_name
        self._events: list[Event] = []  # of this step
        self._is_new = True  # subscribers may remember blocks that are not there
        self.num_sent = 0  # batches
        self.num_lost = 0

    def stored(self, digest: bytes, parent: bytes | None, tokens: list[int], adapter: int) -> None:
        last = self._events[-1] if self._events else None
        if type(last) is BlockStored and last.block_hashes[-1] == parent:
            last.block_hashes.append(digest)
            last.token_ids += tokens
            return
        number, name = (adapter, self._adapter_name(adapter)) if adapter else (None, None)
        self._events.append(BlockStored([digest], parent, tokens, self._block_size, number, DEVICE, name))

    def removed(self, digest: bytes) -> None:
        last = self._events[-1] if self._events else None
        if type(last) is BlockRemoved:
            last.block_hashes.append(digest)
        else:
            self._events.append(BlockRemoved([digest], DEVICE))

    def cleared(self) -> None:
        self._events = [AllBlocksCleared()]

    def flush(self) -> None:
        """The step is over."""
        if not self._events:
            return
        events, self._events = self._events, []
        if self._is_new:
            events.insert(0, AllBlocksCleared())
        self._is_new = not self._publisher.put(time.time(), events)
        if self._is_new:
            self.num_lost += 1
        else:
            self.num_sent += 1

    def close(self) -> None:
        self._publisher.close()
