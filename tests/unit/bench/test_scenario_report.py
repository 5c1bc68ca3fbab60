"""What the samples of a scenario become: numbers, the verdict, the printed block."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from tonle.bench import ScenarioReport, ScenarioResult, load_scenario_report, save_report
from tonle.bench.measure import Sample
from tonle.bench.report import describe_environment
from tonle.bench.scenario_blocks import print_scenarios
from tonle.bench.scenario_report import Scenario, remark, seconds, summarize
from tonle.errors import ConfigError

ALONE = Scenario("sequential, no cache", use_cache=False, concurrency=1)
CACHED = Scenario("sequential, with cache", use_cache=True, concurrency=1)


def samples(*latencies_s: float, hits: int = 0, failed: int = 0, told: bool = True) -> list[Sample]:
    """One after the other from second 10 on; the first `hits` from the cache, the last `failed` without an answer."""
    made: list[Sample] = []
    now_s = 10.0
    for index, latency_s in enumerate(latencies_s):
        failure = "HTTP 500: boom" if index >= len(latencies_s) - failed else None
        made.append(
            Sample(
                index=index, start_s=now_s, end_s=now_s + latency_s, last_s=None if failure else now_s + latency_s,
                cache_hit=index < hits if told and failure is None else None, output_tokens=0 if failure else 5,
                failure=failure,
            )
        )  # fmt: skip
        now_s += latency_s
    return made


def result(
    taken: list[Sample], scenario: Scenario = CACHED, *, repeated: int = 0, sla_s: float = 2.0
) -> ScenarioResult:
    return summarize(scenario, taken, repeated=repeated, sla_s=sla_s)


def report(*results: ScenarioResult, notes: list[str] | None = None, interrupted: bool = False) -> ScenarioReport:
    return ScenarioReport(
        started_at="2025-01-31T09:30:00+00:00", target="http://127.0.0.1:1", asked_by="/api/v1/inference", model="tiny",
        sla_s=2.0, seed=5, settings={"requests": 4, "repeat_share": 0.25, "output_tokens": 16},
        environment=describe_environment("asyncio"), scenarios=list(results), notes=notes or [], interrupted=interrupted,
    )  # fmt: skip


def printed(shown: ScenarioReport, **console: object) -> str:
    out = io.StringIO()
    print_scenarios(shown, Console(file=out, **{"width": 80, **console}))  # type: ignore[arg-type]
    return out.getvalue()


def test_the_numbers() -> None:
    found = result(samples(0.4, 0.1, 0.3, 0.2, 9.0, hits=1, failed=1), repeated=1)
    assert (found.requests, found.succeeded, found.failed, found.repeated) == (5, 4, 1, 1)
    latency = found.latency_s
    assert latency is not None and latency.count == 4
    assert latency.mean == pytest.approx(0.25)
    assert latency.p50 == pytest.approx(0.25)
    assert latency.p95 == pytest.approx(0.385)  # numpy.percentile([.1, .2, .3, .4], 95)
    assert latency.p99 == pytest.approx(0.397)
    assert (latency.min, latency.max) == (pytest.approx(0.1), pytest.approx(0.4))
    assert found.cache_hits == 1 and found.cache_hit_rate == pytest.approx(0.25)
    assert found.duration_s == pytest.approx(10.0), "failed requests take time too"
    assert found.requests_per_s == pytest.approx(0.4)
    assert found.output_tokens == 20
    assert found.failures[0].example == "HTTP 500: boom"


def test_a_target_that_says_nothing_of_a_cache() -> None:
    found = result(samples(0.1, 0.2, told=False))
    assert found.cache_hits is None and found.cache_hit_rate is None


@pytest.mark.parametrize(
    ("taken", "why"),
    [
        (samples(*[0.5] * 100), None),
        (samples(*[0.5] * 96, *[3.0] * 4), None),
        (samples(*[0.5] * 90, *[3.0] * 10), "P95 3.00s ≥ 2.0s: 10 of 100 answers too slow"),
        (samples(2.0), "P95 2.00s ≥ 2.0s: 1 of 1 answers too slow"),
        (samples(1.999), None),
        (samples(*[0.5] * 100, failed=4), None),
        (samples(*[0.5] * 100, failed=5), "5 of 100 requests failed"),
        (samples(*[0.5] * 92, *[3.0] * 4, *[0.1] * 4, failed=4), "4 of 100 requests failed"),
        (samples(*[0.5] * 3, failed=3), "none of 3 requests was answered"),
        ([], "no request was made"),
    ],
)
def test_the_verdict(taken: list[Sample], why: str | None) -> None:
    found = result(taken)
    assert found.why_not == why
    assert found.meets_sla is (why is None)


@pytest.mark.parametrize(("value", "text"), [(2.0, "2.0s"), (0.25, "0.25s"), (10.0, "10.0s"), (1.5, "1.5s")])
def test_seconds_have_a_decimal(value: float, text: str) -> None:
    assert seconds(value) == text


def test_ok_needs_every_answer_and_every_verdict() -> None:
    good = result(samples(*[0.1] * 40))
    one_failed = result(samples(*[0.1] * 40, failed=1))
    assert one_failed.meets_sla
    assert report(good, good).ok
    assert not report(good, one_failed).ok
    assert not report(good, result(samples(3.0))).ok
    assert not report(good, interrupted=True).ok
    assert not report().ok


BLOCK = """\
Benchmark Results: sequential, with cache
====================================
Total Requests:      4
Successful:          4
Failed:              0

Latency Statistics:
  Average:           0.300s
  Median:            0.250s
  P50:               0.250s
  P95:               0.555s ✓
  P99:               0.591s
  Min:               0.100s
  Max:               0.600s

Cache Hit Rate:      25.0%
Throughput:          3.33 req/s

SLA Status:          ✓ PASS (P95 < 2.0s)
====================================
"""


def test_the_block() -> None:
    text = printed(report(result(samples(0.6, 0.1, 0.3, 0.2, hits=1))))
    head, _, rest = text.partition("\n\n")
    assert head == (
        "http://127.0.0.1:1  model tiny  /api/v1/inference\n4 questions each, 25% repeated, up to 16 tokens per answer, seed 5"
    )
    assert rest == BLOCK


def test_the_block_of_a_failure() -> None:
    slow = result(samples(*[2.5] * 3, 1.0, failed=1), ALONE)
    text = printed(report(slow))
    assert "Failed:              1" in text
    assert "  P95:               2.500s ✗\n" in text
    assert "SLA Status:          ✗ FAIL (P95 2.50s ≥ 2.0s: 3 of 3 answers too slow)\n" in text
    assert "failed 1×: HTTP 500: boom\n" in text
    assert "Cache Hit Rate:      0.0% (not used)\n" in text


def test_a_fast_p95_keeps_its_mark_when_requests_fail() -> None:
    text = printed(report(result(samples(*[0.5] * 4, failed=2))))
    assert "P95:               0.500s ✓" in text
    assert "✗ FAIL (2 of 4 requests failed)" in text


def test_the_block_of_a_server_that_never_answered() -> None:
    text = printed(report(result(samples(0.1, failed=1, told=False))))
    assert "  P95:               – ✗" in text and "Cache Hit Rate:      –\n" in text
    assert "✗ FAIL (none of 1 requests was answered)" in text


def test_the_table_fits_into_80_columns() -> None:
    slow = summarize(Scenario("concurrent, 16 at once", use_cache=False, concurrency=16), samples(*[99.5] * 400, failed=200),
                     repeated=0, sla_s=2.0)  # fmt: skip
    quick = result(samples(*[0.0004] * 40, hits=40), repeated=40)
    text = printed(report(result(samples(1.0), ALONE), quick, slow, notes=["[odd] word " * 12]))
    table = text[text.index("scenario (times in s)") :]
    rows = [line.split() for line in table.splitlines()[1:4]]
    assert rows[0] == ["sequential,", "no", "cache", "0", "1.000", "1.000", "1.000", "1.000", "0.0%", "1.00", "PASS"]
    assert rows[1][3:] == ["0", "0.000", "0.000", "0.000", "0.000", "100.0%", "2500", "PASS"]
    assert rows[2][4:] == ["200", "99.50", "99.50", "99.50", "99.50", "0.0%", "0.01", "FAIL"]
    assert all(len(line) <= 80 for line in table.splitlines()[:4]) and "…" not in table
    assert "note: " + "[odd] word " * 12 + "\n" in text, "one line for a pipe, and brackets are no markup"


def test_a_terminal_gets_lines_that_fit() -> None:
    text = printed(report(result(samples(1.0)), notes=["a word " * 30]), force_terminal=True, color_system=None)
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("scenario", "hits", "repeated", "words"),
    [
        (CACHED, 2, 2, None),
        (CACHED, 1, 2, None),
        (CACHED, 3, 2, "use another seed"),
        (CACHED, 0, 2, "switched off"),
        (CACHED, 0, 0, None),
        (ALONE, 0, 2, None),
        (ALONE, 1, 2, "although none was to be used"),
    ],
)
def test_remarks(scenario: Scenario, hits: int, repeated: int, words: str | None) -> None:
    found = remark(result(samples(*[0.1] * 4, hits=hits), scenario, repeated=repeated))
    assert (found == []) if words is None else (words in found[0] and found[0].startswith(scenario.label))


def test_a_saved_report_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    kept = summarize(CACHED, samples(0.1, 0.2, hits=1, failed=1), repeated=1, sla_s=2.0, keep_rows=True)
    save_report(report(kept), path)
    assert load_scenario_report(path) == report(kept)
    assert kept.rows is not None and [row.failure for row in kept.rows] == [None, "HTTP 500: boom"]
    assert kept.rows[1].start_s == pytest.approx(0.1) and kept.rows[1].latency_s == pytest.approx(0.2)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="no report of `tonle bench scenarios`"):
        load_scenario_report(path)
    with pytest.raises(ConfigError, match="cannot read"):
        load_scenario_report(tmp_path / "none.json")
