"""Sequences bound by a `Constraint`: what it makes of their tokens, and which of their samples still count.

Does: push tokens, append those that are forced, say when a sequence ends or has to wait for its mask. Does not: fill masks (the
loop asks the compiler to).
A step in flight samples at the place after a sequence's last token. If forced tokens take that place meanwhile, what it samples
there is passed over.
"""

from __future__ import annotations

from collections.abc import Iterable

from tonle.engine.constraint import Constraint
from tonle.engine.plan import Plan
from tonle.engine.schedule.outcome import Ending, StepOutcome
from tonle.engine.schedule.sequence import Sequence


def ending(sequence: Sequence, token: int | None) -> Ending | None:
    """Why the sequence ends with `token`, its last one, or None."""
    if token in sequence.stops and sequence.num_output >= sequence.request.config.min_tokens:
        return "stop", token
    if sequence.constraint is not None and sequence.constraint.is_complete:
        return "stop", None
    return ("length", None) if len(sequence.tokens) >= sequence.max_tokens else None


def begin(sequence: Sequence) -> StepOutcome | None:
    """Before its first step: what is forced is computed with the prompt. An outcome: it has ended, nothing is left to choose."""
    if sequence.request.config.prompt_logprobs is not None:
        return None  # the prompt has to be computed, whatever follows
    end, outcome = ending(sequence, None) or _force(sequence, least=1), StepOutcome()
    sequence.num_unsent = sequence.num_output
    return outcome if _tell(sequence, len(sequence.request.prompt), end, outcome) else None


def push(sequence: Sequence, token: int, least: int, outcome: StepOutcome, more: Iterable[int] = ()) -> bool:
    """`token` was drawn, and is the sequence's last. Appends what it forces, if that is `least` tokens; then `more`, which follow
    as they were guessed, up to an end. Whether the sequence ends."""
    constraint, place = sequence.constraint, len(sequence.tokens)
    assert constraint is not None
    first = place - 1 - sequence.num_unsent
    sequence.num_unsent = 0
    constraint.push(token)
    end = ending(sequence, token) or _force(sequence, least)
    for at, each in enumerate(more, place):
        if end is not None or constraint.error is not None:
            break
        if not is_known(sequence, at):  # else it was forced
            sequence.tokens.append(each)
            constraint.push(each)
            end = ending(sequence, each) or _force(sequence, least)
    return _tell(sequence, first, end, outcome)


def _tell(sequence: Sequence, first: int, end: Ending | None, outcome: StepOutcome) -> bool:
    """The caller gets the tokens from place `first` on, and the end, or else why there is none. Whether the sequence ends."""
    handle = sequence.request.handle
    assert sequence.constraint is not None
    if (why := sequence.constraint.error) is not None:
        outcome.refused[handle] = why
        return True
    outcome.add(handle, sequence.tokens[first:])
    if end is not None:
        outcome.finished[handle] = end
    return end is not None


def is_known(sequence: Sequence, place: int) -> bool:
    """The token at this place is known, so what is sampled for it is passed over."""
    return place < len(sequence.tokens)


def wanted_draws(plan: Plan) -> tuple[list[int], list[Constraint]]:
    """Of the plan's bound entries, those whose sample still counts, and their constraints."""
    entries, constraints = [], []
    for i in plan.bound:
        sequence: Sequence = plan.sequences[i]
        if not sequence.done and not is_known(sequence, plan.place(i)):
            assert sequence.constraint is not None
            entries.append(i)
            constraints.append(sequence.constraint)
    return entries, constraints


def postpone(plan: Plan, entry: int) -> Sequence:
    """The mask of this entry came too late for the step's draw. Its sequence computes its last token again when it is there."""
    sequence: Sequence = plan.sequences[entry]
    plan.missed.add(entry)
    sequence.num_pending -= 1
    sequence.num_computed -= 1
    sequence.is_late = True
    return sequence


def may_force(sequence: Sequence, num_output: int) -> bool:
    """Tokens that must follow so many others of the answer are appended without a draw."""
    config = sequence.request.config
    if config.logprobs is not None:
        return False  # log-probabilities are those of tokens that were drawn
    # One of the stop tokens may not come yet, even if it must: drawing finds out, and says so.
    return not config.stop_token_ids or num_output >= config.min_tokens


def _force(sequence: Sequence, least: int) -> Ending | None:
    constraint = sequence.constraint
    assert constraint is not None
    config = sequence.request.config
    if constraint.error is not None or not may_force(sequence, sequence.num_output):
        return None
    forced = constraint.forced(sequence.max_tokens - len(sequence.tokens), least)
    if not forced:
        return None
    sequence.num_pending = 0  # the place of what is in flight is taken now
    for token in forced:
        sequence.tokens.append(token)
        sequence.num_forced += 1
        if token in sequence.stops and sequence.num_output >= config.min_tokens:
            return "stop", token
    return ending(sequence, None)
