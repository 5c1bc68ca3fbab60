"""The first stage: the simulator ranks hundreds of settings in seconds.

Does: search with Optuna over simulated outcomes, choose the few worth a measurement, find the front of throughput and latency.
Does not: know how a simulation is made (`prediction.py`); a function from settings to an outcome is handed in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tonle.tune.objective import Goal, Outcome
from tonle.tune.search import Search
from tonle.tune.space import Choice, Settings, alternatives, key_of
from tonle.tune.state import Trial

MOST_TRIALS = 400
_SIMPLIFIED = 8  # of the best
_SAME = 0.002  # outcomes this close are the same to us

OutcomeOf = Callable[[Settings], Outcome]
Tell = Callable[[int, Trial], None]  # number of trials so far, the best of them


def search_simulated(
    knobs: Sequence[Choice],
    goal: Goal,
    predict: OutcomeOf,
    *,
    seed: int,
    seconds: float,
    most: int = MOST_TRIALS,
    first: Sequence[Settings] = (),
    clock: Callable[[], float] = time.monotonic,
    tell: Tell | None = None,
) -> list[Trial]:
    """Trials, the default first, until the time or the grid is used up. `first`: settings to try right after the default.

    Knobs that are tried by themselves come last, outside of the grid.
    """
    search = Search([knob for knob in knobs if knob.simulated and not knob.alone], seed=seed, first=first)
    until_s = clock() + seconds
    trials: list[Trial] = []
    best: Trial | None = None
    while len(trials) < most and (not trials or clock() < until_s):
        settings = search.ask()
        if settings is None:
            break
        trial = Trial(settings, predict(settings))
        trials.append(trial)
        search.tell(settings, goal.score(trial.outcome, trials[0].outcome))
        if best is None or goal.rank(trial.outcome) > goal.rank(best.outcome):
            best = trial
        if tell is not None:
            tell(len(trials), best)
    trials += _without_idle_settings(trials, goal, predict)
    return trials + [Trial(settings, predict(settings)) for settings in alternatives(knobs)]


def _without_idle_settings(trials: Sequence[Trial], goal: Goal, predict: OutcomeOf) -> list[Trial]:
    """The best once more, without those of their settings that change nothing."""
    known = {key_of(trial.settings): trial for trial in trials}
    made: list[Trial] = []
    for settings in shortlist(trials, goal, _SIMPLIFIED):
        current = known[key_of(settings)]
        for name in settings:
            fewer = {key: value for key, value in current.settings.items() if key != name}
            trial = known.get(key_of(fewer))
            if trial is None:
                trial = known[key_of(fewer)] = Trial(fewer, predict(fewer))
                made.append(trial)
            if _alike(trial.outcome, current.outcome):
                current = trial
    return made


def shortlist(trials: Sequence[Trial], goal: Goal, count: int, *, besides: Sequence[Settings] = ()) -> list[Settings]:
    """The best settings, without the default, without `besides`, and without those that came to the same as a better one.

    Of settings with the same outcome, the one that changes least is taken.
    """
    taken = {key_of({}), *map(key_of, besides)}
    ordered = sorted(trials, key=lambda trial: (goal.rank(trial.outcome), -len(trial.settings)), reverse=True)
    shown = [trial for trial in trials if key_of(trial.settings) in taken]
    found: list[Trial] = []
    for trial in ordered:
        if len(found) == count:
            break
        if key_of(trial.settings) in taken or any(_alike(trial.outcome, other.outcome) for other in [*shown, *found]):
            continue
        found.append(trial)
    return [_simplest(trial, trials).settings for trial in found]


def _simplest(trial: Trial, trials: Sequence[Trial]) -> Trial:
    same = [other for other in trials if _alike(trial.outcome, other.outcome)]
    return min(same, key=lambda other: len(other.settings))


def _alike(one: Outcome, other: Outcome) -> bool:
    pairs = [(one.output_tokens_per_s, other.output_tokens_per_s), (one.requests_per_s, other.requests_per_s)]
    for name in ("ttft_ms", "itl_ms", "e2el_ms"):
        mine, theirs = getattr(one, name), getattr(other, name)
        if mine is not None and theirs is not None:
            pairs += [(mine.p50, theirs.p50), (mine.p99, theirs.p99)]
    return all(abs(a - b) <= _SAME * max(abs(a), abs(b)) for a, b in pairs)
