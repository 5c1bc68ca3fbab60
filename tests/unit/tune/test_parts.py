"""Knobs, goal, budget, optimizer, front, correction, safe load: each by itself."""

from __future__ import annotations

import functools
import itertools
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import yaml

from tests.unit.tune.fake_server import SLO, USERS, Clock, FakeMeasure, folder_at, level
from tonle.bench import BenchOptions, Load, Sample
from tonle.bench.measure import Circumstances, report_level
from tonle.bench.numbers import clock_text
from tonle.bench.slo import Slo
from tonle.bench.sweep import SweepKind
from tonle.errors import ConfigError
from tonle.simulate.profile import Profile, load_profile
from tonle.tune import budget, tuning
from tonle.tune.correction import Correction, corrected, fit_correction
from tonle.tune.objective import Goal, Outcome, one_line, outcome_of
from tonle.tune.picture import pareto_front
from tonle.tune.results import how_known
from tonle.tune.safe_load import SafeLoad, find_safe_load, gateway_limits
from tonle.tune.search import Search
from tonle.tune.servers import TonleLauncher
from tonle.tune.space import (
    BY_NAME,
    Choice,
    DeviceFacts,
    Settings,
    alternatives,
    choices,
    key_of,
    notes_of_answers,
    parse_values,
    variants,
    without_effect,
)
from tonle.tune.stage_safe import SafeLoadCheck, measured_safe_load
from tonle.tune.stage_simulated import search_simulated, shortlist
from tonle.tune.state import Trial
from tonle.tune.verdict import Verdict


def outcome(settings: Settings, slo: Slo = SLO, **options: float) -> Outcome:
    return outcome_of([level(settings, slo=slo, **options)], slo)  # type: ignore[arg-type]


# -- knobs


def test_every_knob_is_a_setting_of_the_server() -> None:
    from tonle.config.serve import SETTINGS

    for knob in BY_NAME.values():
        assert SETTINGS[knob.name].flag == knob.tonle_flag
        for device in ("cpu", "cuda"):
            for value in knob.values(DeviceFacts(device, 64, Slo.parse(["itl-p99=50ms"]))):
                SETTINGS[knob.name].type.read(str(value))  # raises


def test_what_changes_answers_is_searched_only_if_allowed() -> None:
    facts = DeviceFacts("cpu")
    assert "kv_cache_dtype" not in {knob.name for knob in choices("tonle", facts)}
    found = {knob.name: knob for knob in choices("tonle", DeviceFacts("cuda"), allow=["kv-dtype"])}
    assert found["kv_cache_dtype"].values == ("fp8",)
    # On a CPU int8 or float32 is what the server has already.
    assert "kv_cache_dtype" not in {knob.name for knob in choices("tonle", facts, allow=["kv-dtype"])}
    own = {"kv_cache_dtype": ("int8",)}
    found = {knob.name: knob for knob in choices("tonle", facts, allow=["kv-dtype"], own=own)}
    assert found["kv_cache_dtype"].values == ("int8",)
    with pytest.raises(ConfigError, match="add --allow kv-dtype"):
        choices("tonle", facts, own={"kv_cache_dtype": ("int8",)})
    with pytest.raises(ConfigError, match="kv-dtype, quantization, speculation, not speed"):
        choices("tonle", facts, allow=["speed"])


def test_quantization_and_speculation_are_measured_if_allowed() -> None:
    assert not {"quantization", "speculation"} & {knob.name for knob in choices("tonle", DeviceFacts("cuda"))}
    for device, forms in (("cpu", ("int8", "int4")), ("cuda", ("fp8", "int8", "int4"))):
        found = choices("tonle", DeviceFacts(device), allow=["quantization", "speculation"])
        by_name = {knob.name: knob for knob in found}
        assert by_name["quantization"].values == forms and by_name["speculation"].values == ("off",)
        assert not by_name["quantization"].simulated and not by_name["speculation"].simulated
        assert {"quantization": "int4"} in variants(found, {}) and {"speculation": "off"} in variants(found, {})
    with pytest.raises(ConfigError, match="--values quantization: it changes answers; add --allow quantization"):
        choices("tonle", DeviceFacts("cpu"), own={"quantization": ("int8",)})
    with pytest.raises(ConfigError, match="--values speculation: add --allow speculation"):
        choices("tonle", DeviceFacts("cpu"), own={"speculation": ("off",)})
    (note,) = notes_of_answers({"quantization": "int4", "speculation": "off", "max_num_seqs": 8})
    assert note.startswith("quantization int4: ") and note.endswith("answers differ from the default's")


def test_allowing_what_has_no_values_on_a_device_is_told() -> None:
    cpu, own = DeviceFacts("cpu"), {"kv_cache_dtype": ("float32",)}
    (told,) = without_effect(["kv-dtype"], choices("tonle", cpu, allow=["kv-dtype"]))
    assert "--allow kv-dtype" in told and "--values kv_cache_dtype=" in told
    assert without_effect(["kv-dtype"], choices("tonle", cpu, allow=["kv-dtype"], own=own)) == []
    assert without_effect(["kv-dtype"], choices("tonle", DeviceFacts("cuda"), allow=["kv-dtype"])) == []
    assert without_effect([], choices("tonle", cpu)) == []


def test_values_of_the_callers_own() -> None:
    own = parse_values(["max-num-seqs=8,16", "target_itl=", "long_prefill_token_threshold="])
    found = {knob.name: knob.values for knob in choices("tonle", DeviceFacts("cpu", slo=SLO), own=own)}
    assert found["max_num_seqs"] == (8, 16)
    assert "target_itl" not in found and "long_prefill_token_threshold" not in found
    with pytest.raises(ConfigError, match="does not search block_size"):
        choices("tonle", DeviceFacts("cpu"), own={"block_size": (16,)})
    assert "block_size" in {knob.name for knob in choices("vllm", DeviceFacts("cpu"), own={"block_size": (16,)})}
    for wrong in ("max_num_seqs", "=3"):
        with pytest.raises(ConfigError, match="NAME=VALUE"):
            parse_values([wrong])
    with pytest.raises(ConfigError, match="twice"):
        parse_values(["a=1", "a=2"])
    with pytest.raises(ConfigError, match=r"nothing to search; give values to try for a place \{NAME\} in --command"):
        choices("other", DeviceFacts("cpu"))


def test_adaptive_targets_stand_alone_below_the_limit() -> None:
    knobs = choices("tonle", DeviceFacts("cpu", slo=Slo.parse(["itl-p99=50ms", "tpot-p95=40ms"])))
    assert alternatives(knobs) == [{"target_itl": 24}, {"target_itl": 32}, {"target_itl": 38}]
    assert not alternatives(choices("tonle", DeviceFacts("cpu", slo=Slo.parse(["ttft-p95=1s"]))))
    assert variants([Choice("x", (1, 2), simulated=False)], {"y": 3}) == [{"y": 3, "x": 1}, {"y": 3, "x": 2}]


# -- goal


def test_holding_comes_before_goodput_and_goodput_before_nearness() -> None:
    goal = Goal(SLO)
    small, default = {"max_num_seqs": 12, "max_num_batched_tokens": 128}, {}
    assert outcome(small).holds and not outcome(default).holds
    assert goal.rank(outcome(small)) > goal.rank(outcome(default))
    reference = outcome({})
    found = [
        outcome({"max_num_seqs": rows, "max_num_batched_tokens": tokens}) for rows in (1, 8, 16) for tokens in (64, 256)
    ]
    assert sorted(found, key=goal.rank) == sorted(found, key=lambda each: goal.score(each, reference))


def test_where_all_is_bad_the_nearer_one_is_better() -> None:
    goal = Goal(Slo.parse(["itl-p99=5ms"]))
    near, far = outcome({"max_num_seqs": 1}, goal.slo), outcome({}, goal.slo)
    assert near.goodput_per_s == far.goodput_per_s == 0.0
    assert goal.rank(near) > goal.rank(far)


@pytest.mark.parametrize(
    ("slo", "message"),
    [
        (["ttft-p50=2s", "ttft-p95=1s"], "TTFT p50 ≤ 2 s says nothing beside TTFT p95 ≤ 1 s"),
        (["ttft-p95=9s", "e2el-p95=8s"], "an answer cannot end before it begins"),
        ([], "say what to tune for"),
    ],
)
def test_goals_that_make_no_sense_are_refused(slo: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Goal(Slo.parse(slo)).validate()
    Goal(Slo(), "throughput").validate()


def test_settings_with_which_requests_fail_hold_nothing() -> None:
    """Also where no bound counts them: gaps between tokens, or no SLO at all."""
    for slo in (Slo.parse(["itl-p99=10s"]), Slo()):
        fine = outcome({}, slo)
        assert fine.holds
        failing = msgspec.structs.replace(fine, failed=fine.requests // 2, output_tokens_per_s=1e6)
        assert not failing.holds
        goal = Goal(slo, "throughput")
        assert goal.rank(failing) < goal.rank(fine)


def test_runs_are_pooled() -> None:
    runs = [level({}, seed=seed, noise=0.2) for seed in (1, 2, 3)]
    pooled = outcome_of(runs, SLO)
    assert pooled.runs == 3 and pooled.requests == sum(run.requests for run in runs)
    assert pooled.output_tokens_per_s == pytest.approx(sum(run.output_tokens_per_s for run in runs) / 3)
    rows = sorted(row.ttft_ms or 0 for run in runs for row in run.rows or ())
    assert pooled.ttft_ms is not None and pooled.ttft_ms.max == rows[-1]
    single = outcome_of(runs[:1], SLO)
    assert single.goodput_per_s == pytest.approx(runs[0].goodput_per_s)
    assert single.bounds[0].value_ms == pytest.approx(runs[0].slo[0].value_ms, rel=1e-3)
    assert "SLO missed" in one_line(pooled, Goal(SLO))


# -- budget


@pytest.mark.parametrize("startup_s", [1.0, 8.0, 60.0, 120.0])
@pytest.mark.parametrize("left_s", [200.0, 450.0, 600.0, 1200.0, 2400.0])
def test_a_plan_fits_into_its_time(left_s: float, startup_s: float) -> None:
    try:
        plan = budget.plan(left_s, startup_s=startup_s)
    except ConfigError as error:
        assert left_s < 6 * startup_s + 6 * budget.LEAST_RUN_S + 60, error.message
        return
    spent_s = (plan.search + plan.checks_safe_load) * (startup_s + plan.run_s)
    spent_s += budget.confirmation_s(plan.pairs, startup_s=startup_s, run_s=plan.run_s)
    assert spent_s <= left_s + 1e-6
    assert plan.pairs >= 2 and plan.search >= 2 and plan.run_s >= budget.LEAST_RUN_S
    assert left_s - spent_s < 2 * (startup_s + plan.run_s) or plan.run_s == budget.MOST_RUN_S  # little is left over


def test_a_budget_that_is_too_short_says_how_much_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"raise --budget by \d+:\d\d"):
        budget.plan(100, startup_s=120)
    with pytest.raises(ConfigError) as refused:
        budget.plan(100, startup_s=30, least_run_s=20)
    more = refused.value.message.split("raise --budget by ")[1].split(" ")[0]
    minutes, seconds = more.split(":")
    budget.plan(100 + 60 * int(minutes) + int(seconds), startup_s=30, least_run_s=20)  # then it is enough


def test_time_is_counted_over_all_runs() -> None:
    now = [100.0]
    counted = budget.Budget(600, spent_before_s=200, clock=lambda: now[0])
    now[0] += 50
    assert (counted.spent_s, counted.left_s) == (250, 350)
    assert str(counted) == "4:10 of 10:00"
    assert clock_text(3723) == "1:02:03"


# -- optimizer


def peak(settings: Settings) -> float:
    return -abs(settings.get("a", 0) - 7) - abs(settings.get("b", 0) - 3)


KNOBS = [Choice("a", tuple(range(1, 12)), simulated=True), Choice("b", tuple(range(1, 12)), simulated=True)]


def run(seed: int, trials: int) -> list[Settings]:
    search, tried = Search(KNOBS, seed=seed, first=[{"a": 2}, {"z": 9}]), []
    for _ in range(trials):
        settings = search.ask()
        if settings is None:
            break
        tried.append(settings)
        search.tell(settings, peak(settings))
    return tried


def test_the_default_comes_first_and_nothing_comes_twice() -> None:
    tried = run(0, 1000)
    assert tried[:2] == [{}, {"a": 2}]  # {"z": 9} is no knob of this search
    assert len(tried) == len(set(map(key_of, tried))) == 12 * 12
    assert run(3, 30) == run(3, 30)


def test_the_optimizer_is_better_than_chance() -> None:
    found = [max(map(peak, run(seed, 50))) for seed in range(5)]
    rng = random.Random(0)
    grid = [{"a": a, "b": b} for a, b in itertools.product(range(12), repeat=2)]
    by_chance = [max(map(peak, rng.sample(grid, 50))) for _ in range(200)]
    assert sum(found) / 5 > sum(by_chance) / 200


def test_failed_settings_are_not_proposed_again() -> None:
    search = Search(KNOBS, seed=0)
    search.tell({"a": 7, "b": 3}, None)
    tried = []
    while (settings := search.ask()) is not None:
        tried.append(settings)
        search.tell(settings, None)
    assert {"a": 7, "b": 3} not in tried


def test_without_optuna_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"pip install 'tonle\[tune\]'"):
        Search(KNOBS, seed=0)


# -- simulated stage


@functools.cache
def trials() -> list[Trial]:
    found = choices("tonle", DeviceFacts("cpu", slo=SLO), own={"target_itl": (20,)})
    return search_simulated(found, Goal(SLO), outcome, seed=0, seconds=1e9, most=150)


def test_the_shortlist_has_the_best_of_different_outcomes() -> None:
    goal, found = Goal(SLO), trials()
    assert found[0].settings == {} and found[-1].settings == {"target_itl": 20} and len(found) > 151
    chosen = shortlist(found, goal, 5)
    best = max(found, key=lambda trial: goal.rank(trial.outcome))
    assert goal.rank(outcome(chosen[0])) == goal.rank(best.outcome)
    ranks = [goal.rank(outcome(each)) for each in chosen]
    assert ranks == sorted(ranks, reverse=True) and len(set(ranks)) == 5
    assert all("long_prefill_token_threshold" not in each for each in chosen)  # changes nothing in this formula
    assert chosen[0] not in shortlist(found, goal, 5, besides=[chosen[0]])


def test_the_front_is_what_a_naive_search_finds() -> None:
    bounds = [trial.outcome.bounds[0].value_ms or 0.0 for trial in trials()]
    points = list(zip(bounds, (trial.outcome.output_tokens_per_s for trial in trials()), strict=True))
    naive = {
        (ms, rate)
        for ms, rate in points
        if not any(other[0] <= ms and other[1] >= rate and other != (ms, rate) for other in points)
    }
    front = pareto_front(points)
    assert set(front) == naive and front == sorted(front)


# -- correction


def test_a_correction_is_found_and_kept_only_if_it_helps() -> None:
    settings: list[Settings] = [{}, {"max_num_seqs": 8}, {"max_num_batched_tokens": 128}]
    measured = [(each, outcome(each, slow=1.4, noise=0.02)) for each in settings]
    fitted = fit_correction(measured, lambda each, correction: outcome(each, slow=correction.step))
    assert fitted.step == pytest.approx(1.4, rel=0.05)
    assert (fitted.error_after or 1) < 0.05 < (fitted.error_before or 0)
    useless = fit_correction(measured, lambda each, correction: outcome(each, slow=1.4))  # deaf to it
    assert (useless.step, useless.front_s) == (1.0, 0.0)


def test_corrected_times_are_longer_by_the_factor() -> None:
    from tonle.engine.schedule.step_facts import StepWork
    from tonle.simulate.fitted_times import Curve, FittedTimes

    times = FittedTimes(
        lag=0, front_s=0.01, back_s=0.002, decode=Curve([1, 8], [0.01, 0.02]), mixed=Curve([1, 512], [0.01, 0.3]),
        draw=Curve([0, 8], [0.0, 0.001]), chunk_s=0.001, decode_read_s=1e-6, prompt_read_s=1e-8, host_step_s=0.001,
        host_row_s=1e-4, host_token_s=1e-6, few_rows_read_s=Curve([1, 8], [1e-5, 0.0]), wake_s=1e-3, launch_large_s=2e-3,
    )  # fmt: skip
    slower = corrected(times, Correction(step=2.0, front_s=-0.02))
    for work in (StepWork(4, 0, 0, 400, 0, 4), StepWork(2, 1, 200, 100, 20_000, 3)):
        assert slower.device_s(work) == pytest.approx(2 * times.device_s(work))
        assert slower.host_s(work) == pytest.approx(2 * times.host_s(work))
        assert slower.launching_s(work) == 2 * times.launching_s(work)
    assert slower.wake_s == 2 * times.wake_s
    assert slower.front_s == 0.0 and slower.back_s == times.back_s
    assert times.decode.seconds == [0.01, 0.02]


# -- safe load


def test_the_safe_load_is_the_largest_that_holds() -> None:
    settings = {"max_num_seqs": 12, "max_num_batched_tokens": 128}
    goal = Goal(SLO)
    safe = find_safe_load("concurrency", goal, lambda users: outcome(settings, users=int(users)))
    assert safe.value is not None and outcome(settings, users=int(safe.value)).holds
    assert not outcome(settings, users=int(safe.value * 1.1) + 1).holds
    none = find_safe_load(
        "concurrency", Goal(Slo.parse(["itl-p99=5ms"])), lambda users: outcome({}, Slo.parse(["itl-p99=5ms"]))
    )
    assert none.value is None and gateway_limits(none, goal, prefill_tokens_per_s=100) is None


def test_a_rate_is_found_within_its_resolution() -> None:
    good, bad = outcome({"max_num_seqs": 12, "max_num_batched_tokens": 128}), outcome({})
    safe = find_safe_load("rate", Goal(SLO), lambda rate: good if rate <= 0.37 else bad)
    assert safe.value == pytest.approx(0.37, rel=0.06) and safe.value <= 0.37


def open_loop(rate: float, *, capacity: float, requests: int = 200) -> Outcome:
    """Gaps between tokens are the same at any load; what comes faster than `capacity` per second waits longer and longer."""
    slo, samples = Slo.parse(["itl-p99=100ms"]), []
    for index in range(requests):
        due_s = index / rate
        first_s = max(due_s, index / capacity) + 0.1
        samples.append(
            Sample(
                index=index, start_s=due_s, end_s=first_s + 0.05, due_s=due_s, arrivals_s=[first_s, first_s + 0.05],
                last_s=first_s + 0.05, prompt_tokens=10, output_tokens=2,
            )
        )  # fmt: skip
    made = report_level(samples, Circumstances(label=f"rate {rate:g}", rate=rate, slo=slo), keep_rows=True)
    return outcome_of([made], slo)


def test_a_rate_that_is_not_kept_up_with_is_not_safe() -> None:
    """No request of an SLO on gaps alone is ever too late."""
    goal = Goal(Slo.parse(["itl-p99=100ms"]))
    assert open_loop(4096.0, capacity=8.0).holds
    safe = find_safe_load("rate", goal, lambda rate: open_loop(rate, capacity=8.0))
    assert safe.value == pytest.approx(8.0, rel=0.12)
    for rate, expected in ((4.0, 4.0), (20.0, None)):
        both = open_loop(rate, capacity=8.0)
        verdict = Verdict(is_better=False, reason="", sentence="", default=both, tuned=both, changes=[], method="")
        assert measured_safe_load(Load("rate", rate), verdict).value == expected


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        ("concurrency", 1.0, "1 user"),
        ("concurrency", 14.0, "14 users"),
        ("rate", 0.37, "0.37 requests/s"),
        ("rate", None, "none"),
    ],
)
def test_a_safe_load_in_words(kind: SweepKind, value: float | None, text: str) -> None:
    assert SafeLoad(kind=kind, value=value, outcome=None, source="simulated").text == text


def test_users_that_may_wait_for_any_time_are_not_without_end() -> None:
    plain = outcome({}, Slo.parse(["itl-p99=10s"]))

    def at(users: float) -> Outcome:
        return msgspec.structs.replace(plain, output_tokens_per_s=min(users, 48) * 10.0)

    assert find_safe_load("concurrency", Goal(Slo.parse(["itl-p99=10s"])), at).value == 64
    assert find_safe_load("concurrency", Goal(Slo.parse(["itl-p99=10s", "ttft-p95=9s"])), at).value == 4096


def test_without_an_slo_it_is_where_throughput_ends_to_rise() -> None:
    plain = outcome({}, Slo())
    safe = find_safe_load(
        "concurrency",
        Goal(Slo(), "throughput"),
        lambda users: msgspec.structs.replace(plain, output_tokens_per_s=min(users, 48) * 10.0),
    )
    assert safe.value == 64


def test_without_an_slo_a_slow_server_has_a_low_rate() -> None:
    plain = outcome({}, Slo())
    safe = find_safe_load(
        "rate",
        Goal(Slo(), "throughput"),
        lambda rate: msgspec.structs.replace(plain, output_tokens_per_s=min(rate, 0.2) * 100.0),
    )
    assert safe.value == 0.25


def test_when_the_time_is_over_the_largest_load_so_far_is_taken() -> None:
    asked: list[float] = []
    good = outcome({"max_num_seqs": 12, "max_num_batched_tokens": 128})

    def at(users: float) -> Outcome:
        asked.append(users)
        return good

    safe = find_safe_load("concurrency", Goal(SLO), at, has_time=lambda: len(asked) < 4)
    assert safe.value == 8 and asked == [1, 2, 4, 8]


def test_a_load_that_a_measurement_misses_is_lowered_with_what_is_simulated_there(tmp_path: Path) -> None:
    folder = folder_at(tmp_path / "out")
    settings = {"max_num_seqs": 12, "max_num_batched_tokens": 128}
    measure = FakeMeasure(folder, Clock(), slow=3.0)
    safe = find_safe_load("concurrency", Goal(SLO), lambda users: outcome(settings, users=int(users)))
    load = Load("concurrency", USERS)
    check = SafeLoadCheck(folder, measure, Goal(SLO), lambda text: None, load=load, requests=32)
    found = check.confirm(settings, safe, lambda users: outcome(settings, users=int(users)), fits=lambda run_s: True)
    assert safe.value is not None and found.value is not None and found.value < safe.value
    assert found.stepped_down and not found.confirmed and "was too much" in how_known(found)
    assert found.outcome == outcome(settings, users=int(found.value))


def test_limits_of_a_gateway_follow_from_the_slo() -> None:
    settings = {"max_num_seqs": 12, "max_num_batched_tokens": 128}
    safe = find_safe_load("concurrency", Goal(SLO), lambda users: outcome(settings, users=int(users)))
    limits = gateway_limits(safe, Goal(SLO), prefill_tokens_per_s=1000)
    assert limits is not None and safe.outcome is not None and safe.outcome.ttft_ms is not None
    assert limits.max_concurrent == safe.value
    wait_s = 2.0 - safe.outcome.ttft_ms.p50 / 1e3
    assert limits.wait_s == pytest.approx(wait_s)
    assert limits.max_queued_tokens == int(wait_s * 1000)
    assert limits.max_queued == int(wait_s * safe.outcome.requests_per_s)
    assert limits.requests_per_minute == int(60 * safe.outcome.requests_per_s)


# -- the profile that a tuning begins with


def test_steps_are_profiled_without_the_draft_model_of_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--speculation off`, which a profile needs, is refused beside a draft model."""
    config = {
        "speculation": "draft_model",
        "speculation_model": "small.gguf",
        "speculation_length": 4,
        "max_num_seqs": 8,
    }
    read: list[dict[str, Any]] = []

    def profile(model: str | None, flags: list[str], **options: Any) -> Profile:
        read.append(yaml.safe_load(Path(flags[flags.index("--config") + 1]).read_text()))
        return load_profile("smollm2-135m-cpu")

    monkeypatch.setattr(tuning, "run_profile", profile)
    launcher = TonleLauncher(None, config, tmp_path)
    options = SimpleNamespace(profile=None, model=None, seed=0, bench=BenchOptions())
    folder, spent = SimpleNamespace(path=tmp_path), SimpleNamespace(total_s=60.0)
    tuning._profile(options, launcher, folder, spent, lambda text: None)  # type: ignore[arg-type]
    assert read == [{"max_num_seqs": 8}]
    assert launcher.measured_config == config, "servers that are measured have it"
