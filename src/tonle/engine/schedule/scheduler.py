"""The scheduler: one token budget per step, running sequences first, then the waiting queue.

It decides; what sequences hold is counted in `Places` and `LoadingPlaces`. It never sees a tensor. A step's tokens may still be
unknown when the next step is planned (`Sequence.num_pending`): the loop commits them later.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from tonle.engine.constraint import Constraint
from tonle.engine.kv.block_pool import BlockPool
from tonle.engine.plan import Plan, StepResult
from tonle.engine.request import Request
from tonle.engine.schedule.adapter_slots import AdaptersInMemory
from tonle.engine.schedule.bound import begin, ending, is_known, push
from tonle.engine.schedule.drafts import Drafts
from tonle.engine.schedule.limits import SchedulerLimits, TunedLimits
from tonle.engine.schedule.loading import LoadingPlaces
from tonle.engine.schedule.outcome import StepOutcome
from tonle.engine.schedule.queue import order_key
from tonle.engine.schedule.sequence import Sequence
from tonle.engine.schedule.sequence_notes import SequenceNotes
from tonle.engine.schedule.static_batches import StaticBatches
from tonle.telemetry.time_spent import WaitReason

_KEY = attrgetter("key")
_MAX_SUSPECTED = 3  # failed steps that a sequence may have been in, if it was well alone


class Scheduler(LoadingPlaces):
    def __init__(
        self, limits: SchedulerLimits, pool: BlockPool, eos_ids: Iterable[int], adapters: AdaptersInMemory | None = None
    ) -> None:
        super().__init__(limits, pool, adapters)
        self.tuned: TunedLimits | None = None  # tighter ones in force now
        self.prompt_tokens = 0  # planned, not counting cache hits
        self._eos = frozenset(eos_ids)
        self._suspects: dict[int, Sequence] = {}  # were in a step that failed, and have not been in a good one since
        self._batches = StaticBatches(limits, self.waiting)
        self._why: WaitReason = "step"  # the first that waits was not admitted
        self.drafts: Drafts | None = None  # None: steps compute no guesses

    # -- messages

    def refusal(self, request: Request) -> str | None:
        """Why this request could never run, or None."""
        total = len(request.prompt) + request.config.max_length
        if not request.prompt:
            return "the prompt is empty"
        if total > self.limits.context_length:
            return f"prompt ({len(request.prompt)} tokens) + max_length ({request.config.max_length}) exceed " \
                   f"the context of {self.limits.context_length} tokens"  # fmt: skip
        if request.adapter and not self.slots.knows(request.adapter):
            return "its adapter is not loaded any more"
        return None

    def add(
        self, request: Request, constraint: Constraint | None = None, *, compiled_s: float = 0.0
    ) -> StepOutcome | None:
        """It waits from now on. An outcome: it has ended, for its constraint leaves nothing to choose. `compiled_s`: how long it
        waited for that constraint."""
        stops = frozenset(request.config.stop_token_ids)
        if request.config.early_stopping:
            stops |= self._eos
        key = order_key(request, self.limits.ageing_s)
        sequence = Sequence(request, key=key, stops=stops, constraint=constraint)
        if constraint is not None and (outcome := begin(sequence)) is not None:
            return outcome
        self.waiting.push(sequence)
        if self.notes is not None:
            sequence.notes = SequenceNotes(self.notes, request, compiled_s=compiled_s)
            self.notes.arrived(sequence.notes)
        return None

    def cancel(self, handle: int) -> bool:
        """Free all it holds, wherever it is. A step already launched for it is ignored when it commits."""
        sequence = self.loading.get(handle) or self.loaded_waiting.get(handle)
        if sequence is not None:
            self._unload(sequence)  # it waits then
        sequence = self.waiting.remove(handle)
        if sequence is None:
            sequence = self.running.pop(handle, None)
            if sequence is None:
                return False
            self._vacate(sequence)
        self._suspects.pop(handle, None)
        if self.notes is not None:
            self.notes.forget_sequence(handle)
        if self.drafts is not None:
            self.drafts.ended(sequence)
        sequence.done = True
        return True

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting and not self.loading

    # -- planning

    def plan(self, now: float) -> Plan:
        if self.notes is not None:
            self.notes.begin_plan(now)
        if self._suspects:
            return self._plan_suspect(now)
        plan = Plan()
        order = self._in_order()
        if self.drafts is not None and self.drafts.some_wait and self.drafts.all_wait(order):
            if self.notes is not None:
                self.notes.end_plan(plan, "step" if self.waiting else None)
            return plan  # the loop reads what is under way
        budget, most = self.limits.max_num_batched_tokens, self.limits.long_prefill_tokens
        if self.tuned is not None:
            budget, most = self.tuned.step(self.limits, sum(sequence.num_remaining <= 1 for sequence in order))
        alone = len(self.running) + len(self.waiting) == 1
        most = budget if alone else max(1, most)  # tokens of one sequence
        for sequence in order:
            if (
                sequence.row is None
                or sequence.complete
                or sequence.is_late
                or (sequence.waits and sequence.num_pending)
            ):
                continue  # preempted a moment ago, or its last token is in flight, or it waits for its mask or that token
            if budget == 0:
                break  # what is not in the plan must not hold blocks that the plan computes: the step may fail
            if sequence.num_remaining > 1 and sequence.num_computed < len(sequence.request.prompt):
                self._prefixes.catch_up(sequence, plan)
                plan.prompts.append(len(plan.rows))
            count = min(sequence.num_remaining, budget, most)
            if not self._grow(sequence, count, plan):
                if plan.prompts and plan.prompts[-1] == len(plan.rows):
                    plan.prompts.pop()
                continue
            self._schedule(sequence, count, plan)
            budget -= count
        if self.slots.is_unsettled:
            self.slots.settle()
        while budget > 0 and (newcomer := self._admissible(now)) is not None:
            self.waiting.pop()
            self._batches.num_left -= not self.limits.continuous
            self._admit(newcomer, plan, now)
            plan.prompts.append(len(plan.rows))
            count = min(newcomer.num_remaining, budget, most)
            self._schedule(newcomer, count, plan)
            budget -= count
        if self.drafts is not None and budget > 0:
            self.drafts.add(plan, budget, self._grow_for_drafts)
        if self.notes is not None:
            self.notes.end_plan(plan, (self._why if budget else "prompts") if self.waiting else None)
        return plan

    def _plan_suspect(self, now: float) -> Plan:
        """One suspect alone, so that a step that fails again names the one at fault. The others wait meanwhile."""
        plan = Plan()
        handle, sequence = next(iter(self._suspects.items()))
        if sequence.num_pending:  # it has been launched: the loop reads the step before it plans another
            self._note_suspect(plan)
            return plan
        if sequence.row is None:
            if not self._make_room(sequence):
                del self._suspects[handle]
                return self.plan(now)
            self.waiting.take(handle)
            self._admit(sequence, plan, now)
        if sequence.num_remaining > 1:
            plan.prompts.append(0)
        self._schedule(sequence, min(sequence.num_remaining, self.limits.max_num_batched_tokens), plan)
        self._note_suspect(plan)
        return plan

    def _note_suspect(self, plan: Plan) -> None:
        if self.notes is not None:
            self.notes.end_plan(plan, "prompts" if self.waiting else None)

    def wake_s(self, now: float) -> float | None:
        """How long the loop may sleep before `plan` has something new to say; None = until a message comes."""
        return self._batches.wake_s(now)

    def _in_order(self) -> list[Sequence]:
        """Running sequences, most important first; before all others those that decode, which advance in every step."""
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for sequence in self.running.values():
            (decoding if sequence.num_remaining <= 1 else prefilling).append(sequence)
        decoding.sort(key=_KEY)
        prefilling.sort(key=_KEY)
        return decoding + prefilling

    def _schedule(self, sequence: Sequence, count: int, plan: Plan) -> None:
        assert sequence.row is not None
        start = sequence.num_computed
        sequence.num_computed = end = start + count
        sequence.waits = False
        samples = end == sequence.num_known
        chunk = sequence.tokens[start:end] if end <= len(sequence.tokens) else None
        plan.rows.append(sequence.row)
        plan.starts.append(start)
        plan.chunks.append(chunk)
        plan.samples.append(samples)
        plan.sequences.append(sequence)
        if samples:
            sequence.num_pending += 1
            if sequence.constraint is not None:
                plan.bound.append(len(plan.rows) - 1)
        if chunk is not None:  # else no token became known, and no block full, since the last commit
            self.prompt_tokens += max(0, min(end, len(sequence.request.prompt)) - start)
            self._prefixes.publish(sequence)
            if sequence.pooling:
                plan.samples[-1] = False

    # -- admission

    def _admissible(self, now: float) -> Sequence | None:
        """The next sequence to admit with its cached prefix held; or None if it has to wait, and `_why` says for what."""
        if self.incoming is not None:
            self._begin_loads()
        if self.tuned is not None and len(self.running) >= self.tuned.max_num_seqs:
            self._why = "tuned"
            return None
        sequence = self.waiting.peek()
        if sequence is not None and sequence.request.adapter:
            sequence = self.slots.next_waiting()
        if sequence is None:
            self._why = "adapter"  # those that wait, if any, stand aside
        elif not self._rows:
            self._why = "rows"
        elif sequence.num_pending:
            self._why = "step"
        elif not self._batches.is_open(now, bool(self.running)):
            self._why = "batch"
        elif not self._fits(sequence):
            self._why = "blocks"
        else:
            return sequence
        return None

    # -- committing

    def commit(self, plan: Plan, result: StepResult) -> StepOutcome:
        """Take in the tokens of a step that was planned earlier. Sequences that ended meanwhile are passed over."""
        outcome = StepOutcome()
        sampled = iter(result.tokens)
        for i, sequence in enumerate(plan.sequences):
            token = next(sampled) if plan.samples[i] else None
            if sequence.done:
                continue
            handle = sequence.request.handle
            if i in result.prompt_logprobs:
                first = max(plan.starts[i] + 1, sequence.request.config.prompt_logprobs_start)
                outcome.prompt_logprobs[handle] = (first, result.prompt_logprobs[i])
            if token is None:
                if i in result.pooled:
                    outcome.embeddings[handle] = result.pooled[i]
                    outcome.finished[handle] = ("stop", None)
                    self._end(sequence, outcome)
                continue
            if sequence.constraint is not None and (i in plan.missed or is_known(sequence, plan.place(i))):
                continue
            sequence.num_pending -= 1
            sequence.tokens.append(token)
            if self._suspects:
                self._suspects.pop(handle, None)
            if i in result.logprobs:
                outcome.logprobs[handle] = [result.logprobs[i]]
            if sequence.constraint is not None:
                least = self.limits.min_forced
                if i in plan.drafts and self.drafts is not None:
                    ends = self.drafts.take_bound(sequence, token, plan.draft(i), least, result, i, outcome)
                else:
                    ends = push(sequence, token, least, outcome)
            else:
                end = ending(sequence, token)
                if i in plan.drafts and self.drafts is not None:
                    end = self.drafts.take(sequence, plan.drafts[i], end, result, i, outcome)
                else:
                    outcome.handles.append(handle)
                    outcome.tokens.append(token)
                if ends := end is not None:
                    outcome.finished[handle] = end
            if ends:
                self._end(sequence, outcome)
            elif sequence.row is not None:
                self._prefixes.publish(sequence)
        if self.notes is not None and self.notes.without_token:
            self.notes.first_tokens()
        if self.drafts is not None:
            if self.notes is not None:
                self.drafts.step_ended(plan, self.notes)
            if self.drafts.are_ahead:
                self.drafts.look_ahead(plan)
        return outcome

    def _end(self, sequence: Sequence, outcome: StepOutcome) -> None:
        handle = sequence.request.handle
        if sequence.notes is not None:
            num_steps = sequence.num_output - sequence.num_forced - sequence.num_accepted
            outcome.spent[handle] = sequence.notes.ended(
                num_steps, draft_tokens=sequence.num_drafted, accepted_tokens=sequence.num_accepted
            )
        if sequence.request.keep_blocks and self._lease(sequence):
            outcome.leased.append(sequence.request)
        self.cancel(handle)

    def recompute(self) -> None:
        """The keys and values of all steps so far are not used any more: what runs is computed again. No step is under way.

        For an answer must not depend on which kernels happened to compute a prefix that it shares."""
        for sequence in list(self.running.values()):
            self._prefixes.retract(sequence)
            self._set_back(sequence)
        for sequence in [*self.loading.values(), *self.loaded_waiting.values()]:
            self._prefixes.retract(sequence)
            self._unload(sequence)
        for blocks in self.leases.values():
            for block in blocks:
                self.pool.retract(block)
        self.pool.drop_idle()

    def fail(self, plans: Iterable[Plan]) -> list[int]:
        """Steps failed: end their sequences, and take what they may have written out of the prefix index. Returns handles."""
        plans = list(plans)
        sequences = _under_way(plans)
        for handle, sequence in sequences.items():
            self._prefixes.retract(sequence)
            self.cancel(handle)
        self.slots.forget_loads(plans)
        return list(sequences)

    def suspect(self, plans: Iterable[Plan]) -> list[int]:
        """Steps failed, and any one of their sequences may be why: each is computed again, alone. One that was alone
        ends, and so does one that this has happened to too often. Returns the handles of those that end."""
        plans = list(plans)
        sequences = _under_way(plans)
        if len(sequences) == 1:
            return self.fail(plans)
        ended = []
        for handle, sequence in sequences.items():
            self._prefixes.retract(sequence)
            sequence.num_suspected += 1
            if sequence.num_suspected > _MAX_SUSPECTED:
                self.cancel(handle)
                ended.append(handle)
                continue
            sequence.num_pending = 0  # what was sampled is lost, and will be the same again
            if handle in self.running:
                self._set_back(sequence)
            self._suspects[handle] = sequence
        self.slots.forget_loads(plans)
        return ended


def _under_way(plans: Iterable[Plan]) -> dict[int, Sequence]:
    """By handle: the sequences of these plans that have not ended."""
    return {sequence.request.handle: sequence for plan in plans for sequence in plan.sequences if not sequence.done}
