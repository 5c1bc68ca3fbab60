"""`Tuner`: one tuning from the first simulation to the files it leaves.

Does: simulate, measure, correct, confirm, find the safe load, in this order and within the budget; go on where an earlier run
stopped; at Ctrl-C, keep the best so far. Does not: print (it is given a function), start servers or simulate by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from tonle.bench import BenchOptions, Load
from tonle.bench.numbers import clock_text
from tonle.bench.sweep import SweepKind
from tonle.errors import ConfigError
from tonle.tune import budget as times
from tonle.tune.budget import Budget, Plan
from tonle.tune.correction import Correction, fit_correction
from tonle.tune.measurer import Measure, NotMeasured
from tonle.tune.objective import Goal, Outcome, one_line
from tonle.tune.prediction import Predict
from tonle.tune.safe_load import SafeLoad, find_safe_load, is_safe
from tonle.tune.search import Search
from tonle.tune.space import Choice, Settings, describe, key_of, variants
from tonle.tune.stage_measured import (
    MeasuredStage,
    confirmation,
    confirmed_settings,
    measured_outcome,
    measured_settings,
)
from tonle.tune.stage_safe import SafeLoadCheck, below, measured_safe_load
from tonle.tune.stage_simulated import search_simulated, shortlist
from tonle.tune.state import State, Trial, TuneDir
from tonle.tune.verdict import Verdict, judge

_GUESS_STARTUP_S = 15.0  # of a server, before one was started
_CANDIDATES = 12  # taken from the simulation; the budget says how many are measured
_NEWCOMERS = 2
_MARGIN = 0.05  # of the SLO's limits, in the simulation
_TRIALS_AGAIN = 120
_STEPS = 50  # a line about the simulated search after so many trials

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is tuned."""

    bench: BenchOptions  # what to send; one level
    goal: Goal
    knobs: list[Choice]
    seed: int = 0
    first: list[Settings] = field(default_factory=list)  # tried right after the default
    run_s: float | None = None  # of one measurement, where requests or duration are given

    @property
    def load(self) -> Load:
        return self.bench.levels[0]

    @property
    def is_sized(self) -> bool:
        """The number of requests is not ours to choose."""
        return self.bench.requests is not None or self.bench.duration_s is not None or self.is_replay

    @property
    def is_replay(self) -> bool:
        return self.bench.replay is not None

    @property
    def least_requests(self) -> int:
        users = self.load.users or 0
        return max(times.LEAST_REQUESTS, 2 * users)


class Tuner:
    """Owns the order of things."""

    def __init__(
        self, task: Task, folder: TuneDir, measure: Measure, budget: Budget, say: Say, predict: Predict | None = None
    ) -> None:
        """`predict` None: there is no simulator for this server, and all is measured."""
        self._task = task
        self._folder = folder
        self._measure = measure
        self._budget = budget
        self._plain_say = say
        self._predict = predict
        self._simulated_goal = msgspec.structs.replace(task.goal, margin=_MARGIN)
        self._reserve_s = 0.0  # of the budget, not for the search
        self._run_s = times.LEAST_RUN_S
        self._pairs = times.LEAST_PAIRS
        self.interrupted = False
        self.verdict: Verdict | None = None
        self.safe: SafeLoad | None = None
        self.tuned: Settings | None = None  # the best of the search, confirmed or not

    @property
    def _state(self) -> State:
        return self._folder.state

    def run(self) -> None:
        """To the end, or to Ctrl-C: then `interrupted`."""
        try:
            if self._predict is not None:
                self._simulate(self._predict)
            if (plan := self._plan()) is None:
                self._take_earlier()
            else:
                self._confirm(self._search(plan))
            self._find_safe_load()
            self._state.finished = True
        except KeyboardInterrupt:
            self.interrupted = True
            self._take_confirmed()
            self._say("stopped: what was found so far is kept")
        finally:
            self._measure.close()
            self._state.spent_s = self._budget.spent_s
            self._folder.save()

    @property
    def best(self) -> Settings:
        """{}: the default. After a confirmation, what it says; before, the best of the search, which may be the default, or of
        the simulation."""
        if self.verdict is not None:
            return self.tuned or {} if self.verdict.is_better else {}
        candidates = measured_settings(self._folder) if self.tuned is None else [{}, self.tuned]
        if len(candidates) > 1:
            # What was measured and did not start a second time, in the confirmation, is not recommended.
            usable = [each for each in candidates if not each or key_of(each) not in self._state.failed]
            return max(usable, key=lambda each: self._task.goal.rank(self.outcome(each)), default={})
        trials = self._state.reranked or self._state.trials
        best = shortlist(trials, self._simulated_goal, 1)
        if best and self._simulated_goal.rank(_of(trials, best[0])) > self._simulated_goal.rank(trials[0].outcome):
            return best[0]
        return {}

    @property
    def evidence(self) -> str:
        if self.verdict is not None:
            return "confirmed by a fresh run against the default"
        if len(measured_settings(self._folder)) > 1:
            return "measured in the search, not confirmed by a fresh run"
        return "simulated, not measured" if self._state.trials else "nothing was simulated or measured"

    def outcome(self, settings: Settings) -> Outcome:
        """Measured in the search."""
        return measured_outcome(self._folder, self._task.goal, settings)

    # -- the parts

    def _simulate(self, predict: Predict) -> None:
        if self._state.trials:
            self._say(f"{len(self._state.trials)} settings were simulated by an earlier run")
            return
        seconds = times.simulation_s(self._budget)
        self._say(f"simulating for up to {clock_text(seconds)}")

        def tell(count: int, best: Trial) -> None:
            if count % _STEPS == 0:
                self._say(f"  {count} settings, best so far: {describe(best.settings)}")

        found = search_simulated(
            self._task.knobs, self._simulated_goal, lambda settings: predict.outcome(settings, Correction()),
            seed=self._task.seed, seconds=seconds, first=self._task.first, tell=tell,
        )  # fmt: skip
        self._state.trials = found
        best = shortlist(found, self._simulated_goal, 1)
        self._say(f"{len(found)} settings simulated; the default: {one_line(found[0].outcome, self._task.goal)}")
        if best:
            self._say(f"  the best other: {describe(best[0])}: {one_line(_of(found, best[0]), self._task.goal)}")

    def _search(self, plan: Plan) -> MeasuredStage:
        task, state = self._task, self._state
        stage = MeasuredStage(
            self._folder, self._measure, task.goal, self._say, requests=state.requests, fits=self._fits
        )
        total = plan.search + sum(run.tag.stage == "search" for run in self._folder.measurements)
        self._say(
            f"to be measured: {plan.search} times for {clock_text(plan.run_s)} in the search, {plan.pairs} times each to confirm"
        )
        if self._predict is None:
            search = Search(task.knobs, seed=task.seed, first=task.first, warm_up=4)
            stage.one_by_one(search, measured_outcome(self._folder, task.goal, {}, "pilot"), total)
            ranked = stage.ranked(measured_settings(self._folder))
        else:
            survivors = stage.first_round(self._candidates(), total)
            newcomers = self._correct(self._predict, stage, survivors)
            ranked = stage.later_rounds(survivors, newcomers, total)
        self.tuned = ranked[0] if ranked else None
        return stage

    def _plan(self) -> Plan | None:
        """How long a measurement is and how many there are; sets the number of requests, once for all runs of the command.

        None: the time is over, and earlier runs of the command have measured something.
        """
        task, state = self._task, self._state
        rate, known = self._default_rate()  # may start a server, and see how long that takes
        startup_s = state.startup_s or _GUESS_STARTUP_S
        given_s = task.run_s
        if task.is_sized:
            given_s = given_s or known
        elif state.requests is not None:
            given_s = state.requests / rate
        least_s = max(times.LEAST_RUN_S, task.least_requests / rate)
        safe_s = 0.0 if self._predict is None else times.safe_load_s(self._budget)
        try:
            plan = times.plan(
                self._budget.left_s - safe_s, startup_s=startup_s, run_s=given_s, least_run_s=least_s,
                always_starts=task.bench.repeats_prompts,
            )  # fmt: skip
        except ConfigError:
            if len(measured_settings(self._folder)) > 1:
                return None
            raise
        if not task.is_sized and state.requests is None:
            state.requests = max(task.least_requests, round(plan.run_s * rate))
        self._run_s = plan.run_s
        safe_s += startup_s + plan.run_s if plan.checks_safe_load else 0.0
        self._reserve_s = self._confirmation_s(plan.pairs) + safe_s
        self._pairs = plan.pairs
        return plan

    def _default_rate(self) -> tuple[float, float]:
        """Requests per second of the default, and how long a run of it takes: simulated, or by a first measurement."""
        if self._predict is not None:
            outcome = self._state.trials[0].outcome
        else:
            if not self._folder.of({}, "pilot"):
                self._say("measuring the default for a moment, to see how long a measurement takes")
                self._measure.measure(
                    {}, "pilot", 0, requests=None if self._task.is_sized else self._task.least_requests
                )
            outcome = measured_outcome(self._folder, self._task.goal, {}, "pilot")
        return max(outcome.requests_per_s, 1e-6), outcome.duration_s

    def _candidates(self) -> list[Settings]:
        """The best of the simulation, and what can only be measured beside it, alternating."""
        trials, goal = self._state.trials, self._simulated_goal
        simulated = shortlist(trials, goal, _CANDIDATES)
        leads = bool(simulated) and goal.rank(_of(trials, simulated[0])) > goal.rank(trials[0].outcome)
        others = variants(self._task.knobs, simulated[0] if leads else {})
        mixed = [each for pair in zip(simulated, others, strict=False) for each in pair]
        shorter = min(len(simulated), len(others))
        return mixed + simulated[shorter:] + others[shorter:]

    def _correct(self, predict: Predict, stage: MeasuredStage, survivors: list[Settings]) -> list[Settings]:
        """Fit the step times to the first round, rank again; settings that are new among the best join the next round."""
        goal, state = self._simulated_goal, self._state
        known = [settings for settings in survivors if predict.knows(settings)]
        correction = state.correction
        if correction is None:
            measured = [(settings, stage.outcome(settings, before=1)) for settings in known]
            correction = state.correction = fit_correction(measured, predict.outcome)
            self._say(
                f"step times corrected: {correction}; throughput, TTFT and TPOT of the simulation now deviate by "
                f"{correction.error_after or 0:.0%} on average, {correction.error_before or 0:.0%} before"
            )
        if not state.reranked:  # an earlier run may have been stopped here
            state.reranked = search_simulated(
                self._task.knobs, goal, lambda settings: predict.outcome(settings, correction),
                seed=self._task.seed, seconds=times.simulation_s(self._budget) / 2, most=_TRIALS_AGAIN,
                first=[*known, *shortlist(state.trials, goal, 3 * _CANDIDATES)],
            )  # fmt: skip
        newcomers = shortlist(state.reranked, goal, _NEWCOMERS, besides=measured_settings(self._folder, before=1))
        worst = min(
            (goal.rank(_of(state.reranked, each)) for each in survivors if _has(state.reranked, each)), default=None
        )
        return [each for each in newcomers if worst is None or goal.rank(_of(state.reranked, each)) > worst]

    def _confirm(self, stage: MeasuredStage) -> None:
        if self.tuned is None:
            self._say("no other settings could be measured: the default stays")
            return
        pairs = self._pairs
        self._reserve_s = 0.0
        while pairs < times.MOST_PAIRS and self._confirmation_s(pairs + 1) < 0.8 * self._budget.left_s:
            pairs += 1
        self._say(f"confirming: the default against {describe(self.tuned)}, {pairs} times each with new prompts")
        with contextlib.suppress(NotMeasured):
            stage.confirm(self.tuned, pairs)
        self._take_confirmed()

    def _take_confirmed(self) -> None:
        """What this run of the command has confirmed, or an earlier one: the last settings that are better than the default, or
        else the last that are not."""
        for settings in confirmed_settings(self._folder):
            default, tuned = confirmation(self._folder, settings)
            if min(len(default), len(tuned)) < times.LEAST_PAIRS or key_of(settings) in self._state.failed:
                continue
            verdict = judge(default, tuned, self._task.goal)
            if self.verdict is None or verdict.is_better:
                self.tuned, self.verdict = settings, verdict
            if verdict.is_better:
                break
        if self.verdict is not None:
            self._say(self.verdict.sentence)

    def _take_earlier(self) -> None:
        """What earlier runs of the command confirmed, or else the best of what they measured."""
        self._say("the time is over: this is what earlier runs found; with a larger --budget the search goes on")
        self._take_confirmed()
        if self.verdict is None:
            others = [settings for settings in measured_settings(self._folder) if settings]
            self.tuned = max(others, key=lambda each: self._task.goal.rank(self.outcome(each)))

    def _find_safe_load(self) -> None:
        task, state = self._task, self._state
        if task.load.kind not in ("concurrency", "rate") or task.is_replay:
            return
        if self._predict is None:
            self.safe = None if self.verdict is None else measured_safe_load(task.load, self.verdict)
            return
        self._reserve_s = 0.0
        predict, correction, best = self._predict, state.correction or Correction(), self.best
        self._say("searching for the largest load that is safe, simulated")
        kind: SweepKind = "concurrency" if task.load.kind == "concurrency" else "rate"

        def outcome_at(value: float) -> Outcome:
            return predict.outcome(best, correction, load=replace(task.load, value=value))

        confirmed = None if self.verdict is None else self.verdict.best
        too_much = confirmed if confirmed is not None and task.goal.slo and not is_safe(confirmed) else None
        known_at = outcome_at if too_much is None else below(task.load.value, too_much, outcome_at)
        until_s = self._budget.spent_s + times.safe_load_s(self._budget)
        found = find_safe_load(kind, task.goal, known_at, has_time=lambda: self._budget.spent_s < until_s)
        self.safe = msgspec.structs.replace(found, stepped_down=too_much is not None)
        check = SafeLoadCheck(
            self._folder, self._measure, task.goal, self._say, load=task.load,
            requests=state.requests or task.least_requests,
        )  # fmt: skip
        startup_s = state.startup_s or _GUESS_STARTUP_S
        self.safe = check.confirm(
            best, self.safe, outcome_at, fits=lambda run_s: startup_s + run_s <= self._budget.left_s
        )

    def _fits(self, starts: int, runs: int) -> bool:
        if self._task.bench.repeats_prompts:
            starts = max(starts, runs)
        startup_s = self._state.startup_s or _GUESS_STARTUP_S
        return self._budget.left_s - self._reserve_s >= starts * startup_s + runs * self._run_s

    def _confirmation_s(self, pairs: int) -> float:
        startup_s = self._state.startup_s or _GUESS_STARTUP_S
        always_starts = self._task.bench.repeats_prompts
        return times.confirmation_s(pairs, startup_s=startup_s, run_s=self._run_s, always_starts=always_starts)

    def _say(self, text: str) -> None:
        self._state.spent_s = self._budget.spent_s
        self._folder.save()
        self._plain_say(f"[{self._budget}] {text}")


def _of(trials: Sequence[Trial], settings: Settings) -> Outcome:
    return next(trial.outcome for trial in trials if key_of(trial.settings) == key_of(settings))


def _has(trials: Sequence[Trial], settings: Settings) -> bool:
    return any(key_of(trial.settings) == key_of(settings) for trial in trials)
