"""What `compare` finds, refuses, and prints."""

from __future__ import annotations

import csv
import io
from typing import Any

import msgspec
import pytest
from rich.console import Console

from tests.unit.bench.made_reports import GPU, SLO, made_level, made_report
from tonle.bench.compare import CompareOptions, Comparison, compare
from tonle.bench.compare_tables import comparison_csv, comparison_markdown, print_comparison
from tonle.bench.report import Run
from tonle.errors import ConfigError

BASE: dict[str, Any] = {"requests": 60}


def run(name: str, *users: int, settings: dict[str, Any] | None = None, **changes: Any) -> Run:
    report = made_report([made_level(each, **(BASE | changes)) for each in users or (4,)])
    return Run(name, made_report(report.levels, settings=report.settings | (settings or {})))


def verdicts(found: Comparison, label: str = "concurrency 4") -> dict[str, str]:
    [level] = [level for level in found.levels if level.label == label]
    return {change.metric: change.verdict for change in level.changes}


def test_slower_tokens_are_a_regression() -> None:
    found = compare([run("a")], [run("b", gap_s=0.026)])
    judged = verdicts(found)
    for metric in ("output tok/s", "requests/s", "TPOT p50", "TPOT p95", "ITL p50", "ITL p95", "ITL p99", "E2EL p50"):
        assert judged[metric] == "regression", metric
    assert judged["TTFT p50"] == "no evidence"
    assert judged["TTFT p99"] == "too few requests"  # 60 have less than one beyond it
    assert judged["failed"] == "no change"
    [tpot] = [change for _, change in found.changes("regression") if change.metric == "TPOT p50"]
    assert tpot.low is not None and tpot.high is not None and tpot.change is not None
    assert 0.2 < tpot.low < tpot.change < tpot.high < 0.4
    assert not compare([run("a")], [run("b", gap_s=0.026)], CompareOptions(tolerance=0.5)).changes("regression")


def test_faster_tokens_are_an_improvement() -> None:
    found = compare([run("a")], [run("b", gap_s=0.014)])
    assert verdicts(found)["TPOT p50"] == verdicts(found)["output tok/s"] == "improvement"
    assert not found.changes("regression")


def test_the_same_seed_finds_the_same() -> None:
    a, b = run("a"), run("b", gap_s=0.021)
    assert compare([a], [b]) == compare([a], [b])
    assert compare([a], [b], CompareOptions(seed=1)) != compare([a], [b])


def test_the_same_prompts_are_paired_and_intervals_narrow() -> None:
    a, same, other = run("a"), run("b", gap_s=0.021), run("b", gap_s=0.021, seed=9)
    paired, apart = compare([a], [same]).levels[0], compare([a], [other]).levels[0]
    assert paired.paired and not apart.paired
    widths = []
    for level in (paired, apart):
        [change] = [each for each in level.changes if each.metric == "E2EL p50"]
        assert change.low is not None and change.high is not None
        widths.append(change.high - change.low)
    assert widths[0] < widths[1]


def test_rows_are_paired_by_their_number_not_their_place() -> None:
    a = run("a")
    level = a.report.levels[0]
    turned = made_level(4, **BASE)
    assert level.rows is not None and turned.rows is not None
    turned.rows.reverse()
    found = compare([a], [Run("b", made_report([turned]))])
    assert found.levels[0].paired
    assert all(change.verdict in ("no change", "no evidence", "too few requests") for change in found.levels[0].changes)


def test_failures_are_not_tolerated() -> None:
    options = CompareOptions(tolerance=0.5)
    assert verdicts(compare([run("a")], [run("b", failed=9)], options))["failed"] == "regression"
    assert verdicts(compare([run("a", failed=9)], [run("b")], options))["failed"] == "improvement"
    assert verdicts(compare([run("a")], [run("b", failed=1)], options))["failed"] == "no evidence"


def test_goodput() -> None:
    found = compare([run("a", slo=SLO)], [run("b", slo=SLO, ttft_s=0.21)])
    assert verdicts(found)["goodput/s"] == "regression"
    assert "goodput/s" not in verdicts(compare([run("a", slo=SLO)], [run("b")]))


def test_levels_are_matched_by_load() -> None:
    found = compare([run("a", 1, 4, 8)], [run("b", 8, 4, 16)])
    assert [level.label for level in found.levels] == ["concurrency 4", "concurrency 8"]
    assert "only in A, not compared: concurrency 1" in found.notes
    assert "only in B, not compared: concurrency 16" in found.notes
    with pytest.raises(ConfigError, match="no level in common: A has concurrency 1; B has concurrency 16"):
        compare([run("a", 1)], [run("b", 16)])


def test_different_workloads_are_refused() -> None:
    a, b = run("a"), run("b", settings={"output_tokens": "100"})
    with pytest.raises(ConfigError, match=r"output_tokens is 8-24 in a and 100 in b.*--force"):
        compare([a], [b])
    assert any("output_tokens" in note for note in compare([a], [b], CompareOptions(force=True)).notes)
    with pytest.raises(ConfigError, match=r"prompts have 4. tokens on average in A and 3.. in B"):
        compare([a], [run("b", prompt=(300, 400))])
    compare([a], [run("b", settings={"seed": 5, "url": "elsewhere"})])  # not the workload


def test_runs_without_rows() -> None:
    a, b = run("a"), run("b", rows=False, gap_s=0.04)
    with pytest.raises(ConfigError, match="b has no rows of single requests"):
        compare([a], [b])
    found = compare([a], [b], CompareOptions(force=True))
    assert set(verdicts(found).values()) == {"no interval"}
    [change] = [each for each in found.levels[0].changes if each.metric == "TPOT p50"]
    assert change.change == pytest.approx(1.0, abs=0.1)


def test_several_runs_of_each() -> None:
    a = [run(f"a{seed}", seed=seed) for seed in range(3)]
    b = [run(f"b{seed}", seed=seed, gap_s=0.028) for seed in range(3, 6)]
    found = compare(a, b)
    assert found.levels[0].requests_a == 180 and not found.levels[0].paired
    assert verdicts(found)["TPOT p50"] == "regression"
    assert "Runs are drawn first" in found.method
    assert not any("one run each" in note for note in found.notes)


def test_runs_that_differ_among_themselves_widen_the_interval() -> None:
    """Two runs of A that are far apart: a B between them is no finding, though each run alone is precise."""
    a = [run("a1", gap_s=0.016), run("a2", gap_s=0.026, seed=1)]
    b = [run("b1", gap_s=0.022, seed=2), run("b2", gap_s=0.022, seed=3)]
    assert verdicts(compare(a, b))["TPOT p50"] == "no evidence"


def test_use_and_memory_of_gpus_are_compared_without_a_verdict() -> None:
    used = msgspec.structs.replace(GPU, utilization=0.63, memory_used=70 * 2**30)
    a = run("a", gpus=[GPU, GPU])
    compared = compare([a], [run("b", gpus=[used, used])])
    found = {each.metric: each for each in compared.levels[0].changes}
    use, memory = found["GPU use"], found["GPU memory"]
    assert (use.a, use.b, use.verdict) == (pytest.approx(0.83), pytest.approx(0.63), "no interval")
    assert (memory.a, memory.b, memory.verdict) == (122.0, 140.0, "no interval")
    assert "| GPU memory, GiB | 122.0 | 140.0 |" in comparison_markdown(compared)
    without = compare([a], [run("c")])
    assert not [each for each in without.levels[0].changes if each.metric.startswith("GPU")]


def test_what_is_printed() -> None:
    found = compare([run("a")], [run("b", gap_s=0.026, failed=9)])
    out = io.StringIO()
    print_comparison(found, Console(file=out, width=80))
    text = out.getvalue()
    assert "concurrency 4: 60 requests in A, 60 in B" in text
    [line] = [line for line in text.splitlines() if line.startswith("TPOT p50, ms")]
    assert line.rstrip().endswith("✗ regression") and " … " in line
    assert max(map(len, text.split("method:")[0].split("note:")[0].splitlines())) <= 80
    assert "beyond 5 %" in text.splitlines()[-1]

    markdown = comparison_markdown(found)
    assert "| TPOT p50, ms |" in markdown and "**✗ regression** |" in markdown
    rows = list(csv.DictReader(io.StringIO(comparison_csv(found))))
    assert {row["metric"] for row in rows} == set(verdicts(found))
    assert float(next(row["change"] for row in rows if row["metric"] == "TPOT p50")) == pytest.approx(0.3, abs=0.05)
