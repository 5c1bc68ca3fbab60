"""The whole order of a tuning, with a formula in place of the server and of the simulator."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.tune.fake_server import SLO, USERS, Clock, FakeMeasure, FakePredict, folder_at, level
from tonle.bench import BenchOptions, Load
from tonle.bench.slo import Slo
from tonle.tune.budget import Budget
from tonle.tune.correction import Correction
from tonle.tune.measurer import NotMeasured
from tonle.tune.objective import Goal, Outcome, outcome_of
from tonle.tune.run import Task, Tuner
from tonle.tune.space import Choice, DeviceFacts, Settings, choices, key_of
from tonle.tune.state import Measurement, Stage, TuneDir

VALUES = {
    "max_num_seqs": (4, 8, 12, 16), "max_num_batched_tokens": (64, 128, 256), "long_prefill_token_threshold": (),
    "target_itl": (),
}  # fmt: skip
KNOBS = choices("tonle", DeviceFacts("cpu", slo=SLO), own=VALUES)


def tuner(
    folder: TuneDir, *, budget_s: float = 600, goal: Goal | None = None, knobs: list[Choice] | None = None,
    simulated: bool = True, clock: Clock | None = None, **measuring: object,
) -> tuple[Tuner, FakeMeasure, list[str]]:  # fmt: skip
    clock = clock or Clock()
    goal = goal or Goal(SLO)
    measure = FakeMeasure(folder, clock, slo=goal.slo, **measuring)  # type: ignore[arg-type]
    said: list[str] = []
    task = Task(bench=BenchOptions(concurrency=(USERS,)), goal=goal, knobs=knobs or KNOBS)
    budget = Budget(budget_s, spent_before_s=folder.state.spent_s, clock=clock)
    predict = FakePredict(clock, goal.slo) if simulated else None
    return Tuner(task, folder, measure, budget, said.append, predict), measure, said


def test_it_finds_settings_that_hold_what_the_default_misses(tmp_path: Path) -> None:
    folder = folder_at(tmp_path / "out")
    made, measure, said = tuner(folder, slow=1.2)
    made.run()
    assert not outcome_of([level({}, slow=1.2)], SLO).holds
    assert made.verdict is not None and made.verdict.is_better, said
    assert made.verdict.tuned.holds and not made.verdict.default.holds
    assert outcome_of([level(made.best, slow=1.2)], SLO).holds
    assert made.verdict.sentence.startswith("default → tuned: TTFT p95 ") and "measured" in made.verdict.sentence
    # The confirmation is fresh and interleaved, and neighbours share a server.
    confirm = [key for key, stage, _ in measure.calls if stage == "confirm"]
    tuned = key_of(made.best)
    assert confirm[:4] == ["", tuned, tuned, ""]
    assert confirm.count("") == confirm.count(tuned)
    rounds = {number for _, stage, number in measure.calls if stage == "confirm"}
    assert rounds.isdisjoint({number for _, stage, number in measure.calls if stage == "search"})


def test_the_step_times_are_corrected_and_the_budget_is_kept(tmp_path: Path) -> None:
    folder, clock = folder_at(tmp_path / "out"), Clock()
    made, _, said = tuner(folder, slow=1.3, clock=clock)
    made.run()
    correction = folder.state.correction
    assert correction is not None and correction.step == pytest.approx(1.3, abs=0.08)
    assert (correction.error_after or 1) < 0.1 < (correction.error_before or 0)
    assert clock.now_s <= 600
    assert folder.state.finished and folder.state.spent_s == pytest.approx(clock.now_s)
    assert all(text.startswith("[") for text in said)


def test_the_default_stays_where_nothing_is_better(tmp_path: Path) -> None:
    """Its throughput is what larger steps and more sequences have too."""
    goal = Goal(Slo(), "throughput")
    knobs = [Choice("max_num_batched_tokens", (1024, 2048), simulated=True)]  # slower in this formula
    made, _, _ = tuner(folder_at(tmp_path / "out"), goal=goal, knobs=knobs)
    made.run()
    assert made.verdict is not None and not made.verdict.is_better
    assert made.best == {}
    assert "not higher" in made.verdict.reason


def test_any_percentile_of_an_slo_is_confirmed(tmp_path: Path) -> None:
    goal = Goal(Slo.parse(["ttft-p90=2s", "itl-p75=1s"]))
    made, _, _ = tuner(folder_at(tmp_path / "out"), goal=goal)
    made.run()
    assert made.verdict is not None
    assert {"TTFT p90", "ITL p75"} <= {change.metric for change in made.verdict.changes}
    assert "TTFT p90" in made.verdict.sentence


def test_noise_is_not_taken_for_an_effect(tmp_path: Path) -> None:
    """All settings are the same server: the best of many noisy measurements must not win."""
    goal = Goal(Slo(), "throughput")
    knobs = [Choice("long_prefill_token_threshold", tuple(range(1, 12)), simulated=False)]  # not in the formula
    wins = 0
    for number in range(4):
        made, _, _ = tuner(folder_at(tmp_path / f"{number}"), goal=goal, knobs=knobs, noise=0.3, simulated=False)
        made.run()
        assert made.tuned is not None and made.verdict is not None
        wins += bool(made.best)
    assert wins <= 1


def test_settings_that_do_not_start_are_passed_over(tmp_path: Path) -> None:
    folder = folder_at(tmp_path / "out")
    broken = key_of({"max_num_seqs": 12, "max_num_batched_tokens": 128})  # the best one
    made, measure, _ = tuner(folder, slow=1.2, broken=(broken,))
    made.run()
    assert made.tuned and key_of(made.tuned) != broken and made.verdict is not None
    assert broken in folder.state.failed
    assert all(key != broken for key, _, _ in measure.calls)


def test_a_default_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    made, _, _ = tuner(folder_at(tmp_path / "out"), broken=("",))
    with pytest.raises(NotMeasured):
        made.run()


def test_measured_only_knobs_are_tried_with_the_best_of_the_simulation(tmp_path: Path) -> None:
    own = {**VALUES, "kv_cache_dtype": ("int8",)}
    knobs = choices("tonle", DeviceFacts("cpu", slo=SLO), allow=["kv-dtype"], own=own)
    made, measure, _ = tuner(folder_at(tmp_path / "out"), knobs=knobs, slow=1.2)
    made.run()
    assert any("kv_cache_dtype=int8" in key for key, stage, _ in measure.calls if stage == "search")
    assert made.best.get("kv_cache_dtype") == "int8"  # faster in the formula


def test_without_a_simulator_the_optimizer_measures_one_after_the_other(tmp_path: Path) -> None:
    own = {"max_num_seqs": (8, 12, 16), "max_num_batched_tokens": (128, 256), "long_prefill_token_threshold": ()}
    knobs = choices("vllm", DeviceFacts("cpu"), own=own)
    clock = Clock()
    folder = folder_at(tmp_path / "out")
    made, measure, _ = tuner(folder, knobs=knobs, simulated=False, budget_s=2400, clock=clock, startup_s=110.0)
    made.run()
    search = [key for key, stage, _ in measure.calls if stage == "search"]
    assert search[0] == "" and len(search) == len(set(search)) >= 4
    assert made.verdict is not None and made.verdict.is_better
    assert clock.now_s <= 2400
    assert made.safe is not None and made.safe.value == USERS and made.safe.source == "measured"


def test_ctrl_c_keeps_the_best_so_far_and_the_same_command_goes_on(tmp_path: Path) -> None:
    folder = folder_at(tmp_path / "out")
    made, measure, _ = tuner(folder, slow=1.2, stop_after=4)
    made.run()
    assert made.interrupted and made.verdict is None
    assert made.best and made.evidence == "measured in the search, not confirmed by a fresh run"
    assert not folder.state.finished
    again = folder_at(tmp_path / "out")
    assert len(again.measurements) == 4 and again.state.spent_s > 0
    second, later, said = tuner(again, slow=1.2)
    second.run()
    assert not second.interrupted and second.verdict is not None
    assert not set(later.calls) & set(measure.calls)  # nothing was measured twice
    assert any("simulated by an earlier run" in text for text in said)


@pytest.mark.parametrize("stop_after", [3, 5, 8])
def test_ctrl_c_keeps_the_default_where_it_was_measured_to_be_the_best(tmp_path: Path, stop_after: int) -> None:
    """After 3 measurements in the search, later in the confirmation, which compares it with the best of the others."""
    knobs = [Choice("max_num_batched_tokens", (1024, 2048), simulated=True)]  # slower in this formula
    goal = Goal(Slo(), "throughput")
    made, measure, _ = tuner(folder_at(tmp_path / "out"), goal=goal, knobs=knobs, stop_after=stop_after)
    made.run()
    assert made.interrupted and made.best == {}
    assert (measure.calls[-1][1] == "confirm") == (stop_after > 3)
    assert (made.verdict is not None) == (stop_after == 8), "two pairs are a confirmation"


def test_what_was_confirmed_is_kept_when_the_tuning_that_goes_on_is_stopped(tmp_path: Path) -> None:
    first, _, _ = tuner(folder_at(tmp_path / "out"), slow=1.2)
    first.run()
    assert first.verdict is not None and first.verdict.is_better
    second, measure, _ = tuner(folder_at(tmp_path / "out"), slow=1.2, budget_s=3000, stop_after=1)
    second.run()
    assert second.interrupted and [stage for _, stage, _ in measure.calls] == ["search"]
    assert second.verdict is not None and second.verdict.sentence == first.verdict.sentence
    assert second.best == first.best


def test_other_settings_are_confirmed_beside_a_default_of_their_own(tmp_path: Path) -> None:
    """The machine may have become faster since the earlier confirmation."""
    first, _, _ = tuner(folder_at(tmp_path / "out"), slow=1.2)
    first.run()
    second, measure, _ = tuner(folder_at(tmp_path / "out"), slow=0.7, budget_s=3000, broken=(key_of(first.best),))
    second.run()
    confirm = [(key, number) for key, stage, number in measure.calls if stage == "confirm"]
    assert second.tuned is not None and second.tuned != first.tuned and second.verdict is not None
    assert [key for key, _ in confirm[:4]] == ["", key_of(second.tuned), key_of(second.tuned), ""]
    assert second.verdict.default.runs == second.verdict.tuned.runs == len(confirm) / 2


def test_settings_that_do_not_start_for_the_confirmation_are_not_recommended(tmp_path: Path) -> None:
    folder = folder_at(tmp_path / "out")
    made, measure, _ = tuner(folder, slow=1.2)
    sound = measure.measure

    def measure_until_the_confirmation(settings: Settings, stage: Stage, number: int, **options: Any) -> Measurement:
        measure.broken = (key_of(settings),) if settings and stage == "confirm" else ()
        return sound(settings, stage, number, **options)

    measure.measure = measure_until_the_confirmation  # type: ignore[method-assign,assignment]
    made.run()
    assert made.verdict is None and made.tuned and key_of(made.tuned) in folder.state.failed
    assert made.best == {}


def test_a_tuning_stopped_while_it_simulates_again_does_so_when_it_goes_on(tmp_path: Path) -> None:
    folder = folder_at(tmp_path / "out")
    made, _, said = tuner(folder, slow=1.2)
    outcome = made._predict.outcome  # type: ignore[union-attr]

    def stopped(settings: Settings, correction: Correction, load: Load | None = None) -> Outcome:
        if any("step times corrected" in text for text in said):
            raise KeyboardInterrupt
        return outcome(settings, correction, load)

    made._predict.outcome = stopped  # type: ignore[union-attr,method-assign]
    made.run()
    assert made.interrupted and folder.state.correction is not None and not folder.state.reranked
    again = folder_at(tmp_path / "out")
    second, _, _ = tuner(again, slow=1.2)
    second.run()
    assert again.state.correction == folder.state.correction and again.state.reranked


def test_ctrl_c_before_any_measurement_says_what_the_simulation_says(tmp_path: Path) -> None:
    made, _, _ = tuner(folder_at(tmp_path / "out"), stop_after=0)
    made.run()
    assert made.interrupted and made.best
    assert made.evidence == "simulated, not measured"


def test_when_the_time_is_over_the_same_command_shows_its_result_again(tmp_path: Path) -> None:
    clock = Clock()
    first, _, _ = tuner(folder_at(tmp_path / "out"), slow=1.2, clock=clock)
    first.run()
    assert first.verdict is not None and first.verdict.is_better
    again = folder_at(tmp_path / "out")
    again.state.spent_s = 600.0
    second, measure, said = tuner(again, slow=1.2)
    second.run()
    assert measure.calls == [] and any("the time is over" in text for text in said)
    assert second.verdict is not None and second.verdict.sentence == first.verdict.sentence
    assert (second.best, second.safe) == (first.best, first.safe)


def test_a_default_that_did_not_start_is_tried_again_by_the_next_run(tmp_path: Path) -> None:
    for simulated in (True, False):
        first, _, _ = tuner(folder_at(tmp_path / f"{simulated}"), broken=("",), simulated=simulated)
        with pytest.raises(NotMeasured):
            first.run()
        second, measure, _ = tuner(folder_at(tmp_path / f"{simulated}"), simulated=simulated, slow=1.2)
        second.run()
        assert measure.calls[0][0] == "" and second.verdict is not None


def test_each_measurement_of_a_file_starts_a_server_and_the_budget_is_kept(tmp_path: Path) -> None:
    clock = Clock()
    made, measure, _ = tuner(folder_at(tmp_path / "out"), slow=1.2, clock=clock, startup_s=20.0, always_starts=True)
    made._task = replace(made._task, bench=replace(made._task.bench, file=tmp_path / "prompts.jsonl"))
    made.run()
    assert made.verdict is not None and measure.starts == len(measure.calls)
    assert clock.now_s <= 600


KILLED = """
import os, sys
from pathlib import Path
from tests.unit.tune.test_tuner import tuner
from tests.unit.tune.fake_server import folder_at
folder = folder_at(Path(sys.argv[1]))
made, measure, said = tuner(folder, slow=1.2)
add = folder.add
def add_and_die(tag, report):
    if len(folder.measurements) == 5:
        os._exit(9)
    return add(tag, report)
folder.add = add_and_die
made.run()
"""


def test_a_killed_tuning_goes_on_where_it_was(tmp_path: Path) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "out")], check=False, capture_output=True, text=True
    )
    assert killed.returncode == 9, killed.stderr
    folder = folder_at(tmp_path / "out")
    assert len(folder.measurements) == 5
    before = {(key_of(run.tag.server), run.tag.stage, run.tag.round) for run in folder.measurements}
    made, measure, _ = tuner(folder, slow=1.2)
    made.run()
    assert made.verdict is not None and made.verdict.is_better
    assert not before & set(measure.calls)


def test_the_safe_load_is_found_and_measured(tmp_path: Path) -> None:
    made, measure, said = tuner(folder_at(tmp_path / "out"), slow=1.1)
    made.run()
    assert made.safe is not None and made.safe.value is not None and made.safe.confirmed, said
    users = int(made.safe.value)
    assert outcome_of([level(made.best, users=users, slow=1.1)], SLO).holds
    assert not outcome_of([level(made.best, users=2 * users + 2, slow=1.1)], SLO).holds
    assert any(stage == "safe" for _, stage, _ in measure.calls)


def test_no_load_is_safe_that_was_measured_to_be_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulation is far too fast, however it is corrected, and there is no time left to measure at what it calls safe."""
    predict = FakePredict.outcome
    monkeypatch.setattr(
        FakePredict,
        "outcome",
        lambda self, settings, correction, load=None: predict(self, settings, Correction(step=0.2), load),
    )
    folder = folder_at(tmp_path / "out")
    made, _, said = tuner(folder, slow=2.5, budget_s=300)
    made.run()
    assert made.verdict is not None and not made.verdict.best.holds
    assert "neither holds the SLO" in made.verdict.reason
    assert not [run for run in folder.measurements if run.tag.stage == "safe"], said
    assert made.safe is not None and made.safe.value is not None and made.safe.value < USERS
    assert made.safe.stepped_down
