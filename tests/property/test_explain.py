"""However a request ended and whatever its engine tells, its spans tile its time and there is something to say."""

from __future__ import annotations

import itertools
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tonle.audit.record import STATUSES
from tonle.observe.engine_facts import EngineFacts, facts_of, told_by
from tonle.observe.explain import Explanation, explain
from tonle.observe.seen_request import SeenRequest
from tonle.observe.spans import SPAN_NAMES
from tonle.telemetry.time_spent import MISS_REASONS, WAIT_REASONS, OtherPrompt, TimeSpent, Wait

SECONDS = st.one_of(st.just(0.0), st.floats(0, 1e-4), st.floats(0, 100))
MOMENTS = st.one_of(st.none(), SECONDS)
COUNTS = st.one_of(st.just(0), st.just(1), st.integers(0, 200_000))
SECRET = "req-of-another"


@st.composite
def seen_requests(draw: st.DrawFn) -> SeenRequest:
    """Moments in any order: clocks, clipped numbers and bugs elsewhere must not break a page."""
    fields: dict[str, Any] = {
        "status": draw(st.sampled_from(STATUSES)),
        "http_status": draw(st.sampled_from([0, 200, 401, 429, 502, 504])),
        "error": draw(st.sampled_from([None, "rate_limit_exceeded", "queue_full", "upstream_failed", "odd"])),
        "limit": draw(st.sampled_from(["", "make 60 requests per minute"])),
        "stream": draw(st.booleans()),
        "is_local": draw(st.booleans()),
        "path": draw(st.sampled_from(["/v1/chat/completions", "/v1/embeddings", "/v1/audio/speech"])),
        "pool": draw(st.sampled_from(["", "tts"])),
        "backend": draw(st.sampled_from(["", "b0", "b1"])),
        "why": draw(st.sampled_from(["", "only", "hedge", "load"])),
        "failed": draw(st.sampled_from([(), ("b0",), ("b0", "b2", "b0")])),
        "engine_s": draw(
            st.one_of(st.none(), st.dictionaries(st.sampled_from(["queue", "prefill", "decode"]), SECONDS))
        ),
    }
    for name in ("prompt_tokens", "cached_tokens", "completion_tokens"):
        fields[name] = draw(COUNTS)
    for name in ("accepted_s", "sent_s", "first_byte_s", "ttft_s", "last_s"):
        fields[name] = draw(MOMENTS)
    return SeenRequest(
        id="req-1", arrived=1.0, owner="me", key_id="me", total_s=draw(SECONDS),
        queued_s=draw(SECONDS), **fields,
    )  # fmt: skip


others = st.lists(st.builds(OtherPrompt, st.integers(0, 3), COUNTS, SECONDS), max_size=3)
spents = st.builds(
    TimeSpent,
    queue_s=SECONDS, waits=st.lists(st.builds(Wait, st.sampled_from(WAIT_REASONS), SECONDS), max_size=4), behind=others,
    prefill_s=SECONDS, cached_tokens=COUNTS, computed_tokens=COUNTS, num_chunks=COUNTS,
    missed=st.dictionaries(st.sampled_from(MISS_REASONS), COUNTS), prefill_waited_s=SECONDS, decode_s=SECONDS,
    num_steps=COUNTS, stalled_s=SECONDS, num_stalled=COUNTS, stalled_by=others, preempted_s=SECONDS,
    num_preemptions=st.integers(0, 4), device_s=SECONDS,
)  # fmt: skip


def check_tiles(found: Explanation, total_s: float) -> None:
    near = 1e-9 * max(1.0, total_s)
    assert found.total_s == total_s
    assert math.isclose(math.fsum(span.seconds for span in found.spans), total_s, abs_tol=near)
    at_s = 0.0
    for span in found.spans:
        assert math.isclose(span.start_s, at_s, abs_tol=near), "a gap, or an overlap"
        assert span.seconds > 0
        at_s = span.start_s + span.seconds
        inside_s = span.start_s
        for child in span.children:
            assert math.isclose(child.start_s, inside_s, abs_tol=near) and child.seconds > 0
            inside_s += child.seconds
        assert inside_s <= at_s + near
    places = [SPAN_NAMES.index(span.name) for span in found.spans]
    assert all(one < two for one, two in itertools.pairwise(places)), "each name once, in the one order"


def check_sentences(found: Explanation) -> None:
    assert found.sentences
    for sentence in found.sentences:
        assert sentence[0].isupper() or sentence[0].isdigit() or sentence.startswith("b"), sentence  # b0: a backend
        assert sentence.endswith(".") and "  " not in sentence and "None" not in sentence and "nan" not in sentence


@given(seen_requests(), st.one_of(st.none(), spents), st.booleans())
def test_spans_tile_the_request(seen: SeenRequest, spent: TimeSpent | None, shows_keys: bool) -> None:
    other = SeenRequest(id=SECRET, arrived=0.0, path="/", owner="them", key_id="them", key_name="their key")
    found = explain(seen, spent, names=lambda handle: SECRET, shows_keys=shows_keys, find=lambda request_id: other)
    check_tiles(found, seen.total_s)
    check_sentences(found)
    told = " ".join(found.sentences)
    if not shows_keys:
        assert SECRET not in told and "their key" not in told


@given(spents)
def test_what_an_engine_tells_survives_the_way_through_json(spent: TimeSpent) -> None:
    import msgspec

    names = {1: "req-a", 2: "req-b"}
    facts = msgspec.json.decode(msgspec.json.encode(facts_of(spent, names.get)), type=EngineFacts)
    told = told_by(facts)
    again = facts_of(told.spent, told.ids.get)
    assert again == facts
    assert (told.spent.waits, told.spent.missed, told.spent.decode_s) == (spent.waits, spent.missed, spent.decode_s)
