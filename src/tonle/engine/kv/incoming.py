"""`Incoming`: blocks of prefixes on their way into the cache from elsewhere: another engine, host memory, a disk.

Does: ask its sources for what a sequence wants, write what came into the sequence's blocks between steps, end what takes too
long, tell the scheduler. Does not: decide who loads (the scheduler does), or wait: sources work on threads of their own.

The seam for new sources: a `BlockSource`, given to `Incoming`, and a `BlockLoad` for each sequence that it brings blocks for.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tonle.engine.kv.block_copies import BlockCopies
from tonle.engine.request import Request

log = logging.getLogger("tonle.engine")

_MOST_BYTES = 32 * 2**20  # written between two steps: others decode meanwhile
POLL_S = 0.001  # longest sleep of the loop while something is on its way


class BlockLoad(Protocol):
    """The blocks of one sequence. Called on the loop's thread; nothing here waits or raises."""

    @property
    def num_blocks(self) -> int: ...  # that it means to bring, one at least
    @property
    def name(self) -> str: ...  # of the source, for counts
    @property
    def is_over(self) -> bool: ...  # no more will come than `take` gives now
    @property
    def failure(self) -> str | None: ...  # what went wrong, once it is over; None: if fewer came, there were no more

    def begin(self) -> None: ...

    def take(self, most: int) -> torch.Tensor | None:
        """Up to `most` of the blocks that came since, in order: (n, block_bytes) uint8, as `BlockCopies.write` takes them. None:
        none is there."""
        ...

    def end(self, *, used: bool) -> None:
        """Let go of everything, also if it is not over. `used`: all of it was written. Called once."""
        ...


class BlockSource(Protocol):
    def find(self, request: Request, digests: list[bytes], num_held: int) -> BlockLoad | None:
        """As `IncomingBlocks.find`. It has no effect: the load begins with `begin`, if it does."""
        ...

    def close(self) -> None: ...


class LoadEnded(Protocol):
    """What it needs of the scheduler."""

    def loaded(self, handle: int, num_blocks: int) -> None: ...


@dataclass(slots=True)
class _UnderWay:
    load: BlockLoad
    blocks: list[int]
    until_s: float
    num_written: int = 0


class Incoming:
    def __init__(
        self, copies: BlockCopies, sources: list[BlockSource], scheduler: LoadEnded, *, timeout_s: float
    ) -> None:
        self.num_loaded: dict[str, int] = {}  # by source: loads that brought all there was,
        self.num_failed: dict[str, int] = {}  # and others
        self._copies = copies
        self.sources = sources
        self._scheduler = scheduler
        self._timeout_s = timeout_s
        self._under_way: dict[int, _UnderWay] = {}

    # -- asked by the scheduler

    def find(self, request: Request, digests: list[bytes], num_held: int) -> BlockLoad | None:
        """From the first source that has any."""
        return next((load for each in self.sources if (load := each.find(request, digests, num_held))), None)

    def begin(self, handle: int, found: Any, blocks: list[int]) -> None:
        """`found` is what `find` gave."""
        self._under_way[handle] = _UnderWay(found, blocks, time.monotonic() + self._timeout_s)
        found.begin()

    def drop(self, handle: int) -> None:
        self._under_way.pop(handle).load.end(used=False)

    # -- called by the loop

    @property
    def is_busy(self) -> bool:
        return bool(self._under_way)

    def advance(self) -> None:
        """Between steps: write what came, and tell the scheduler of loads that are over."""
        now, room = time.monotonic(), max(1, _MOST_BYTES // self._copies.block_bytes)
        for handle, each in list(self._under_way.items()):
            is_over = each.load.is_over  # asked first: what came before it is taken below
            while room and (data := each.load.take(room)) is not None:
                begin = each.num_written
                each.num_written += len(data)
                room -= len(data)
                self._copies.write(each.blocks[begin : each.num_written], data)
            if each.num_written == len(each.blocks) or (is_over and room):
                self._end(handle, each.load.failure)
            elif now > each.until_s:
                self._end(handle, f"not all of it came within {self._timeout_s:g} s")

    def close(self) -> None:
        for each in self._under_way.values():
            each.load.end(used=False)
        self._under_way.clear()
        for source in self.sources:
            source.close()

    def _end(self, handle: int, failure: str | None) -> None:
        each = self._under_way.pop(handle)
        is_whole = each.num_written == len(each.blocks)
        counts = self.num_loaded if is_whole or failure is None else self.num_failed
        counts[each.load.name] = counts.get(each.load.name, 0) + 1
        if not is_whole and failure is not None:
            log.warning("%d of %d KV blocks came from the %s: %s; the rest of the prompt is computed here",
                        each.num_written, len(each.blocks), each.load.name, failure)  # fmt: skip
        each.load.end(used=is_whole)
        self._scheduler.loaded(handle, each.num_written)
