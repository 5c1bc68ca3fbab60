"""A benchmark's levels simulated; the fewest replicas; fleets from files; the command."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from tests.fakes.linear_times import replica_options
from tonle.bench.options import BenchOptions, Span
from tonle.bench.report import load_report
from tonle.bench.slo import Slo
from tonle.cli.app import app
from tonle.errors import ConfigError
from tonle.simulate.fitted_times import Curve, FittedTimes
from tonle.simulate.fleet import Autoscaling, Failure, Fleet
from tonle.simulate.fleet_file import _File, _Row, read_fleet
from tonle.simulate.levels import find_replicas, simulate_level, simulate_levels
from tonle.simulate.profile import Profile, ServerFacts, load_profile, save_profile

ONE = Fleet(replicas=[replica_options()])


def profile() -> Profile:
    times = FittedTimes(
        lag=0, front_s=0.003, back_s=0.001, decode=Curve([1, 32], [0.006, 0.043]), mixed=Curve([1, 512], [0.005, 0.21]),
        draw=Curve([0, 1], [0.0, 0.0]), chunk_s=0.0, decode_read_s=0.0, prompt_read_s=0.0, host_step_s=1e-4, host_row_s=0.0,
        host_token_s=0.0,
    )  # fmt: skip
    server = ServerFacts(
        model="small", device="cpu", device_name="a CPU", dtype="float32", block_size=16, num_blocks=1000, context_length=2048,
        max_num_seqs=32, max_num_batched_tokens=512, long_prefill_tokens=256, settings={},
    )  # fmt: skip
    return Profile(made_at="2026-01-01T00:00:00+00:00", tonle="0", server=server, times=times)


@pytest.fixture
def saved(tmp_path: Path) -> str:
    save_profile(profile(), tmp_path / "profile.json")
    return str(tmp_path / "profile.json")


def options(**changes: object) -> BenchOptions:
    settings = {"input_tokens": Span(20, 60), "output_tokens": Span(5, 30), **changes}
    return BenchOptions(**settings)  # type: ignore[arg-type]


def test_a_level_for_a_time_takes_as_many_requests_as_it_needs() -> None:
    level = simulate_level(options(concurrency=(4,), duration_s=30.0), ONE).level
    assert level.requests > 64 * 4 and 30.0 < level.duration_s < 33.0


def test_a_sweep_finds_the_rate_that_is_kept_up_with() -> None:
    seen = []
    chosen = options(sweep="rate", rates=(2.0,), requests=120, slo=Slo.parse(["ttft-p95=400ms"]))
    saturation, _ = simulate_levels(chosen, ONE, seen.append)
    assert saturation is not None and saturation.load is not None and saturation.high is not None
    by_rate = {each.level.rate: each.level for each in seen}
    assert by_rate[saturation.load].slo[0].holds and saturation.load < saturation.high in by_rate
    assert saturation.limited_by in ("slo", "throughput")


def test_the_fewest_replicas_are_found() -> None:
    tried = []
    chosen = options(rates=(60.0,), requests=300, slo=Slo.parse(["ttft-p95=300ms"]))
    found = find_replicas(chosen, ONE, most=64, watch=tried.append)
    assert found.count is not None and found.is_monotonic and len(tried) == len(found.levels) <= 9
    held = {count: each.level.slo[0].holds for count, each in found.levels}
    assert held[found.count] and not held[found.count - 1] and held[found.count + 1]
    assert {each.level.requests for _, each in found.levels} == {300}


def test_replicas_that_are_too_slow_for_the_rate_do_not_hold_an_slo_that_lets_requests_wait(saved: str) -> None:
    one = simulate_level(options(rates=(60.0,), requests=300), ONE).level
    assert one.requests_per_s < 30.0
    for slo in ("itl-p99=10s", "ttft-p95=60s"):
        found = find_replicas(
            options(rates=(60.0,), requests=300, slo=Slo.parse([slo])), ONE, most=64, watch=lambda _: None
        )
        assert found.count is not None and found.count * one.requests_per_s >= 0.8 * 60.0, slo
        assert all(each.level.slo[0].holds for _, each in found.levels)
    arguments = [
        "simulate",
        "--profile",
        saved,
        "--rate",
        "60",
        "--requests",
        "300",
        "--itl-p99",
        "10s",
        "--find-replicas",
    ]
    done = CliRunner().invoke(app, arguments)
    assert "1 replica: ITL p99" in done.output and "come faster than they are answered" in done.output, done.output


def test_replicas_that_refuse_requests_do_not_hold_an_slo_that_counts_answers_alone() -> None:
    """ITL and TPOT are of answered requests: the few that get in are fast."""
    chosen = options(rates=(60.0,), requests=300, slo=Slo.parse(["itl-p99=10s"]))
    found = find_replicas(chosen, replace(ONE, max_concurrent=4, max_queued=1), most=64, watch=lambda _: None)
    failed = {count: each.level.failed for count, each in found.levels}
    assert found.count is not None and found.count > 1 and found.is_monotonic
    assert failed[found.count] <= 15 < failed[found.count - 1]


def test_the_command_says_how_many_requests_failed_with_each_number_of_replicas(saved: str) -> None:
    arguments = ["simulate", "--profile", saved, "--rate", "60", "--requests", "300", "--max-concurrent", "4"]
    arguments += ["--max-queued", "1", "--itl-p99", "10s", "--find-replicas"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0 and re.search(r"1 replica: .*, \d+ of 300 requests failed", done.output), done.output


def test_an_autoscaled_fleet_has_no_number_of_replicas_to_find(tmp_path: Path, saved: str) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(f"replicas: [{{profile: {saved}}}]\nautoscaling: {{metric: queue, max: 8}}\n")
    arguments = ["simulate", "--fleet", str(file), "--rate", "30", "--find-replicas", "--ttft-p95", "900ms"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2 and "leave autoscaling out" in done.output.replace("\n", " "), done.output


def test_replicas_may_have_any_name(tmp_path: Path, saved: str) -> None:
    file = tmp_path / "fleet.yaml"
    names = ["qwen:7b", "[/b] large", "<b>ធំ</b>"]
    file.write_text("replicas:\n" + "".join(f"- {{profile: {saved}, name: '{name}'}}\n" for name in names))
    done = CliRunner().invoke(app, ["simulate", "--fleet", str(file), "--rate", "2", "--requests", "6"])
    assert done.exit_code == 0 and all(name in done.output for name in names), done.output


def test_after_a_sweep_the_replicas_are_of_the_load_that_was_found(saved: str) -> None:
    arguments = ["simulate", "--profile", saved, "--sweep", "rate", "--rate", "2", "--requests", "120"]
    done = CliRunner().invoke(app, [*arguments, "--ttft-p95", "400ms"])
    found = re.search(r"saturation: (\S+) requests per second", done.output)
    assert found is not None and re.search(rf"replicas at rate {found[1]}\b", done.output), done.output


def test_replicas_that_fail_are_among_those_tried() -> None:
    chosen = options(rates=(2.0,), requests=20, slo=Slo.parse(["ttft-p50=10s"]))
    fleet = replace(ONE, failures=[Failure(replica=2, at_s=0.5)])
    found = find_replicas(chosen, fleet, most=6, watch=lambda _: None)
    assert found.count == 3 and [count for count, _ in found.levels] == [3, 4]
    with pytest.raises(ConfigError, match="2 replicas are too few"):
        find_replicas(chosen, fleet, most=2, watch=lambda _: None)


def test_no_number_of_replicas_is_enough() -> None:
    chosen = options(rates=(2.0,), requests=20, slo=Slo.parse(["ttft-p95=1ms"]))
    found = find_replicas(chosen, ONE, most=6, watch=lambda _: None)
    assert found.count is None and [count for count, _ in found.levels] == [1, 2, 4, 6]
    with pytest.raises(ConfigError, match="Give an SLO"):
        find_replicas(options(), ONE, most=6, watch=lambda _: None)


def test_a_fleet_from_a_file(tmp_path: Path, saved: str) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(
        f"""
replicas:
  - {{profile: {saved}, role: prefill, name: p}}
  - {{profile: {saved}, count: 2, max_num_seqs: 8, price_per_hour: 2.5, target_itl_ms: 40}}
prefix_affinity: false
autoscaling: {{metric: kv, target: 0.5, max: 4}}
failures: [{{replica: 2, at_s: 3}}]
"""
    )
    fleet, profiles = read_fleet(file)
    assert [each.name for each in fleet.replicas] == ["p", None, None] and len(profiles) == 2
    assert (fleet.replicas[1].limits.max_num_seqs, fleet.replicas[1].price_per_hour) == (8, 2.5)
    assert fleet.replicas[1].targets is not None and not fleet.prefix_affinity
    assert fleet.autoscaling is not None and fleet.autoscaling.metric == "kv" and fleet.failures[0].replica == 2


def test_the_fleet_of_the_docs_has_every_setting_of_a_fleet(tmp_path: Path, saved: str) -> None:
    page = (Path(__file__).parents[3] / "docs" / "simulation.md").read_text()
    text = page.split("```yaml\n")[1].split("```")[0]
    file = tmp_path / "fleet.yaml"
    file.write_text(text.replace("profile.json", saved).replace("{role: prefill", f"{{profile: {saved}, role: prefill"))
    fleet, _ = read_fleet(file)
    assert [each.role for each in fleet.replicas] == ["decode", "decode", "prefill"]
    for kind in (_File, _Row, Autoscaling, Failure):
        for name in kind.__struct_fields__:
            assert re.search(rf"\b{name}\b", text), name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("replicas: [{role: decoder}]", r"Invalid enum value 'decoder' \(at replicas\[0\].role\)"),
        ("replicas: [{colour: red}]", "unknown field 'colour'"),
        ("replicas: []", "length >= 1"),
        ("replicas: [{count: 1}]", "names no profile"),
        ("a: [", "fleet.yaml is not YAML: line 1, column 5: expected the node content, but found '<stream end>'$"),
    ],
)
def test_a_bad_fleet_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "fleet.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_fleet(tmp_path / "fleet.yaml")


def test_the_command_prints_tables_and_saves_a_report(tmp_path: Path, saved: str) -> None:
    file = tmp_path / "report.json"
    arguments = ["simulate", "--profile", saved, "--concurrency", "1,8", "--replicas", "2", "--price-per-hour", "3.6"]
    done = CliRunner().invoke(app, [*arguments, "--ttft-p95", "2s", "--explain", "--json", str(file)])
    assert done.exit_code == 0, done.output
    for words in ("2 simulated replicas on a CPU", "small", "TTFT p95", "replica-1", "per million output tokens",
                  "as fast as real", "the gateway's router", "Not simulated"):  # fmt: skip
        assert words in done.output.replace("\n", " ").replace("  ", " "), words
    report = load_report(file)
    assert report.kind == "simulated" and [level.concurrency for level in report.levels] == [1, 8]
    assert report.settings["simulated"]["replicas"][0]["limits"]["max_num_seqs"] == 32
    assert report.levels[1].rows is not None and len(report.levels[1].rows) == 32
    shown = CliRunner().invoke(app, ["bench", "report", str(file), "-o", str(tmp_path / "page.html")])
    assert shown.exit_code == 0, shown.output


def test_replicas_without_a_price_are_named_beside_the_cost_of_the_others(tmp_path: Path, saved: str) -> None:
    (tmp_path / "fleet.yaml").write_text("replicas: [{price_per_hour: 3.6}, {count: 2}]")
    arguments = ["simulate", "--profile", saved, "--fleet", str(tmp_path / "fleet.yaml"), "--concurrency", "4"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "million output tokens; 2 of 3 replicas have no price and are not counted" in " ".join(done.output.split())


def test_the_command_finds_replicas_and_exits_1_where_none_are_enough(saved: str) -> None:
    arguments = ["simulate", "--profile", saved, "--rate", "30", "--requests", "100", "--find-replicas"]
    done = CliRunner().invoke(app, [*arguments, "--ttft-p95", "900ms"])
    assert done.exit_code == 0 and "hold TTFT p95 ≤ 900 ms" in done.output.replace("holds", "hold"), done.output
    done = CliRunner().invoke(app, [*arguments, "--ttft-p95", "1ms", "--max-replicas", "2"])
    assert done.exit_code == 1 and "not even 2 replicas hold" in done.output
    missed = CliRunner().invoke(app, ["simulate", "--profile", saved, "--ttft-p95", "1ms", "-q"])
    assert missed.exit_code == 1 and not missed.output


def test_limits_of_the_gateway_hold_for_a_single_server_too(saved: str) -> None:
    arguments = ["simulate", "--profile", saved, "--concurrency", "8", "--requests", "16"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    done = CliRunner().invoke(app, [*arguments, "--max-concurrent", "2", "--max-queued", "1"])
    assert done.exit_code == 1 and "HTTP 429" in done.output, done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --profile"),
        (["--profile", "nowhere"], "cannot read the profile nowhere"),
        (["--profile", "PROFILE", "--replicas", "0"], "replicas must be at least 1"),
        (["--profile", "PROFILE", "--find-replicas"], "Give an SLO"),
        (["--profile", "PROFILE", "--find-replicas", "--replicas", "2", "--slo", "ttft-p50=1s"], "give no --replicas"),
        (["--profile", "PROFILE", "--find-replicas", "--rate", "1,2", "--slo", "ttft-p50=1s"], "looks at one load"),
        (["--profile", "PROFILE", "--find-replicas", "--max-replicas", "0", "--slo", "ttft-p50=1s"], "at least 1"),
        (["--profile", "PROFILE", "--replicas", "2", "--max-concurrent", "0"], "max_concurrent must be at least 1"),
        (["--profile", "PROFILE", "--max-num-seqs", "0"], "max_num_seqs must be at least 1"),
        (["--fleet", "none.yaml", "--replicas", "2"], "give --fleet alone"),
    ],
)
def test_wrong_input_is_refused_with_2(saved: str, arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["simulate", *[saved if each == "PROFILE" else each for each in arguments]])
    assert done.exit_code == 2 and message in done.output.replace("\n", " "), done.output


def test_a_saved_fleet_is_plain_data(tmp_path: Path, saved: str) -> None:
    file = tmp_path / "report.json"
    assert CliRunner().invoke(app, ["simulate", "--profile", saved, "-q", "--json", str(file)]).exit_code == 0
    simulated = json.loads(file.read_text())["settings"]["simulated"]
    assert simulated["profiles"] == [{"model": "small", "device": "a CPU", "made_at": "2026-01-01T00:00:00+00:00"}]
    assert msgspec.to_builtins(load_profile(saved).server)["model"] == "small"
