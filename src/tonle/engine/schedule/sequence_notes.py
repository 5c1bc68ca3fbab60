"""`SequenceNotes`: the moments of one sequence, and the sums of `StepNotes` at each of them, which become its `TimeSpent`.

It is told when the sequence arrives, is scheduled, loses its row or gets it again, has a part of its prompt computed, gets its
first token, ends. Does: subtract. Does not: anything per token.
"""

from __future__ import annotations

from tonle.engine.request import Request
from tonle.engine.schedule.step_notes import Span, StepNotes, Sums
from tonle.telemetry.time_spent import MissReason, OtherPrompt, TimeSpent, Wait, WaitReason

_NOTHING: Sums = (0.0, 0.0, 0.0, 0)
_WORTH_NAMING = (
    1 / 20
)  # of the time it is part of: waits below that are not looked into for the prompts they are due to


class SequenceNotes:
    """Moments are those of its `StepNotes`."""

    __slots__ = ("_aside", "_at_first", "_at_loss", "_at_schedule", "_behind", "_compiled_s", "_computed_end", "_device_s",
                 "_first_s", "_lost", "_lost_since_s", "_lost_spans", "_marked_s", "_missed", "_num_cached", "_num_chunks",
                 "_num_computed", "_num_losses", "_own_added_s", "_own_last", "_own_s", "_own_share_s", "_own_steps",
                 "_prefill_waited_s", "_request", "_scheduled_s", "_steps", "_waited_before", "_waits")  # fmt: skip

    def __init__(self, steps: StepNotes, request: Request, *, compiled_s: float = 0.0) -> None:
        """`compiled_s`: how long it waited for its grammar before the scheduler got it."""
        self._steps = steps
        self._request = request
        self._missed: dict[MissReason, int] = {}
        self._num_cached = 0
        self._compiled_s = compiled_s
        self._waits: dict[WaitReason, float] = {}
        self._marked_s: float | None = None  # its waits are known up to here; None: not even the first
        self._waited_before: dict[WaitReason, float] = {}  # the sums of the queue then
        self._aside: WaitReason | None = None  # what it waits for by itself, whatever the queue waits for
        self._scheduled_s: float | None = None
        self._first_s: float | None = None
        self._at_schedule = self._at_first = _NOTHING
        self._lost_since_s: float | None = None  # it has no row now
        self._at_loss = _NOTHING
        self._lost = _NOTHING  # of the steps that ended while it had no row: before its first token, then after it
        self._lost_spans: list[Span] = []
        self._num_losses = 0
        # Of steps with tokens of its prompt: before its first token, then after it, when it is computed again
        self._own_s = self._own_share_s = self._own_added_s = 0.0
        self._own_steps = 0
        self._own_last = 0  # the number of the last of them
        self._num_chunks = self._num_computed = 0
        self._computed_end = 0
        self._prefill_waited_s = self._device_s = 0.0  # up to its first token
        self._behind: list[OtherPrompt] = []

    # -- while it waits

    def join_queue(self) -> None:
        """The first plan that could have it is made. If it is not in it, it waits."""
        if self._scheduled_s is None and self._marked_s is None:
            self._wait_for_plan()
            self._mark()

    def stand_aside(self, why: WaitReason | None) -> None:
        """It waits for something of its own from now on; or no longer."""
        if self._scheduled_s is None:
            self._settle()
            self._mark()
            self._aside = why

    def _wait_for_plan(self) -> None:
        """The first plan that can have it begins now."""
        self._waits["step"] = max(0.0, self._steps.now - self._request.arrived_s - self._compiled_s)
        if self._compiled_s:
            self._waits["grammar"] = self._compiled_s

    def _settle(self) -> None:
        """What it has waited for up to now."""
        if self._marked_s is None:
            self._wait_for_plan()
        elif self._aside:
            self._add_wait(self._aside, self._steps.now - self._marked_s)
        else:
            for why, seconds in self._steps.waited_s.items():
                if seconds > self._waited_before[why]:
                    self._add_wait(why, seconds - self._waited_before[why])

    def _add_wait(self, why: WaitReason, seconds: float) -> None:
        self._waits[why] = self._waits.get(why, 0.0) + seconds

    def _mark(self) -> None:
        self._marked_s = self._steps.now
        self._waited_before = self._steps.waited_s.copy()

    # -- while it runs

    def scheduled(self, num_cached: int, missed: dict[MissReason, int]) -> None:
        """For the first time."""
        self._settle()
        self._scheduled_s = self._steps.now
        self._at_schedule = self._steps.sums()
        self._num_cached = self._computed_end = num_cached
        self._missed = missed

    def computed(self, start: int, size: int, added_s: float, *, num_prompt_steps: int) -> None:
        """The step that ended last computed these tokens. `added_s` of its time is due to prompts; `num_prompt_steps`: 1 if it
        counts as a step with prompts, otherwise 0."""
        steps = self._steps
        self._own_s += steps.step_s
        self._own_share_s += steps.step_share_s
        if self._lost_since_s is None:  # else it was in flight when the row was lost, and counts as lost
            self._own_added_s += added_s
            self._own_steps += num_prompt_steps
        self._own_last = steps.num_steps
        if (of_prompt := min(start + size, len(self._request.prompt)) - start) > 0:
            self._num_chunks += 1
            self._num_computed += of_prompt
        self._computed_end = start + size

    def lose_row(self) -> None:
        self._num_losses += 1
        self._lost_since_s = self._steps.now
        self._at_loss = self._steps.sums()

    def get_row_again(self) -> None:
        if self._lost_since_s is None:
            return
        self._lost_spans.append((self._lost_since_s, self._steps.now))
        self._lost_since_s = None
        busy_s, share_s, added_s, count = self._lost
        now, before = self._steps.sums(), self._at_loss
        self._lost = (
            busy_s + now[0] - before[0], share_s + now[1] - before[1], added_s + now[2] - before[2],
            count + now[3] - before[3],
        )  # fmt: skip

    def first_token(self) -> None:
        """The step that ended last brought it."""
        steps, is_lost = self._steps, self._lost_since_s is not None
        if is_lost:
            self.get_row_again()
        if self._own_last != steps.num_steps:  # its last token was computed alone
            self._own_s += steps.step_s
            self._own_share_s += steps.step_share_s
            if self._computed_end < len(self._request.prompt):
                self._num_chunks += 1
                self._num_computed += 1
        self._first_s, self._at_first, self._device_s = steps.now, steps.sums(), self._own_share_s
        busy_s = self._at_first[0] - self._at_schedule[0]
        self._prefill_waited_s = max(0.0, busy_s - self._own_s - self._lost[0])
        assert self._scheduled_s is not None
        arrived_s = self._request.arrived_s
        waited_s = self._scheduled_s - arrived_s + self._prefill_waited_s
        if waited_s > _WORTH_NAMING * (steps.now - arrived_s):
            self._behind = steps.others(self._request.handle, arrived_s, self._lost_spans, added=False)
        self._lost, self._own_added_s, self._own_steps = _NOTHING, 0.0, 0
        if is_lost:
            self._num_losses -= 1  # the same as before
            self.lose_row()

    def ended(self, num_steps: int, *, draft_tokens: int = 0, accepted_tokens: int = 0) -> TimeSpent:
        """The step that ended last brought its end. `num_steps`: those that brought its tokens."""
        if self._first_s is None:
            self.first_token()
        if self._lost_since_s is not None:
            self.get_row_again()
        assert self._scheduled_s is not None and self._first_s is not None
        steps, request = self._steps, self._request
        _, share_s, added_s, num_stalled = steps.sums()
        _, lost_share_s, lost_added_s, num_lost = self._lost
        num_stalled -= self._at_first[3] + num_lost + self._own_steps
        added_s -= self._at_first[2] + lost_added_s + self._own_added_s
        decode_s = steps.now - self._first_s
        stalled_by = []
        if num_stalled and added_s > _WORTH_NAMING * decode_s:
            stalled_by = steps.others(request.handle, self._first_s, self._lost_spans, added=True)
        return TimeSpent(
            queue_s=self._scheduled_s - request.arrived_s,
            waits=_in_order(self._waits),
            behind=self._behind,
            prefill_s=self._first_s - self._scheduled_s,
            cached_tokens=self._num_cached,
            computed_tokens=self._num_computed,
            num_chunks=self._num_chunks,
            missed=self._missed,
            prefill_waited_s=self._prefill_waited_s,
            decode_s=decode_s,
            num_steps=num_steps,
            stalled_s=max(0.0, added_s) if num_stalled else 0.0,
            num_stalled=num_stalled,
            stalled_by=stalled_by,
            preempted_s=sum((end - begin for begin, end in self._lost_spans), 0.0) if self._lost_spans else 0.0,
            num_preemptions=self._num_losses,
            device_s=self._device_s + max(0.0, share_s - self._at_first[1] - lost_share_s),
            draft_tokens=draft_tokens,
            accepted_tokens=accepted_tokens,
        )


def spent_without_steps(request: Request, now: float, *, compiled_s: float) -> TimeSpent:
    """Of a request that ended when its grammar was compiled: there was nothing to choose."""
    queue_s = max(0.0, now - request.arrived_s)
    waits: dict[WaitReason, float] = {"step": max(0.0, queue_s - compiled_s), "grammar": min(compiled_s, queue_s)}
    return TimeSpent(queue_s=queue_s, waits=_in_order(waits))


def _in_order(waits: dict[WaitReason, float]) -> list[Wait]:
    """Those before the queue as they come, then the longest first."""
    if len(waits) == 1:
        return [Wait(why, seconds) for why, seconds in waits.items() if seconds > 0]
    first: tuple[WaitReason, ...] = ("step", "grammar")
    order = sorted((why for why in waits if why not in first), key=lambda why: -waits[why])
    return [Wait(why, waits[why]) for why in (*first, *order) if waits.get(why, 0.0) > 0]
