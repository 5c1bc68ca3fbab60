"""`StepNotes`: what the loop notes of each step, so that a request can be told at its end where its time went.

Does: keep running sums over steps, and the latest steps that prompts made twice as long. What one sequence spent is a difference
of two sums (`SequenceNotes`), so a step costs a few additions, however many sequences are in it. Does not: read a clock (it is
told when steps are planned and when they end), decide, or know tensors.

A step that is planned before the one ahead of it has ended (`Runner.lag` 1) begins when that one ends.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from tonle.engine.plan import Plan
from tonle.telemetry.time_spent import WAIT_REASONS, OtherPrompt, WaitReason

if TYPE_CHECKING:
    from tonle.engine.schedule.sequence import Sequence
    from tonle.engine.schedule.sequence_notes import SequenceNotes

_MAX_STEPS = 1024  # steps that prompts made twice as long: as many are kept,
_MAX_WALK = 32  # of them, the latest, are looked at for one sequence,
_MAX_OTHERS = 3  # and prompts of others that it is told of
_WEIGHT = 1 / 16  # of the latest step in the mean of steps without prompts
_SIZES = 24  # of steps without prompts, by the bit length of the number of their sequences

Span = tuple[float, float]  # moments: after the first, up to the second
# Over all steps so far: seconds; of one sequence, had it been in each of them; added by prompts; steps with prompts
Sums = tuple[float, float, float, int]


class PromptStep(NamedTuple):
    """A step of which prompts, or parts of them, took at least half."""

    ended_s: float
    seconds: float
    added_s: float  # what it took beyond a step with the same sequences and no prompts
    handles: list[int]  # of all prompts in it
    largest: tuple[int, int]  # of the one with the most tokens in it: its handle, and the tokens of its whole prompt


class StepNotes:
    """For each step: `begin_plan`, `end_plan`, `step_ended`, then `first_tokens` where sequences are without a token."""

    def __init__(self) -> None:
        self.now = 0.0  # when the last plan was begun, or the last step ended
        self.num_steps = 0  # that ended
        self.step_s = 0.0  # of the one that ended last
        self.turn_s = 0.0  # from the end of the step before it to its own: with what the host did in between
        self.step_share_s = 0.0  # of each of its sequences
        self.waited_s: dict[WaitReason, float] = dict.fromkeys(WAIT_REASONS, 0.0)  # by why the queue did not move
        self.without_token: dict[int, Sequence] = {}  # by handle: have been in a step, and have no token yet
        self._busy_s = self._share_s = self._added_s = 0.0  # see `Sums`
        self._num_prompt_steps = 0
        self._why: WaitReason | None = None  # the first that waits is not in the last plan; None: none waits
        self._planned_s = 0.0
        self._ended_s = 0.0
        self._arrived: list[SequenceNotes] = []  # since the last plan
        self._in_flight: deque[float] = deque()  # when steps were planned that have not ended
        self._plain_s = [0.0] * _SIZES  # mean of steps without prompts; 0: none was seen
        self._prompt_steps: deque[PromptStep] = deque(maxlen=_MAX_STEPS)

    # -- told by the scheduler

    def arrived(self, notes: SequenceNotes) -> None:
        """It can be in the next plan."""
        self._arrived.append(notes)

    def begin_plan(self, now: float) -> None:
        if self._why is not None:
            self.waited_s[self._why] += now - self._planned_s
        self._planned_s = self.now = now

    def end_plan(self, plan: Plan, why: WaitReason | None) -> None:
        """`why`: the first of those that still wait is not in this plan; None: none waits."""
        self._why = why
        if plan.rows:
            self._in_flight.append(self._planned_s)
        if self._arrived:
            for notes in self._arrived:
                notes.join_queue()
            self._arrived.clear()

    def forget_sequence(self, handle: int) -> None:
        """It ended, or was cancelled."""
        self.without_token.pop(handle, None)

    def first_tokens(self) -> None:
        """The step that ended last is committed."""
        for handle, sequence in list(self.without_token.items()):
            if sequence.num_output > sequence.num_unsent:
                del self.without_token[handle]
                if sequence.notes is not None:
                    sequence.notes.first_token()

    # -- told by the loop

    def step_ended(self, plan: Plan, now: float) -> None:
        """Before it is committed."""
        began_s = self._in_flight.popleft()
        if began_s < self._ended_s:
            began_s = self._ended_s
        seconds, rows = now - began_s, len(plan.rows)
        self.turn_s = now - self._ended_s
        self._ended_s = self.now = now
        self.num_steps += 1
        self.step_s = seconds
        self.step_share_s = share_s = seconds / rows
        self._busy_s += seconds
        self._share_s += share_s
        if plan.prompts:
            self._prompts_ended(plan, plan.prompts)
        elif not plan.drafts:
            self._plain_ended(rows)

    def forget_planned(self) -> None:
        """Steps failed: those in flight will not end."""
        self._in_flight.clear()

    def _plain_ended(self, rows: int) -> None:
        size, mean_s = rows.bit_length(), self._plain_s
        mean_s[size] += (self.step_s - mean_s[size]) * (_WEIGHT if mean_s[size] else 1.0)

    def _prompts_ended(self, plan: Plan, entries: list[int]) -> None:
        sequences, chunks = plan.sequences, plan.chunks
        num_tokens = most = largest = 0
        for i in entries:
            size = len(chunks[i] or ())
            num_tokens += size
            if size > most:
                most, largest = size, i
        added_s = 0.0
        has_prompts = num_tokens > len(entries)  # a prompt of which one token is left is computed as decoding is
        if has_prompts:
            added_s = self._beyond_plain_s(len(plan.rows) - len(entries), num_tokens)
            self._added_s += added_s
            self._num_prompt_steps += 1
            if 2 * added_s >= self.step_s:  # others are not worth a name: there may be one in every step
                handles = [sequences[i].request.handle for i in entries]
                request = sequences[largest].request
                self._prompt_steps.append(
                    PromptStep(self.now, self.step_s, added_s, handles, (request.handle, len(request.prompt)))
                )
        else:
            self._plain_ended(len(plan.rows))
        for i in entries:
            if (notes := sequences[i].notes) is not None:
                notes.computed(plan.starts[i], len(chunks[i] or ()), added_s, num_prompt_steps=int(has_prompts))

    def _beyond_plain_s(self, rows: int, num_tokens: int) -> float:
        """What prompts of `num_tokens` added to the last step, in which `rows` sequences decoded."""
        if rows == 0:
            return self.step_s
        size, known = rows.bit_length(), self._plain_s
        if not (plain_s := known[size]):  # the nearest size that was seen; rather a smaller one
            sizes = [*range(size - 1, 0, -1), *range(size + 1, _SIZES)]
            plain_s = next((known[each] for each in sizes if known[each]), 0.0)
        if not plain_s:  # none was seen: by tokens
            return self.step_s * num_tokens / (num_tokens + rows)
        return max(0.0, self.step_s - plain_s)

    # -- asked about

    def sums(self) -> Sums:
        """As of now, with the part of a step in flight that is over."""
        busy_s = self._busy_s
        if self._in_flight:
            busy_s += max(0.0, self.now - max(self._in_flight[0], self._ended_s))
        return busy_s, self._share_s, self._added_s, self._num_prompt_steps

    def others(self, handle: int, since_s: float, without: list[Span], *, added: bool) -> list[OtherPrompt]:
        """The prompts that took the most time since then, in steps that had no part of the prompt with this handle, and not
        in these spans. `added`: what they added to those steps; otherwise the steps' whole time."""
        if not self._prompt_steps or self._prompt_steps[-1].ended_s <= since_s:
            return []
        seconds: dict[tuple[int, int], float] = {}
        for ended_s, took_s, added_s, handles, largest in islice(reversed(self._prompt_steps), _MAX_WALK):
            if ended_s <= since_s:
                break
            if handle in handles or (without and any(begin < ended_s <= end for begin, end in without)):
                continue
            if added:
                took_s = added_s
            elif took_s > ended_s - since_s:
                took_s = ended_s - since_s
            seconds[largest] = seconds.get(largest, 0.0) + took_s
        most = sorted(seconds, key=seconds.__getitem__, reverse=True)[:_MAX_OTHERS]
        return [OtherPrompt(*other, seconds[other]) for other in most]
