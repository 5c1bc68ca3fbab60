"""Where the simulation and the rule of thumb disagree: another number of replicas, another admission limit, length classes.

Does: search with `run_check`, keep what was tried, and say what changed and why. Does not: change precision or GPUs per replica.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tonle.advise.check import Check, run_check
from tonle.advise.choose import Group, Question, Sizing, size_by_length, size_together
from tonle.advise.lines import Line
from tonle.advise.option import Option, build_option
from tonle.bench.slo import duration_text
from tonle.errors import ConfigError

_MOST_REPLICAS = 64  # that are tried, unless the rule of thumb has more
_MOST_SIMULATED = 256
_MOST_TIMES = 4  # the rule of thumb's number: beyond that more replicas do not help


@dataclass(slots=True)
class Corrected:
    sizing: Sizing
    check: Check
    tried: list[Check] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)  # what was changed, and why


def check_and_correct(
    question: Question, option: Option, on_check: Callable[[str], None] = lambda _: None
) -> Corrected:
    """`on_check` is told what is simulated next."""
    workload = question.workload
    if workload.rate is None and workload.users is None:
        return _one_replica(question, option, on_check)
    if (guess := size_together(question, option).replicas) > _MOST_SIMULATED:
        raise ConfigError(
            f"this load takes some {guess} replicas, and no more than {_MOST_SIMULATED} are simulated: size a part of it",
            param="rate" if workload.rate is not None else "concurrency",
        )
    option, first_check, share_lines = _with_best_threshold(question, option, on_check)
    together = size_together(question, option)
    known = {} if first_check is None else {together.replicas: first_check}
    found = _fewest(question, together.replicas, lambda count: _together(together, count), "all alike", on_check, known)
    found.lines = share_lines + found.lines
    apart = size_by_length(question, option)
    if apart is None:
        return found
    first = max(2, found.sizing.replicas)
    split = _fewest(question, first, lambda count: _apart(apart, count), "by length", on_check)
    return _better(question, found, split)


def _with_best_threshold(
    question: Question, option: Option, on_check: Callable[[str], None]
) -> tuple[Option, Check | None, list[Line]]:
    """Whether one prompt may fill a step: half of it is the usual choice; the whole step where more requests keep the SLO so.
    With it, what the rule of thumb's sizing then comes to."""
    if not question.slo or option.settings is None:
        return option, None, []
    whole = option.with_threshold(option.settings.max_num_batched_tokens)
    checks = []
    for each, share in ((option, "half of a step"), (whole, "a whole step")):
        on_check(f"one prompt may take {share}")
        checks.append(run_check(question, size_together(question, each), f"one prompt takes at most {share}"))
    half_share, whole_share = ((check.good_share or 0.0) for check in checks)
    if whole_share <= half_share + 0.005:
        return option, checks[0], []
    line = Line(
        topic="corrected by the simulation",
        verdict="long_prefill_token_threshold: a prompt may take the whole step",
        reason=f"{whole_share:.1%} of requests keep the SLO so, {half_share:.1%} if a prompt may take half of it: "
        f"prompts of this "
        "workload are too alike for a cap to help.",
    )
    return whole, checks[1], [line]


def _together(sizing: Sizing, count: int) -> Sizing:
    return Sizing(groups=(_counted(sizing.groups[0], count),))


def _apart(sizing: Sizing, count: int) -> Sizing | None:
    """`count` replicas in the proportion of the two classes' work. None: there must be one of each."""
    if count < 2:
        return None
    short, long = sizing.groups
    work = [len(group.workload.lengths) * group.option.request_s for group in (short, long)]
    num_short = min(count - 1, max(1, round(count * work[0] / sum(work))))
    return Sizing(groups=(_counted(short, num_short), _counted(long, count - num_short)))


def _counted(group: Group, count: int) -> Group:
    return Group(length=group.length, workload=group.workload, option=group.option, replicas=count)


def _fewest(
    question: Question,
    guess: int,
    make: Callable[[int], Sizing | None],
    label: str,
    on_check: Callable[[str], None],
    known: Mapping[int, Check] | None = None,
) -> Corrected:
    """The fewest replicas that hold the SLO; without one, or if no number holds it, the guess. `known`: simulated before."""
    checks: dict[int, tuple[Sizing, Check]] = {}
    for count, check in (known or {}).items():
        if (sizing := make(count)) is not None:
            checks[count] = (sizing, check)

    def holds(count: int) -> bool:
        if count not in checks:
            sizing = make(count)
            if sizing is None:
                return False
            on_check(f"{count} replica{'s' if count > 1 else ''}, {label}")
            checks[count] = (sizing, run_check(question, sizing, f"{count} × {label}"))
        return checks[count][1].holds is not False

    first = make(guess)
    too_few = 0 if first is None else _too_few(first)
    guess = max(guess, too_few + 1)
    most = max(guess, min(_MOST_REPLICAS, max(4, _MOST_TIMES * guess)))
    if first is not None and any(group.option.misses for group in first.groups):
        most = guess  # not even an idle replica is quick enough
    best = _search(guess, most, holds, too_few) if question.slo else guess
    if not question.slo:
        holds(guess)
    sizing, check = checks[best if best is not None else guess]
    corrected = Corrected(sizing, check, [checks[count][1] for count in sorted(checks)])
    if best is None:
        corrected.lines.append(
            Line(
                topic="SLO",
                verdict=f"no number of replicas up to {max(checks)} holds it",
                reason="More replicas shorten queues, not steps: "
                + _missed(check)
                + ". Try more GPUs per replica (--gpus-per-replica), a faster GPU, or a looser bound.",
            )
        )
    elif best != guess:
        corrected.lines.append(_count_line(guess, best, checks))
    return corrected


def _too_few(sizing: Sizing) -> int:
    """A number of replicas that certainly cannot keep up with the rate, even with full batches all the time: queues grow without
    end. A simulation is too short to show it, and bounds on ITL and TPOT never do."""
    busy = sum((group.workload.rate or 0.0) * group.option.request_s for group in sizing.groups)
    return max(0, math.ceil(busy) - 1)


def _search(guess: int, most: int, holds: Callable[[int], bool], low: int) -> int | None:
    """The least count above `low` that holds, if more replicas never make it worse."""
    if holds(guess):
        high = guess
        while high - low > 1:
            middle = high - 1 if high == guess else (low + high) // 2
            low, high = (low, middle) if holds(middle) else (middle, high)
        return high
    high = guess
    while not holds(high):
        if high >= most:
            return None
        low, high = high, min(most, 2 * high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _count_line(guess: int, best: int, checks: dict[int, tuple[Sizing, Check]]) -> Line:
    if best > guess:
        reason = f"With {guess} it does not hold: {_missed(checks[guess][1])}."
    else:
        reason = f"With {best} it holds, too."
    below = checks.get(best - 1)
    if below is not None and below[1].holds is False and best < guess:
        reason += f" With {best - 1} it does not: {_missed(below[1])}."
    return Line(
        topic="corrected by the simulation",
        verdict=f"{best} replica{'s' if best > 1 else ''} instead of the {guess} of the rule of thumb",
        reason=reason,
    )


def _missed(check: Check) -> str:
    """What a check that does not hold its SLO misses."""
    found = [text for text in check.bounds if text.endswith("missed")]
    if check.failed:
        found.append(f"{check.failed} of {check.requests} requests failed or were refused")
    return "; ".join(found)


def _better(question: Question, together: Corrected, split: Corrected) -> Corrected:
    """Length classes only where they hold the SLO with no more GPUs, or serve short prompts clearly sooner with as many."""
    ours, theirs = together.check, split.check
    together.tried += split.tried
    split.tried = together.tried
    text = (
        f"TTFT p95 of short prompts {_ms(theirs.short_ttft_p95_ms)} apart, {_ms(ours.short_ttft_p95_ms)} together; of "
        f"all prompts "
        f"{_ms(theirs.ttft_p95_ms)} and {_ms(ours.ttft_p95_ms)}; SLO kept by {_share(theirs)} and {_share(ours)} of requests"
    )
    sooner = (theirs.short_ttft_p95_ms or 0) < 0.8 * (ours.short_ttft_p95_ms or 0)
    no_worse = theirs.failed <= ours.failed and (theirs.good_share or 0) >= (ours.good_share or 0) - 0.01
    if (theirs.holds is not False, -theirs.gpus) > (ours.holds is not False, -ours.gpus) or (
        theirs.gpus == ours.gpus and theirs.holds == ours.holds and sooner and no_worse
    ):
        split.lines.append(
            Line(
                topic="length classes, simulated",
                verdict=f"apart is better: {theirs.gpus} GPUs, together {ours.gpus}",
                reason=text + ".",
            )
        )
        return split
    together.lines.append(
        Line(
            topic="length classes, simulated",
            verdict=f"together is as good or better here: {ours.gpus} GPUs, apart {theirs.gpus}",
            reason=text
            + ". With few replicas each class has too few to balance its bursts; the prefill threshold protects short "
            "prompts instead.",
        )
    )
    return together


def _ms(value: float | None) -> str:
    return "–" if value is None else duration_text(value)


def _share(check: Check) -> str:
    return "–" if check.good_share is None else f"{check.good_share:.1%}"


def _one_replica(question: Question, option: Option, on_check: Callable[[str], None]) -> Corrected:
    """No load was given: the most users at a time that one replica serves within the SLO."""
    checks: dict[int, tuple[Sizing, Check]] = {}
    option, _, share_lines = _with_best_threshold(question, option, on_check)
    capless = bool(share_lines)

    def holds(users: int) -> bool:
        if users not in checks:
            on_check(f"one replica, {users} users")
            smaller = build_option(option.times, question.workload, question.slo, question.context_length, users)
            if capless and smaller.settings is not None:
                smaller = smaller.with_threshold(smaller.settings.max_num_batched_tokens)
            sizing = size_together(question, smaller)
            checks[users] = (sizing, run_check(question, sizing, f"{users} users", users=users))
        return checks[users][1].holds is not False

    assert option.settings is not None
    most = option.settings.max_num_seqs
    best: int | None = most
    if not holds(most) and question.slo:
        best = _most_users(most, holds)
    sizing, check = checks[best or most]
    corrected = Corrected(sizing, check, [checks[users][1] for users in sorted(checks)], share_lines)
    if best is None:
        corrected.lines.append(
            Line(
                topic="SLO",
                verdict="one replica does not hold it for a single user",
                reason=f"{'; '.join(checks[1][1].bounds)}. Try more GPUs per replica, a faster GPU or a looser bound.",
            )
        )
    elif best != most:
        corrected.lines.append(
            Line(
                topic="corrected by the simulation",
                verdict=f"admit {best} requests at a time instead of the {most} that the rule of thumb allows",
                reason=f"With {most}: {_missed(checks[most][1])}.",
            )
        )
    return corrected


def _most_users(most: int, holds: Callable[[int], bool]) -> int | None:
    if not holds(1):
        return None
    low, high = 1, most
    while high - low > max(1, high // 16):
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
