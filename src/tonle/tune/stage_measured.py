"""The second stage: the best few and the default on a real server, in rounds; then the best against the default afresh.

Does: successive halving with the default in each round, one proposal after the other where there is no simulator, the
confirmation in the order A B B A. Does not: start servers (`measurer.py`) or tell chance from effect (`verdict.py`).

All settings of a round get the same prompts, and each round has prompts of its own. What an earlier run of the same
command measured is not measured again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tonle.tune.measurer import Measure, NotMeasured
from tonle.tune.objective import Goal, Outcome, one_line, outcome_of
from tonle.tune.search import Search
from tonle.tune.space import Settings, describe, key_of
from tonle.tune.state import Measurement, Stage, TuneDir

CONFIRM_ROUND = 100  # rounds of the confirmation begin here: other prompts than any of the search
_APART = 10  # the rounds of one confirmation begin so many after those of the one before
SAFE_ROUND = 200
_FIRST_SHARE = 0.55  # of the measurements of the search, for its first round

Say = Callable[[str], None]
Fits = Callable[[int, int], bool]  # whether the budget has room for so many starts of servers and so many measurements


class MeasuredStage:
    """Owns the order in which settings are measured."""

    def __init__(
        self, folder: TuneDir, measure: Measure, goal: Goal, say: Say, *, requests: int | None, fits: Fits
    ) -> None:
        self._folder = folder
        self._measure = measure
        self._goal = goal
        self._say = say
        self._requests = requests
        self._fits = fits

    def first_round(self, candidates: Sequence[Settings], total: int) -> list[Settings]:
        """The default and as many candidates as a search of `total` measurements begins with; those that could be measured."""
        count = max(2, math.ceil(_FIRST_SHARE * total))
        return self.round(0, [{}, *candidates][:count], least=2)

    def later_rounds(self, survivors: Sequence[Settings], newcomers: Sequence[Settings], total: int) -> list[Settings]:
        """Halve the survivors until `total` measurements are made; newcomers join once. What is left, the best first."""
        current, joining, number = list(survivors), list(newcomers), 1
        while True:
            others = self.ranked(current, before=number)
            line_up = [*others[: max(1, len(others) // 2)], *joining]
            room = total - self._num_measured(before=number) - 1  # the default is in each round
            line_up = line_up[: max(0, room)]
            if len(line_up) < 2:  # one is left: the confirmation says the rest
                return self.ranked([*current, *line_up])
            joining = []
            measured = self.round(number, [{}, *line_up])
            current = measured if len(measured) > 1 else current
            if len(measured) <= len(line_up):  # the time is over, or some did not start
                return self.ranked(current)
            number += 1

    def round(self, number: int, line_up: Sequence[Settings], *, least: int = 0) -> list[Settings]:
        """Measure each of them once. `least`: so many are measured whatever the budget says."""
        done = []
        for place, settings in enumerate(line_up):
            if settings and key_of(settings) in self._folder.state.failed:
                continue
            if self._earlier(settings, "search", number) is None and place >= least and not self._fits(1, 1):
                self._say("the time for the search is over")
                break
            try:
                self._once(settings, "search", number, f"round {number + 1}, {place + 1} of {len(line_up)}")
            except NotMeasured:
                if not settings:
                    raise  # the default: there is nothing to compare with
                continue
            done.append(settings)
        return done

    def one_by_one(self, search: Search, reference: Outcome, total: int) -> None:
        """Without a simulator: measure what the optimizer proposes, until `total` measurements or the grid are used up."""
        for earlier in self._folder.measurements:
            if earlier.tag.stage == "search":
                search.tell(earlier.tag.server, self._goal.score(self.outcome(earlier.tag.server), reference))
        for failed in self._failed_settings(search):
            search.tell(failed, None)
        while self._num_measured() < total and self._fits(1, 1):
            settings = search.ask()
            if settings is None:
                self._say("all settings of the grid are measured")
                return
            try:
                self._once(settings, "search", 0, f"{self._num_measured() + 1} of {total}")
            except NotMeasured:
                if not settings:
                    raise
                search.tell(settings, None)
                continue
            search.tell(settings, self._goal.score(self.outcome(settings), reference))

    def confirm(self, tuned: Settings, pairs: int) -> int:
        """Default and tuned afresh, in the order A B B A A B …; how many pairs there are now."""
        first = _first_round(self._folder, tuned)
        for pair in range(pairs):
            order: list[Settings] = [{}, tuned] if pair % 2 == 0 else [tuned, {}]
            missing = [each for each in order if self._earlier(each, "confirm", first + pair) is None]
            if missing and pair >= 2 and not self._fits(1, len(missing)):
                self._say("no time is left for another pair")
                return pair
            for settings in order:
                self._once(settings, "confirm", first + pair, f"confirmation, pair {pair + 1} of {pairs}")
        return pairs

    def outcome(self, settings: Settings, stage: Stage = "search", *, before: int | None = None) -> Outcome:
        """Of all its measurements in this stage; `before`: in the rounds before this one."""
        return measured_outcome(self._folder, self._goal, settings, stage, before=before)

    def ranked(self, candidates: Sequence[Settings], *, before: int | None = None) -> list[Settings]:
        """Those that were measured, without the default, the best first."""
        others = [settings for settings in candidates if settings and self._folder.of(settings, "search")]
        return sorted(others, key=lambda each: self._goal.rank(self.outcome(each, before=before)), reverse=True)

    def _once(self, settings: Settings, stage: Stage, number: int, which: str) -> Measurement:
        """One measurement, unless it is there already."""
        if (earlier := self._earlier(settings, stage, number)) is not None:
            return earlier
        self._say(f"measuring ({which}): {describe(settings)}")
        measurement = self._measure.measure(settings, stage, number, requests=self._requests)
        self._say(f"  {one_line(outcome_of([measurement.level], self._goal.slo), self._goal)}")
        return measurement

    def _earlier(self, settings: Settings, stage: Stage, number: int) -> Measurement | None:
        return next((run for run in self._folder.of(settings, stage) if run.tag.round == number), None)

    def _num_measured(self, *, before: int = CONFIRM_ROUND) -> int:
        return sum(run.tag.stage == "search" and run.tag.round < before for run in self._folder.measurements)

    def _failed_settings(self, search: Search) -> list[Settings]:
        """Not the default, which is always tried again: without it there is nothing to compare with."""
        return [settings for settings in search.grid() if settings and key_of(settings) in self._folder.state.failed]


def measured_outcome(
    folder: TuneDir, goal: Goal, settings: Settings, stage: Stage = "search", *, before: int | None = None
) -> Outcome:
    """Of all measurements of these settings in this stage; `before`: in the rounds before this one."""
    runs = [run for run in folder.of(settings, stage) if before is None or run.tag.round < before]
    return outcome_of([run.level for run in runs], goal.slo)


def confirmed_settings(folder: TuneDir) -> list[Settings]:
    """Those that were measured afresh beside the default, each once, the last first."""
    runs = [run for run in folder.measurements if run.tag.stage == "confirm" and run.tag.server]
    return list({key_of(run.tag.server): run.tag.server for run in reversed(runs)}.values())


def confirmation(folder: TuneDir, tuned: Settings) -> tuple[list[Measurement], list[Measurement]]:
    """The runs of the default, and those of `tuned` beside them."""
    first = _first_round(folder, tuned)
    default, own = (
        [run for run in folder.of(settings, "confirm") if first <= run.tag.round < first + _APART]
        for settings in ({}, tuned)
    )
    return default, own


def _first_round(folder: TuneDir, tuned: Settings) -> int:
    """Of their confirmation. Each has rounds of its own: beside settings that are confirmed a day later the default is measured
    again, as the machine may have become faster."""
    if own := folder.of(tuned, "confirm"):
        return own[0].tag.round // _APART * _APART
    others = [run.tag.round for settings in confirmed_settings(folder) for run in folder.of(settings, "confirm")]
    return max(others) // _APART * _APART + _APART if others else CONFIRM_ROUND


def measured_settings(folder: TuneDir, *, before: int = CONFIRM_ROUND) -> list[Settings]:
    """Those that the search measured, each once; `before`: in the rounds before this one."""
    runs = [run for run in folder.measurements if run.tag.stage == "search" and run.tag.round < before]
    return list({key_of(run.tag.server): run.tag.server for run in runs}.values())
