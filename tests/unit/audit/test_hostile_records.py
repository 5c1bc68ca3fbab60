"""What a record may hold: anything. One bad record takes no other with it, and none is unreadable."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.audit.test_writer_process import apart
from tests.unit.audit.trails import CHAT, ask, each_and_all, files, records, running
from tonle.audit import Answer, AuditTrail
from tonle.audit.verify import verify

TRAILS = pytest.mark.parametrize("start", [running, apart], ids=["thread", "process"])


def deep_body(depth: int, *, word: str = "") -> bytes:
    """A JSON object with lists inside lists; `word` is in the innermost."""
    inside = json.dumps(word).encode() if word else b""
    return b'{"x":' + b"[" * depth + inside + b"]" * depth + b"}"


def deep_list(depth: int) -> list[Any]:
    value: list[Any] = ["innermost"]
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("start", "depths"), each_and_all(running, apart, [100, 500, 980, 985, 986, 987, 995, 5000, 200_000])
)
def test_a_deep_body_takes_no_neighbour_with_it(tmp_path: Path, start: Any, depths: list[int]) -> None:
    with start(tmp_path, linger_s=0.1) as trail:
        for depth in depths:
            for number in range(20):
                ask(trail, output=str(number))
            body = deep_body(depth, word="innermost")
            trail.open(CHAT, request_id="deep", body=body).close("ok", http_status=200)
            ask(trail, output="last")
    written = records(tmp_path)
    assert [record["output"] for record in written] == [*map(str, range(20)), None, "last"] * len(depths)
    assert trail.stats.lost == 0
    for record in written[20::22]:
        assert "innermost" in json.dumps(record["parameters"]), "what was sent is on record"
    report = verify(tmp_path)
    assert report.ok, report.findings


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("no words for it")

    __str__ = __repr__


class Endless:
    """Says something that is not a string at all."""

    def __str__(self) -> Any:
        return 7


def odd_values() -> Iterator[tuple[str, Any]]:
    cycle: list[Any] = [1]
    cycle.append({"again": cycle})
    laughs: list[Any] = ["ha"]
    for _ in range(60):  # 2**60 values, if each were written
        laughs = [laughs, laughs]
    yield "cycle", cycle
    yield "shared", laughs
    yield "deep", deep_list(3000)
    yield "very deep", deep_list(100_000)
    yield "huge number", {"n": 10**400}
    yield "number of 10,000 digits", {"n": 10**10_000}
    yield "not a number", [math.nan, math.inf, -math.inf]
    yield "half a pair", {"half \ud800": "half \udfff"}
    yield "names", {1: "a", None: "b", (1, 2): "c", 2.5: "d", b"raw": "e"}
    yield "bytes", [b"\xff\x00", bytearray(b"x"), memoryview(b"y")]
    yield "sets", [{1, 2}, frozenset("a")]
    yield "unspeakable", {"x": [Unspeakable()], "y": Endless()}
    yield "unspeakable name", {Unspeakable(): 1}


# What is packed on the server's thread comes from JSON, where nothing is shared.
ODD = dict(odd_values())
IN_PROCESS = [name for name in ODD if name != "shared"]


@pytest.mark.parametrize(
    ("start", "names"), [*each_and_all(running, apart, IN_PROCESS), pytest.param(running, ["shared"], id="shared")]
)
def test_an_odd_value_in_any_field_takes_no_neighbour_with_it(tmp_path: Path, start: Any, names: list[str]) -> None:
    def odd(trail: AuditTrail, field: str, value: Any) -> None:
        record = trail.open(CHAT, request_id=f"odd-{field}", body=value if field == "body" else b'{"prompt":"hi"}')
        if field in ("output", "usage", "error", "response_id", "finish_reason"):
            record.close("ok", http_status=200, **{field: value})
            return
        if field == "answer":
            record.close("ok", http_status=200, answer=Answer(raw=value, error=value, usage=value))
            return
        if field != "body":
            record.note(**{field: value})
        record.close("ok", http_status=200)

    fields = ("body", "answer", "output", "usage", "error", "response_id", "finish_reason", "key_id", "model",
              "model_config", "adapter", "adapter_digest", "cache", "route", "experiment", "warnings", "timings_ms", "client",
              "request_id", "endpoint")[: 3 if names == ["shared"] else None]  # fmt: skip
    with start(tmp_path, linger_s=0.2) as trail:
        for name in names:
            ask(trail, output="first")
            for field in fields:
                odd(trail, field, ODD[name])
            ask(trail, output="last")
    assert trail.stats.lost == 0
    written = records(tmp_path)
    num_each = len(fields) + 2
    assert len(written) == num_each * len(names)
    assert [record["output"] for record in written[::num_each]] == ["first"] * len(names)
    assert [record["output"] for record in written[num_each - 1 :: num_each]] == ["last"] * len(names)
    assert sum(path.stat().st_size for path in files(tmp_path)) < 40_000_000 * len(names)
    report = verify(tmp_path)
    assert report.ok, report.findings


@TRAILS
def test_a_body_of_many_short_lines_does_not_grow_on_disk(tmp_path: Path, start: Any) -> None:
    """Indented text has a line per value: deep and wide, 1 MB would become 100 MB."""
    body = b'{"x":' + b"[" * 60 + b",".join([b"1"] * 500_000) + b"]" * 60 + b"}"
    with start(tmp_path) as trail:
        trail.open(CHAT, body=body).close("ok", http_status=200)
    [path] = files(tmp_path)
    assert path.stat().st_size < 5 * len(body)
    assert verify(tmp_path).ok
