"""What is said of a bound that has no value."""

from __future__ import annotations

import pytest

from tonle.bench.slo import Latencies, Slo


@pytest.mark.parametrize(
    ("slo", "answered", "failed", "said"),
    [
        ("ttft-p95=300ms", 9, 1, "TTFT p95 ≤ 300 ms: no value, since 5 % or more of the requests failed, missed"),
        ("e2el-p100=2s", 9, 1, "E2EL p100 ≤ 2 s: no value, since requests failed, missed"),
        ("itl-p99=50ms", 0, 3, "ITL p99 ≤ 50 ms: no value, missed"),
        ("ttft-p50=300ms", 0, 0, "TTFT p50 ≤ 300 ms: no value, held"),
        ("ttft-p50=300ms", 9, 1, "TTFT p50 ≤ 300 ms: 20 ms, held"),
    ],
)
def test_a_bound_without_a_value_says_why(slo: str, answered: int, failed: int, said: str) -> None:
    requests = [Latencies(20.0, 5.0, 90.0, [5.0])] * answered
    assert [str(result) for result in Slo.parse([slo]).judge(requests, failed)] == [said]
