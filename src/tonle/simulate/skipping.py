"""`SkippingScheduler`: the engine's scheduler, which need not look at sequences to which nothing happens but one more token.

Most of a decoding sequence's steps are alike: no block is full, none is needed, the answer does not end. Planning and committing
such a step adds one to two numbers. Here the sequence is left out for as many steps as that is certain, and gets all of its tokens
at once when it is taken up again, so that every decision is still made by `Scheduler`, on the same state.

Does: say which sequences may be left out, for how long, and what they add to a step. Does not: decide anything. It steps back
(`take_up_all`) where decisions might depend on sequences that are left out: when blocks run short. `tests/property/test_simulate.py`
holds that results are the same with and without it.
"""

from __future__ import annotations

from collections.abc import Callable

from tonle.engine.kv.block_pool import BlockPool
from tonle.engine.plan import Plan
from tonle.engine.schedule import Scheduler, SchedulerLimits, Sequence, TunedLimits
from tonle.simulate.trace import ANSWER_IDS

_LEAST = 2  # steps; fewer are not worth it


class SkippingScheduler(Scheduler):
    """`step` numbers steps: the caller adds one for each plan that it launches."""

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: BlockPool,
        *,
        lag: int,
        on_tokens: Callable[[int, int, int], None],
    ) -> None:
        """`on_tokens(handle, first, end)`: a sequence that is taken up got its tokens of the steps from `first` to before `end`."""
        super().__init__(limits, pool, ())
        self.step = 0
        self.num_left_out = 0
        self.left_out_reads = 0  # earlier tokens of those left out: what attention reads for them in the next step
        self.enabled = limits.max_num_batched_tokens >= limits.max_num_seqs  # else some may have to wait for a step
        self.in_flight: Plan | None = None  # launched and not read, with `lag` 1
        self._lag = lag
        self._on_tokens = on_tokens
        self._taken_up: dict[int, Sequence] = {}  # running, and not left out
        self._left_out: dict[int, tuple[Sequence, int]] = {}  # by handle, with the first step that it is left out of
        self._calendar: dict[int, list[int]] = {}  # step -> handles to take up before it

    @property
    def is_quiet(self) -> bool:
        """The next plan would have no rows but those left out, and admit no sequence."""
        return not self._taken_up and self.step not in self._calendar and (not self.waiting or not self._rows)

    def plan(self, now: float) -> Plan:
        for handle in self._calendar.pop(self.step, ()):
            self._take_up(handle)
        if self.num_left_out:
            if self.pool.num_available < len(self._taken_up):  # sequences may have to be preempted
                self.take_up_all()
            # Those left out are planned first, as all that decode are, with one token each.
            budget = self.limits.max_num_batched_tokens - self.num_left_out
            self.tuned = _Rest(budget, 1.0, self.limits.max_num_seqs)
        plan = super().plan(now)
        self.tuned = None
        return plan

    def leave_out(self) -> None:
        """After a commit, before the next plan: leave out those to which nothing will happen for some steps."""
        if not self.enabled:
            return
        bs, lag = self.limits.block_size, self._lag
        for handle, sequence in list(self._taken_up.items()):
            known, computed = len(sequence.tokens), sequence.num_computed
            if sequence.num_pending != lag or known + lag - computed != 1 or sequence.num_output == 0:
                continue
            # `known` and `computed` grow by one in each step. None of these may be reached:
            steps = min(len(sequence.blocks) * bs - computed, sequence.max_tokens - 1 - known)
            if self.limits.prefix_caching:
                steps = min(steps, (sequence.num_named + 1) * bs - 1 - computed)
            if steps < _LEAST:
                continue
            del self._taken_up[handle]
            self._left_out[handle] = (sequence, self.step)
            self._calendar.setdefault(self.step + steps, []).append(handle)
            self.num_left_out += 1
            self.left_out_reads += computed

    def launched_step(self) -> None:
        """The plan made last was launched."""
        self.step += 1
        self.left_out_reads += self.num_left_out

    def take_up_all(self) -> None:
        """All sequences stand as if none had ever been left out."""
        for handle in list(self._left_out):
            self._take_up(handle)
        self._taken_up = dict(self.running)
        self._calendar.clear()

    def _take_up(self, handle: int) -> None:
        sequence, first = self._left_out.pop(handle)
        steps = self.step - first
        self.num_left_out -= 1
        self.left_out_reads -= sequence.num_computed + steps
        self._taken_up[handle] = sequence
        if not steps:
            return
        # Of the steps it was left out of, the last `lag` have been launched and not committed.
        num_committed = steps - self._lag
        sequence.num_computed += steps
        sequence.num_pending += self._lag
        sequence.tokens += [ANSWER_IDS + sequence.request.seed] * num_committed
        self._on_tokens(handle, first, first + num_committed)
        if self._lag and (plan := self.in_flight) is not None:
            assert sequence.row is not None
            plan.rows.append(sequence.row)
            plan.starts.append(sequence.num_computed - 1)
            plan.chunks.append(None)
            plan.samples.append(True)
            plan.sequences.append(sequence)

    # -- what the scheduler looks at

    def _in_order(self) -> list[Sequence]:
        running, self.running = self.running, self._taken_up
        order = super()._in_order()
        self.running = running
        return order

    def _admit(self, sequence: Sequence, plan: Plan, now: float) -> None:
        super()._admit(sequence, plan, now)
        self._taken_up[sequence.request.handle] = sequence

    def _vacate(self, sequence: Sequence) -> None:
        self._taken_up.pop(sequence.request.handle, None)
        super()._vacate(sequence)


class _Rest(TunedLimits):
    """The budget of a step, less the tokens of those left out."""

    def step(self, limits: SchedulerLimits, num_decoding: int) -> tuple[int, int]:
        return self.max_num_batched_tokens, limits.long_prefill_tokens
