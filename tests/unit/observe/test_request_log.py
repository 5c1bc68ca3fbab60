"""The latest requests: found, filtered, bounded."""

from __future__ import annotations

import tracemalloc
from typing import Any

from tonle.observe.request_log import MOST, MOST_UNKNOWN, RequestLog
from tonle.observe.seen_request import SeenRequest
from tonle.telemetry.time_spent import OtherPrompt, TimeSpent, Wait


def seen(id: str, **fields: Any) -> SeenRequest:
    return SeenRequest(**{"id": id, "arrived": 0.0, "path": "/v1/chat/completions", "key_id": "k"} | fields)


def ids(requests: list[SeenRequest]) -> list[str]:
    return [request.id for request in requests]


def test_newest_first_and_page_by_page() -> None:
    log = RequestLog()
    for number in range(10):
        log.add(seen(f"r{number}"))
    first = log.newest(4)
    assert ids(first) == ["r9", "r8", "r7", "r6"]
    second = log.newest(4, before=first[-1].number)
    assert ids(second) == ["r5", "r4", "r3", "r2"]
    (last,) = log.newest(4, before=second[-1].number)[1:]
    assert last.id == "r0" and not log.newest(4, before=last.number)


def test_pages_of_requests_that_all_have_one_id() -> None:
    log = RequestLog()
    for number in range(10):
        log.add(seen("same", prompt_tokens=number))
    told: list[int] = []
    before = None
    while page := log.newest(3, before=before):
        told += [request.prompt_tokens for request in page]
        before = page[-1].number
    assert told == [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]


def test_the_oldest_go() -> None:
    log = RequestLog(3)
    for number in range(5):
        log.add(seen(f"r{number}"))
    assert len(log) == 3 and ids(log.newest()) == ["r4", "r3", "r2"]
    assert log.find("r1") is None and log.find("r2") is not None


def test_an_id_that_a_caller_used_twice() -> None:
    log = RequestLog(3)
    for status in ("failed", "ok"):
        log.add(seen("same", status=status))
    log.add(seen("a"))
    log.add(seen("b"))  # the first of them goes
    found = log.find("same")
    assert found is not None and found.status == "ok"
    log.add(seen("c"))
    assert log.find("same") is None and len(log) == 3


def test_each_caller_finds_the_newest_that_it_may_see() -> None:
    log = RequestLog(3)
    for key in ("mine", "theirs", "mine", "theirs"):
        log.add(seen("same", key_id=key))
    first, second, third = reversed(log.newest())
    assert log.find("same") is third
    assert log.find("same", lambda each: each.key_id == "mine") is second
    assert log.find("same", lambda each: each.number == first.number) is first
    assert log.find("same", lambda each: each.key_id == "nobody") is None


def test_refusals_of_unknown_callers_displace_only_each_other() -> None:
    log = RequestLog()
    log.add(seen("mine"))
    for number in range(MOST + 1):
        log.add(seen(f"flood-{number}", key_id="", status="refused"))
    log.add(seen("last"))
    assert len(log) == 2 + MOST_UNKNOWN
    found = log.newest(MOST)
    assert ids(found)[:2] == ["last", f"flood-{MOST}"] and ids(found)[-1] == "mine"
    assert len(log.newest(MOST, before=found[0].number)) == MOST_UNKNOWN + 1
    assert log.find("mine") is not None and log.find(f"flood-{MOST}") is not None and log.find("flood-0") is None
    log.add(seen("mine", key_id=""))
    assert log.find("mine").key_id == "", "the newest of both"
    log.add(seen("mine"))
    assert log.find("mine").key_id == "k"


def test_filters() -> None:
    log = RequestLog()
    log.add(seen("one", model="m", status="ok", http_status=200, key_id="k1", key_name="Alice", backend="b0"))
    log.add(
        seen("two", model="m", status="failed", http_status=502, key_id="k2", key_name="bob", error="upstream_failed")
    )
    log.add(seen("three", model="n", adapter="khmer", status="ok", http_status=200, key_id="k1", key_name="Alice"))
    assert ids(log.newest(status="ok")) == ["three", "one"] and ids(log.newest(status="502")) == ["two"]
    assert ids(log.newest(model="n")) == ids(log.newest(model="khmer")) == ["three"]
    assert ids(log.newest(key="Alice")) == ids(log.newest(key="k1")) == ["three", "one"]
    assert ids(log.newest(backend="b0")) == ["one"]
    assert ids(log.newest(text="ALICE")) == ["three", "one"] and ids(log.newest(text="upstream")) == ["two"]
    assert ids(log.newest(text="alice", model="m")) == ["one"] and not log.newest(text="nothing")


def test_five_thousand_requests_stay_under_ten_megabytes() -> None:
    tracemalloc.start()
    try:
        log = RequestLog()
        for number in range(MOST + 100):
            spent = TimeSpent(
                queue_s=number * 1e-5, prefill_s=number * 2e-5, decode_s=number * 3e-5,
                waits=[Wait("step", number * 1e-7), Wait("prompts", number * 1e-6), Wait("rows", number * 1e-6)],
                behind=[OtherPrompt(number + each, 6000, number * 1e-6) for each in range(3)],
                stalled_by=[OtherPrompt(number + each, 6000, number * 1e-6) for each in range(3)],
                missed={"new": number, "tail": number + 1},
            )  # fmt: skip
            log.add(SeenRequest(
                id=f"req-{number:024d}", arrived=1e9 + number * 0.1, path="/v1/chat/completions", model=f"m{number % 10}",
                key_id="k", key_name="a key", owner=f"owner-{number % 10}", status="ok", http_status=200,
                prompt_tokens=1000 + number, completion_tokens=300 + number, trace_id=f"{number:032x}", backend="b0",
                span_id=f"{number:016x}",
                accepted_s=number * 1e-6, sent_s=number * 2e-6, first_byte_s=number * 3e-6, ttft_s=number * 4e-6,
                last_s=number * 5e-6, total_s=number * 6e-6, device_s=number * 7e-6, cost=number * 8e-6, spent=spent,
                engine_s={"queue": number * 1e-5, "prefill": number * 2e-5, "decode": number * 3e-5},
            ))  # fmt: skip
        assert len(log) == MOST and log.find(log.newest(1)[0].id).spent == spent
        assert tracemalloc.get_traced_memory()[0] < 10_000_000
    finally:
        tracemalloc.stop()
