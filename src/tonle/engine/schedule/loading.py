"""`LoadingPlaces`: sequences that hold blocks without a row: their prefix comes from elsewhere, or another engine may fetch it.

  loading  keys and values of its prefix are on their way into blocks that it holds; it is in no queue and in no plan
  loaded   they have come: it waits in the queue as any other, and keeps its blocks
  leased   it has ended, and its full blocks are kept for an engine that fetches them

Does: give blocks to these and take them back. Does not: copy anything, or know where keys and values come from (`engine/kv`); or
know the time: whoever copies ends what takes too long.
"""

from __future__ import annotations

from typing import Protocol

from tonle.engine.kv.block_pool import BlockPool
from tonle.engine.request import Request
from tonle.engine.schedule.adapter_slots import AdaptersInMemory
from tonle.engine.schedule.limits import SchedulerLimits
from tonle.engine.schedule.places import Places
from tonle.engine.schedule.sequence import Sequence


class FoundBlocks(Protocol):
    """Blocks that can be brought, and have not been asked for yet."""

    @property
    def num_blocks(self) -> int: ...  # one at least


class IncomingBlocks(Protocol):
    """Brings blocks of prefixes from elsewhere (`engine/kv/incoming.py`). Nothing here waits."""

    def find(self, request: Request, digests: list[bytes], num_held: int) -> FoundBlocks | None:
        """Of the full blocks with these digests all but the first `num_held` are wanted, if any: those that can be brought, as
        many as follow on one another; None: none. Asked again while blocks for it are lacking."""
        ...

    def begin(self, handle: int, found: FoundBlocks, blocks: list[int]) -> None:
        """Bring them into these blocks, and then call `Scheduler.loaded`: also if they do not come."""
        ...

    def drop(self, handle: int) -> None:
        """Its blocks belong to others from now on: nothing more may be written to them, nor `loaded` be called."""
        ...


class LoadingPlaces(Places):
    def __init__(self, limits: SchedulerLimits, pool: BlockPool, adapters: AdaptersInMemory | None) -> None:
        super().__init__(limits, pool, adapters)
        self.incoming: IncomingBlocks | None = None  # None: every prompt is computed here

    # -- from elsewhere

    def loaded(self, handle: int, num_blocks: int) -> None:
        """The first `num_blocks` of those that were to be brought are there, and no more will come. The rest is computed."""
        sequence = self.loading.pop(handle)
        sequence.num_loaded = num_blocks * self.limits.block_size
        sequence.num_computed += sequence.num_loaded
        if num_blocks:
            self.loaded_waiting[handle] = sequence
            self._prefixes.publish(sequence)
        else:
            self.pool.release(sequence.rewind())
        self._wait_again(sequence)

    def _begin_loads(self) -> None:
        """The first in the queue do not wait there while their prefixes are brought: those behind them go on."""
        while (sequence := self.waiting.peek()) is not None and sequence.may_load and self._begin_load(sequence):
            pass

    def _begin_load(self, sequence: Sequence) -> bool:
        """Whether it has left the queue. It holds blocks for all that is known of it then, so it needs only a row afterwards."""
        assert self.incoming is not None
        request, handle = sequence.request, sequence.request.handle
        digests = self._prefixes.wanted(sequence)
        self._prefixes.hold(sequence)
        held = len(sequence.blocks)
        found = self.incoming.find(request, digests, held)
        sequence.may_load = found is not None
        if found is None or not self._fits(sequence):
            self.pool.release(sequence.rewind())
            return False
        assert len(sequence.blocks) == held, "it found blocks that were not there a moment ago"
        need = -(-sequence.num_known // self.limits.block_size) - held
        sequence.blocks += [self.pool.take() for _ in range(need)]
        sequence.may_load = False
        self.waiting.pop()
        self.loading[handle] = sequence
        if sequence.notes is not None:
            sequence.notes.stand_aside("loading")
        self.incoming.begin(handle, found, sequence.blocks[held : held + found.num_blocks])
        return True

    def _stop_loading(self, handle: int) -> None:
        if self.incoming is not None:
            self.incoming.drop(handle)

    def uses_adapter(self, adapter: int) -> bool:
        """Whether a sequence runs, waits or loads with it."""
        return self.slots.is_used(adapter) or any(s.request.adapter == adapter for s in self.loading.values())

    # -- for others

    def _lease(self, sequence: Sequence) -> bool:
        """It ends: the full blocks of its prompt are kept until `end_lease`. False: it has none."""
        num_full = min(sequence.num_computed, len(sequence.request.prompt)) // self.limits.block_size
        blocks = sequence.blocks[:num_full]
        for block in blocks:
            self.pool.hold(block)
        if blocks:
            self.leases[sequence.request.handle] = blocks
        return bool(blocks)

    def end_lease(self, handle: int) -> None:
        self.pool.release(self.leases.pop(handle))

    @property
    def num_leased_blocks(self) -> int:
        return sum(len(blocks) for blocks in self.leases.values())
