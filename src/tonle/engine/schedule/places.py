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


class Places:
    def __init__(self, limits: SchedulerLimits, pool: BlockPool, adapters: AdaptersInMemory | None) -> None:
        self.limits = limits
        self.pool = pool
        self.notes: StepNotes | None = None  # where the time of requests goes, if that is noted
        self.waiting = WaitingQueue()
        self.slots = AdapterSlots(limits.num_adapter_slots, adapters, self.waiting)
        self.running: dict[int, Sequence] = {}  # by handle, in order of admission
        # First scheduled since last asked: handle -> now, cached tokens.
        self.started: dict[int, tuple[float, int]] = {}
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.prefix_missed: dict[str, int] = dict.fromkeys(MISS_REASONS, 0)  # another dict after each change
        self.num_preemptions = 0
        self._prefixes = PrefixSharing(limits, pool)
        self._rows = list(range(limits.max_num_seqs - 1, -1, -1))  # free

    # -- given

    def _fits(self, sequence: Sequence) -> bool:
        """Whether there are blocks for all that is known of it. It holds its cached prefix then."""
        self._prefixes.hold(sequence)
        fits = self.pool.num_available >= -(-sequence.num_known // self.limits.block_size) - len(sequence.blocks)
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
            if not self.running:
                return False
            self._preempt(max(self.running.values(), key=lambda s: (s.key, s.request.handle)))

    def _admit(self, sequence: Sequence, plan: Plan, now: float) -> None:
        """`sequence` waits no more, and holds its cached prefix."""
        self.running[sequence.request.handle] = sequence
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
            self.prefix_hits += sequence.num_cached
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
            victim = max(victims, key=lambda s: (s.key, s.request.handle))
            self._preempt(victim)
            if victim is sequence:
                return False
        assert sequence.row is not None
        sequence.blocks += [self.pool.take() for _ in range(need)]
        plan.new_blocks.append((sequence.row, have, sequence.blocks[have:]))
        return True

    # -- taken back

    def _preempt(self, sequence: Sequence) -> None:
        self._set_back(sequence)
        self.num_preemptions += 1

    def _set_back(self, sequence: Sequence) -> None:
        """It holds nothing any more, and waits."""
        del self.running[sequence.request.handle]
        self._vacate(sequence)
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
        self.pool.verify(s.blocks for s in self.running.values())
        self.slots.verify(self.running.values())
        self.waiting.verify()
        _verify_rows(list(self.running.values()), self._rows, self.limits)


def _verify_rows(running: list[Sequence], free: list[int], limits: SchedulerLimits) -> None:
    rows = [s.row for s in running]
    assert None not in rows and len(set(rows)) == len(rows), "two sequences share a row"
    assert sorted([*free, *(r for r in rows if r is not None)]) == list(range(limits.max_num_seqs))
    for s in running:
        assert not s.done and 0 <= s.num_computed <= s.num_known <= limits.context_length + 1
        assert len(s.blocks) * limits.block_size >= s.num_computed
