"""`SkippingScheduler`: the engine's scheduler, which need not look at sequences to which nothing happens but one more token.

Most steps of a decoding sequence are alike: planning and committing one adds one to two numbers, and in every sixteenth a block
is taken. Here a sequence is left out of plans as long as that is certain: blocks are taken from the pool at the steps they would
be, and all else is made up for at once when it is taken up again. `Scheduler` still makes every decision, on the same state.

- It is taken up before its last step, so that the scheduler ends it.
- Blocks of its answer are published when it is taken up. No other sequence can find them before: they are named by its answer's
  tokens, which are its own (`trace.answer_ids`), and a later turn of its conversation begins after its end.
- All are taken up before a plan for which the pool might be short of blocks: then the scheduler has to choose among them.

Does: say which sequences may be left out, for how long, and what they add to a step. Does not: decide anything.
`tests/property/test_simulate.py` holds that results are the same with and without it.
"""

from __future__ import annotations

from collections.abc import Callable

from tonle.engine.kv.block_pool import BlockPool
from tonle.engine.plan import Plan
from tonle.engine.schedule import Scheduler, SchedulerLimits, Sequence, TunedLimits
from tonle.simulate.trace import ANSWER_IDS

_LEAST = 3  # steps; fewer are not worth it


class SkippingScheduler(Scheduler):
    """For each step: `begin_step`, then `plan` unless the step is quiet, then `launched_step`."""

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: BlockPool,
        *,
        lag: int,
        on_tokens: Callable[[int, int, int], None],
    ) -> None:
        """`on_tokens(handle, first, end)`: a sequence that is taken up got tokens in the steps from `first` to before `end`."""
        super().__init__(limits, pool, ())
        self.step = 0  # the next one's number
        self.num_left_out = 0
        self.left_out_reads = 0  # earlier tokens of those left out: what attention reads for them in the next step
        self._is_safe = limits.max_num_batched_tokens >= limits.max_num_seqs  # else some may have to wait for a step
        self._lag = lag
        self._on_tokens = on_tokens
        self._in_flight: Plan | None = None
        self._taken_up: dict[int, Sequence] = {}  # running, and not left out
        self._left_out: dict[int, tuple[Sequence, int]] = {}  # by handle, with the first step that it is left out of
        self._last_steps: dict[int, list[int]] = {}  # step -> handles to take up before it
        self._block_steps: dict[int, list[Sequence]] = {}  # step -> those that need another block for it

    @property
    def is_quiet(self) -> bool:
        """After `begin_step`: the next plan would have no rows but those left out, and admit no sequence."""
        return bool(self.num_left_out) and not self._taken_up and (not self.waiting or not self._rows)

    @property
    def left_out_since(self) -> dict[int, int]:
        """Handle -> the first step that it is left out of."""
        return {handle: first for handle, (_, first) in self._left_out.items()}

    def begin_step(self, in_flight: Plan | None) -> None:
        """After a commit, before the next plan. `in_flight`: the step that is launched and not read, with `lag` 1."""
        self._in_flight = in_flight
        if self._taken_up and self._is_safe:
            self._leave_out()
        for handle in self._last_steps.pop(self.step, ()):
            self._take_up(handle)
        if not self.num_left_out:
            return
        need = self._block_steps.pop(self.step, [])
        if self.pool.num_available < len(need) + len(self._taken_up):  # sequences may have to be preempted
            self.take_up_all()
            return
        for sequence in need:
            sequence.blocks.append(self.pool.take())
        if need:
            self._block_steps.setdefault(self.step + self.limits.block_size, []).extend(need)

    def plan(self, now: float) -> Plan:
        if not self.num_left_out:
            return super().plan(now)
        # Those left out are planned first, as all that decode are, with one token each.
        self.tuned = _Rest(self.limits.max_num_batched_tokens - self.num_left_out, 1.0, self.limits.max_num_seqs)
        plan = super().plan(now)
        self.tuned = None
        return plan

    def launched_step(self) -> None:
        """The plan made last was launched."""
        self.step += 1
        self.left_out_reads += self.num_left_out

    def take_up_all(self) -> None:
        """All sequences stand as if none had ever been left out."""
        for handle in list(self._left_out):
            self._take_up(handle)
        self._taken_up = dict(self.running)
        self._last_steps.clear()
        self._block_steps.clear()

    def _leave_out(self) -> None:
        """Those that decode, and will for some steps."""
        lag, size = self._lag, self.limits.block_size
        for handle, sequence in list(self._taken_up.items()):
            known, computed = len(sequence.tokens), sequence.num_computed
            steps = sequence.max_tokens - 1 - known  # both numbers grow by one in each step
            if steps < _LEAST or sequence.num_pending != lag or known + lag - computed != 1 or not sequence.num_output:
                continue
            del self._taken_up[handle]
            self._left_out[handle] = (sequence, self.step)
            self._last_steps.setdefault(self.step + steps, []).append(handle)
            block_step = self.step + len(sequence.blocks) * size - computed
            self._block_steps.setdefault(block_step, []).append(sequence)
            self.num_left_out += 1
            self.left_out_reads += computed

    def _take_up(self, handle: int) -> None:
        sequence, first = self._left_out.pop(handle)
        steps = self.step - first
        self.num_left_out -= 1
        self.left_out_reads -= sequence.num_computed + steps
        self._taken_up[handle] = sequence
        block_step = first + len(sequence.blocks) * self.limits.block_size - sequence.num_computed
        if block_step in self._block_steps:
            self._block_steps[block_step].remove(sequence)
        if not steps:
            return
        # Of the steps it was left out of, the last `lag` have been launched and not committed.
        num_committed = steps - self._lag
        sequence.num_computed += steps
        sequence.num_pending += self._lag
        sequence.tokens += [ANSWER_IDS + sequence.request.seed] * num_committed
        self._prefixes.publish(sequence)
        self._on_tokens(handle, first, first + num_committed)
        if self._lag:
            plan = self._in_flight
            assert plan is not None and sequence.row is not None
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
