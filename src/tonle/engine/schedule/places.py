"""`Places`: the sequences that run and wait, and what those that run hold: a row, KV blocks, a slot for their adapter.

Does: give places and take them back, count them, note prefix hits and misses. Does not: decide who gets one next (the scheduler
does), or touch a tensor.
"""

from __future__ import annotations

from tonle.engine.kv.block_pool import BlockPool
from tonle.engine.plan import Join, Plan
from tonle.engine.schedule.adapter_slots import AdaptersInMemory, AdapterSlots
from tonle.engine.schedule.limits import SchedulerLimits
from tonle.engine.schedule.prefix_sharing import PrefixSharing
from tonle.engine.schedule.queue import WaitingQueue
from tonle.engine.schedule.sequence import Sequence
from tonle.engine.schedule.step_notes import StepNotes
from tonle.telemetry.time_spent import MISS_REASONS


def _importance(sequence: Sequence) -> tuple[float, int]:
    """Larger gives way earlier."""
    return sequence.key, sequence.request.handle


class Places:
    def __init__(self, limits: SchedulerLimits, pool: BlockPool, adapters: AdaptersInMemory | None) -> None:
        self.limits = limits
        self.pool = pool
        self.notes: StepNotes | None = None  # where the time of requests goes, if that is noted
        self.waiting = WaitingQueue()
        self.slots = AdapterSlots(limits.num_adapter_slots, adapters, self.waiting)
        self.running: dict[int, Sequence] = {}  # by handle, in order of admission
        # By handle: without a row, but with blocks (`loading.py`).
        self.loading: dict[int, Sequence] = {}
        self.loaded_waiting: dict[int, Sequence] = {}  # among `waiting`, too
        self.leases: dict[int, list[int]] = {}  # the blocks of sequences that have ended
        # First scheduled since last asked: handle -> now, cached tokens.
        self.started: dict[int, tuple[float, int]] = {}
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.loaded_tokens = 0  # prompt tokens that came from elsewhere
        self.prefix_missed: dict[str, int] = dict.fromkeys(MISS_REASONS, 0)  # another dict after each change
        self.num_preemptions = 0
        self._prefixes = PrefixSharing(limits, pool)
        self._rows = list(range(limits.max_num_seqs - 1, -1, -1))  # free

    # -- given

    def _fits(self, sequence: Sequence) -> bool:
        """Whether there are blocks for all that is known of it. It holds its cached prefix then."""
        self._prefixes.hold(sequence)
        need = -(-sequence.num_known // self.limits.block_size) - len(sequence.blocks)
        while self.pool.num_available < need and (other := self._least_important_load(sequence.key)) is not None:
            self._preempt(other)
        fits = self.pool.num_available >= need
        if not fits:
            self.pool.release(sequence.rewind())
        return fits

    def _make_room(self, sequence: Sequence) -> bool:
        """A row, blocks and a slot for its adapter, at the cost of running sequences if need be. It holds its cached prefix
        afterwards."""
        adapter = sequence.request.adapter
        while True:
            self._prefixes.hold(sequence)
            need = -(-sequence.num_known // self.limits.block_size) - len(sequence.blocks)
            if self._rows and self.pool.num_available >= need and (not adapter or self.slots.force(adapter)):
                return True
            self.pool.release(sequence.rewind())
            others = [*self.running.values(), *self.loading.values(), *self.loaded_waiting.values()]
            if not others:
                return False
            self._preempt(max(others, key=_importance))

    def _admit(self, sequence: Sequence, plan: Plan, now: float) -> None:
        """`sequence` waits no more, and holds its cached prefix."""
        self.running[sequence.request.handle] = sequence
        self.loaded_waiting.pop(sequence.request.handle, None)
        sequence.may_load = False
        need = -(-sequence.num_known // self.limits.block_size) - len(sequence.blocks)
        sequence.blocks += [self.pool.take() for _ in range(need)]
        sequence.row = self._rows.pop()
        request = sequence.request
        slot = self.slots.hold(request.adapter, plan) if request.adapter else -1
        join = Join(sequence.row, request.prompt, sequence.output, request.config, request.seed, slot, request.pooling)
        plan.joins.append(join)
        plan.new_blocks.append((sequence.row, 0, list(sequence.blocks)))
        if not sequence.started:
            sequence.started = True
            sequence.num_cached = sequence.num_computed
            self.started[request.handle] = (now, sequence.num_cached)
            self.prefix_queries += len(request.prompt)
            self.prefix_hits += sequence.num_cached - sequence.num_loaded
            self.loaded_tokens += sequence.num_loaded
            missed = self._prefixes.missed(sequence)
            self.prefix_missed = {why: self.prefix_missed[why] + missed.get(why, 0) for why in MISS_REASONS}
            if self.notes is not None and sequence.notes is not None:
                self.notes.without_token[request.handle] = sequence
                sequence.notes.scheduled(min(sequence.num_cached, len(request.prompt)), missed)
        elif sequence.notes is not None:
            sequence.notes.get_row_again()

    def _grow(self, sequence: Sequence, count: int, plan: Plan) -> bool:
        """Blocks for `count` more tokens, taken from the least important if need be. False: it lost its own row."""
        have = len(sequence.blocks)
        need = -(-(sequence.num_computed + count) // self.limits.block_size) - have
        if need <= 0:
            return True
        while self.pool.num_available < need:
            scheduled = {s.request.handle for s in plan.sequences}
            victims = [s for h, s in self.running.items() if h not in scheduled]
            victims += [*self.loading.values(), *self.loaded_waiting.values()]
            victim = max(victims, key=_importance)
            self._preempt(victim)
            if victim is sequence:
                return False
        assert sequence.row is not None
        sequence.blocks += [self.pool.take() for _ in range(need)]
        plan.new_blocks.append((sequence.row, have, sequence.blocks[have:]))
        return True

    def _grow_for_drafts(self, sequence: Sequence, count: int, plan: Plan) -> int:
        """Of `count` draft tokens after those it has computed, how many have room. No sequence is preempted for them, and as many
        blocks are left as there are sequences that may need their next one."""
        have, bs = len(sequence.blocks), self.limits.block_size
        room = have * bs - sequence.num_computed
        if count > room:
            spare = self.pool.num_available - len(self.running)
            if (need := min(-(-(count - room) // bs), spare)) > 0:
                assert sequence.row is not None
                sequence.blocks += [self.pool.take() for _ in range(need)]
                plan.new_blocks.append((sequence.row, have, sequence.blocks[have:]))
                room += need * bs
        return min(count, room)

    # -- taken back

    def _preempt(self, sequence: Sequence) -> None:
        if sequence.row is None:
            self._unload(sequence)
        else:
            self._set_back(sequence)
            self.num_preemptions += 1

    def _unload(self, sequence: Sequence) -> None:
        """Its prefix is not brought any more, or was brought for nothing: it waits to be computed as any other."""
        handle = sequence.request.handle
        if self.loading.pop(handle, None) is not None:
            self._stop_loading(handle)
            self._wait_again(sequence)
        else:
            del self.loaded_waiting[handle]
        sequence.num_loaded = 0
        self.pool.release(sequence.rewind())

    def _stop_loading(self, handle: int) -> None:
        """It is not in `loading` any more, and its blocks are about to be released."""

    def _wait_again(self, sequence: Sequence) -> None:
        """It was in `loading`."""
        self.waiting.push(sequence)
        if sequence.notes is not None:
            sequence.notes.stand_aside(None)

    def _least_important_load(self, key: float) -> Sequence | None:
        """Of the sequences that hold blocks without a row, if it is less important than `key`."""
        loads = [s for s in (*self.loading.values(), *self.loaded_waiting.values()) if s.key > key]
        return max(loads, key=_importance, default=None)

    def _set_back(self, sequence: Sequence) -> None:
        """It holds nothing any more, and waits."""
        del self.running[sequence.request.handle]
        self._vacate(sequence)
        sequence.own_text = None  # any number may wait, and it is made again
        self.waiting.push(sequence)
        if sequence.notes is not None:
            sequence.notes.lose_row()

    def _vacate(self, sequence: Sequence) -> None:
        assert sequence.row is not None
        self._rows.append(sequence.row)
        self.pool.release(sequence.rewind())
        if sequence.request.adapter:
            self.slots.release(sequence.request.adapter)

    # -- truth

    def verify(self) -> None:
        """Recount rows, blocks, slots of adapters and progress; raises AssertionError on any disagreement."""
        rowless = [*self.loading.values(), *self.loaded_waiting.values()]
        holders = [*(s.blocks for s in (*self.running.values(), *rowless)), *self.leases.values()]
        self.pool.verify(holders)
        _verify_rowless(rowless, self.limits)
        assert all(handle not in self.waiting for handle in self.loading), "a sequence loads and waits"
        assert all(handle in self.waiting for handle in self.loaded_waiting), "a loaded sequence is lost"
        self.slots.verify(self.running.values())
        self.waiting.verify()
        _verify_rows(list(self.running.values()), self._rows, self.limits)


def _verify_rowless(loads: list[Sequence], limits: SchedulerLimits) -> None:
    for s in loads:
        assert s.row is None and not s.done and not s.num_pending and s.num_computed < s.num_known
        assert len(s.blocks) * limits.block_size >= s.num_known, "a load that needs more than a row"


def _verify_rows(running: list[Sequence], free: list[int], limits: SchedulerLimits) -> None:
    rows = [s.row for s in running]
    assert None not in rows and len(set(rows)) == len(rows), "two sequences share a row"
    assert sorted([*free, *(r for r in rows if r is not None)]) == list(range(limits.max_num_seqs))
    for s in running:
        assert not s.done and 0 <= s.num_computed <= s.num_known <= limits.context_length + 1
        assert len(s.blocks) * limits.block_size >= s.num_computed
