"""`traceparent` and `tracestate` as the W3C wrote them down."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.trace.span import SpanContext

from tonle.observe.trace_context import MAX_ENTRIES, MAX_STATE_CHARS, TraceContext

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"
WRITTEN = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def read(parent: str, state: str | None = None) -> TraceContext | None:
    return TraceContext.of({"traceparent": parent} | ({} if state is None else {"tracestate": state}))


def state_of(text: str) -> str:
    found = read(PARENT, text)
    assert found is not None
    return found.state


def test_the_callers_context() -> None:
    assert read(PARENT, "vendor=1,t61rcwkgmze@other=2") == TraceContext(
        TRACE, "", SPAN, True, "vendor=1,t61rcwkgmze@other=2"
    )
    unsampled = read(f"00-{TRACE}-{SPAN}-00")
    assert unsampled is not None and not unsampled.sampled and not unsampled.is_recorded
    assert TraceContext.of({}) is None
    assert TraceContext.of({"tracestate": "vendor=1"}) is None


@pytest.mark.parametrize(
    "parent",
    [
        "", "00", PARENT[:-1], f"{PARENT}-", f"{PARENT}-more", f"{PARENT} x", PARENT.upper(), f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE[:-1]}g-{SPAN}-01", f"00-{TRACE}-{SPAN}-0g",
        f"00-{TRACE}-{SPAN}", f"00_{TRACE}_{SPAN}_01", f"{PARENT},{PARENT}", f"cc-{TRACE}-{SPAN}-01more",
        f"{PARENT}\n", f"0٠-{TRACE}-{SPAN}-01",
    ],
)  # fmt: skip
def test_a_malformed_one_is_ignored(parent: str) -> None:
    assert read(parent) is None


def test_a_later_version_may_say_more() -> None:
    for parent in (f"cc-{TRACE}-{SPAN}-01", f"cc-{TRACE}-{SPAN}-01-what-comes-then", f" {PARENT}\t"):
        found = read(parent)
        assert found is not None and (found.trace_id, found.parent_id, found.sampled) == (TRACE, SPAN, True)
        assert found.joined().headers()["traceparent"].startswith(f"00-{TRACE}-")


def test_all_flags_but_the_known_ones_are_dropped() -> None:
    found = read(f"00-{TRACE}-{SPAN}-ff")
    assert found is not None and found.headers() == {"traceparent": f"00-{TRACE}-{SPAN}-03"}


def test_a_context_passed_on_names_the_span_that_sends() -> None:
    found = read(PARENT, "vendor=1")
    assert found is not None
    assert found.headers() == {"traceparent": PARENT, "tracestate": "vendor=1"}  # takes no part: unchanged
    own = found.joined()
    assert own.is_recorded and own.parent_id == SPAN and own.span_id not in ("", SPAN)
    assert own.headers()["traceparent"] == f"00-{TRACE}-{own.span_id}-01"
    assert own.headers("1234567890abcdef")["traceparent"] == f"00-{TRACE}-1234567890abcdef-01"


def test_a_trace_that_begins_here() -> None:
    begun = TraceContext.begin(sampled=True)
    assert begun.is_recorded and begun.parent_id == ""
    assert WRITTEN.fullmatch(begun.headers()["traceparent"])
    left_out = TraceContext.begin(sampled=False)
    assert not left_out.is_recorded and left_out.headers()["traceparent"].endswith("-02")
    assert begun.trace_id != left_out.trace_id


@pytest.mark.parametrize(
    "state",
    [
        "novalue", "UPPER=1", "key=", "=1", "a=1,a=2", "a=1;b=2,c", "a=1,b=ü", "1key=2", "a@1b=2", "a b=1",
        "a=b=c", f"{'k' * 257}=1", f"k={'v' * 257}", ",".join(f"k{i}=1" for i in range(MAX_ENTRIES + 1)),
    ],
)  # fmt: skip
def test_a_malformed_state_is_dropped_and_the_trace_kept(state: str) -> None:
    assert state_of(state) == ""


@pytest.mark.parametrize(
    ("state", "passed_on"),
    [
        ("a=1", "a=1"), (" a=1 ,\tb=2,,", "a=1,b=2"), ("a= inner space", "a= inner space"), ("", ""), (",", ""),
        ("a_-*/0=!#", "a_-*/0=!#"), ("0tenant@vendor=1", "0tenant@vendor=1"),
        (",".join(f"k{i}=1" for i in range(MAX_ENTRIES)), ",".join(f"k{i}=1" for i in range(MAX_ENTRIES))),
    ],
)  # fmt: skip
def test_a_state_is_passed_on(state: str, passed_on: str) -> None:
    assert state_of(state) == passed_on


def test_of_a_long_state_the_long_entries_and_then_the_oldest_are_left_out() -> None:
    assert state_of(f"new=1,long={'x' * 200},other={'x' * 250},last={'x' * 100}") == f"new=1,last={'x' * 100}"
    many = [f"k{i}={'x' * 60}" for i in range(20)]
    kept = state_of(",".join(many)).split(",")
    assert kept == many[: len(kept)] and 5 < len(kept) < 20


@settings(max_examples=100, deadline=None)
@given(
    trace=st.text("0123456789abcdef", min_size=32, max_size=32).filter(lambda text: text.strip("0")),
    span=st.text("0123456789abcdef", min_size=16, max_size=16).filter(lambda text: text.strip("0")),
    flags=st.integers(0, 255),
)
def test_what_is_written_is_read_back_by_the_sdk(trace: str, span: str, flags: int) -> None:
    theirs = TraceContext.of({"traceparent": f"00-{trace}-{span}-{flags:02x}", "tracestate": "a=1"})
    assert theirs is not None and theirs.sampled == bool(flags & 1)
    context = _as_the_sdk_reads(theirs.joined().headers())
    assert f"{context.trace_id:032x}" == trace and context.trace_flags.sampled == theirs.sampled
    assert dict(context.trace_state) == {"a": "1"}


@settings(max_examples=300, deadline=None)
@given(parent=st.one_of(st.text(max_size=80), st.from_regex(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}.?")),
       state=st.text(st.characters(codec="latin-1"), max_size=700))  # fmt: skip
def test_whatever_comes_what_goes_out_is_well_formed(parent: str, state: str) -> None:
    found = TraceContext.of({"traceparent": parent, "tracestate": state})
    if found is None:
        return
    for context in (found, found.joined()):
        headers = context.headers()
        assert WRITTEN.fullmatch(headers["traceparent"])
        assert len(headers.get("tracestate", "")) <= MAX_STATE_CHARS
        assert f"{_as_the_sdk_reads(headers).trace_id:032x}" == found.trace_id


def _as_the_sdk_reads(headers: dict[str, str]) -> SpanContext:
    from opentelemetry.trace import get_current_span

    return get_current_span(TraceContextTextMapPropagator().extract(headers)).get_span_context()
