"""The words of an explanation, for requests that ended in each of the ways there are."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tonle.observe.engine_facts import EngineFacts
from tonle.observe.explain import Explanation, explain
from tonle.observe.seen_request import SeenRequest
from tonle.observe.time_words import a_prompt, length, ms
from tonle.telemetry.time_spent import OtherPrompt, TimeSpent, Wait

OTHER = SeenRequest(id="req-b", arrived=0.0, path="/", owner="key-b", key_id="key-b", key_name="b")
SPENT = TimeSpent(
    queue_s=0.412, waits=[Wait("step", 0.012), Wait("prompts", 0.4)], behind=[OtherPrompt(7, 6100, 0.4)],
    prefill_s=0.13, cached_tokens=1024, computed_tokens=512, num_chunks=2, missed={"new": 500, "tail": 12},
    decode_s=0.6, num_steps=63, stalled_s=0.08, num_stalled=5,
)  # fmt: skip


def seen(**fields: Any) -> SeenRequest:
    """An answer streamed by the engine of this process."""
    usual: dict[str, Any] = {
        "id": "req-a", "arrived": 0.0, "path": "/v1/chat/completions", "owner": "key-a", "key_id": "key-a",
        "status": "ok", "http_status": 200, "stream": True, "backend": "local", "is_local": True, "prompt_tokens": 1536,
        "cached_tokens": 1024, "completion_tokens": 64, "accepted_s": 0.001, "sent_s": 0.001, "first_byte_s": 0.55,
        "ttft_s": 0.55, "last_s": 1.151, "total_s": 1.18,
    }  # fmt: skip
    return SeenRequest(**usual | fields)


def told(request: SeenRequest, spent: TimeSpent | None, *, shows_keys: bool = True) -> Explanation:
    names = {7: "req-b"}
    return explain(request, spent, names=names.get, shows_keys=shows_keys, find={"req-b": OTHER}.get)


def test_what_it_waited_behind_is_named() -> None:
    found = told(seen(), SPENT)
    assert found.sentences == [
        "Decoding took 600 ms for 64 tokens in 63 steps; 80 ms of it because prompts of others shared 5 of its steps.",
        "412 ms of 1,180 ms: waited behind a 6,100-token prompt of key b (req-b).",
        "1,024 of 1,536 prompt tokens were found in the prefix cache; 512 were computed in 2 steps (prefill: 130 ms): "
        "the rest was new.",
        "30 ms of 1,180 ms: between the last token and the end of the reply (making text, the network, a caller that reads "
        "slowly).",
    ]
    parts = {span.name: round(span.seconds, 6) for span in found.spans}
    assert parts == {
        "accept": 0.001, "send": 0.007, "engine queue": 0.412, "prefill": 0.13, "decode": 0.6, "deliver": 0.03,
    }  # fmt: skip
    (decode,) = (span for span in found.spans if span.name == "decode")
    assert [(child.name, child.seconds) for child in decode.children] == [("stalled", 0.08)]


def waited_behind(found: Explanation) -> str:
    (sentence,) = (each for each in found.sentences if "waited behind" in each)
    return sentence.partition("6,100-token prompt of ")[2].removesuffix(".")


@pytest.mark.parametrize(
    ("other", "shows_keys", "said"),
    [
        (OTHER, True, "key b (req-b)"),
        (OTHER, False, "another key"),
        (msgspec.structs.replace(OTHER, key_name=""), True, "key key-b (req-b)"),
        (msgspec.structs.replace(OTHER, owner="key-a", key_id="key-a"), False, "the same key (req-b)"),
        (msgspec.structs.replace(OTHER, owner="key-a"), False, "the same tenant (req-b)"),
        (msgspec.structs.replace(OTHER, owner="anonymous", key_id="anonymous"), False, "another request"),
        (msgspec.structs.replace(OTHER, owner="anonymous", key_id="anonymous"), True, "another request (req-b)"),
        (None, True, "another request (req-b)"),  # it still runs
        (None, False, "another request"),
    ],
)
def test_who_is_named_to_whom(other: SeenRequest | None, shows_keys: bool, said: str) -> None:
    found = explain(seen(), SPENT, names=lambda _: "req-b", shows_keys=shows_keys, find=lambda _: other)
    assert waited_behind(found) == said


def test_without_keys_all_have_one_owner_and_are_strangers_still() -> None:
    mine = seen(owner="anonymous", key_id="anonymous")
    other = msgspec.structs.replace(OTHER, owner="anonymous", key_id="anonymous")
    found = explain(mine, SPENT, names=lambda _: "req-b", find=lambda _: other)
    assert waited_behind(found) == "another request"


@pytest.mark.parametrize(
    ("why", "said"),
    [
        ("step", "waited for the end of the step"),
        ("prompts", "went to requests ahead of it"),
        ("rows", "max_num_seqs"),
        ("tuned", "adaptive tuning"),
        ("blocks", "too few KV blocks"),
        ("adapter", "LoRA adapter"),
        ("grammar", "grammar of its answer"),
        ("batch", "static batching"),
    ],
)
def test_each_reason_to_wait(why: Any, said: str) -> None:
    spent = TimeSpent(queue_s=0.5, waits=[Wait(why, 0.5)], prefill_s=0.01, decode_s=0.3)
    assert told(seen(), spent).sentences[0].startswith("500 ms of 1,180 ms: ")
    assert said in told(seen(), spent).sentences[0]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"missed": {"new": 512}}, "512 prompt tokens had to be computed in 2 steps (prefill: 500 ms): this beginning was new."),
        ({"missed": {"off": 512}}, "(prefill: 500 ms): the prefix cache is switched off."),
        ({"missed": {"evicted": 500, "tail": 12}}, "500 of them had been in the cache, and were dropped to make room."),
        ({"missed": {"tail": 8}, "cached_tokens": 504, "computed_tokens": 8, "num_chunks": 1},
         "504 of 512 prompt tokens were found in the prefix cache; 8 were computed in 1 step (prefill: 500 ms): the end of a "
         "prompt is always computed."),
    ],
)  # fmt: skip
def test_why_a_prefix_missed(fields: dict[str, Any], said: str) -> None:
    spent = TimeSpent(**{"prefill_s": 0.5, "computed_tokens": 512, "num_chunks": 2, **fields})
    assert any(sentence.endswith(said) for sentence in told(seen(), spent).sentences), told(seen(), spent).sentences


def test_preemption_is_told() -> None:
    spent = msgspec.structs.replace(SPENT, num_preemptions=1, preempted_s=0.035)
    found = told(seen(), spent)
    assert "Set back once, for 35 ms, because KV blocks ran out." in found.sentences
    (decode,) = (span for span in found.spans if span.name == "decode")
    assert [child.name for child in decode.children] == ["stalled", "preempted"]
    longer = told(seen(), msgspec.structs.replace(spent, preempted_s=5.0))  # some of it during prefill
    (decode,) = (span for span in longer.spans if span.name == "decode")
    assert sum(child.seconds for child in decode.children) == pytest.approx(decode.seconds)


@pytest.mark.parametrize(
    ("fields", "first", "spans"),
    [
        ({"status": "refused", "http_status": 429, "error": "rate_limit_exceeded", "limit": "make 60 requests per minute",
          "accepted_s": None, "total_s": 0.001},
         "Refused with status 429 after 1.0 ms: its key may make 60 requests per minute (rate_limit_exceeded).", ["accept"]),
        ({"status": "refused", "http_status": 429, "error": "queue_full", "total_s": 0.002},
         "Refused with status 429 after 2.0 ms: the queue was full (queue_full).", ["accept"]),
        ({"status": "cached", "cache": "hit", "ttft_s": 0.0015, "total_s": 0.002},
         "Answered from the response cache after 2.0 ms: no backend was asked.", ["accept", "deliver"]),
        ({"status": "cancelled", "queued_s": 2.2, "total_s": 2.3},
         "The caller left after 2,300 ms, while it waited in the gateway.", ["accept", "gateway queue"]),
        ({"status": "cancelled", "backend": "b1", "sent_s": 0.1, "engine_s": {}, "is_local": True, "total_s": 2.0},
         "The caller left after 2,000 ms, while it waited in the engine's queue.", ["accept", "gateway queue", "engine queue"]),
        ({"status": "cancelled", "sent_s": 0.001, "engine_s": {"queue": 0.5}, "is_local": True, "total_s": 2.0},
         "The caller left after 2,000 ms, while its prompt was computed.", ["accept", "engine queue", "prefill"]),
        ({"status": "cancelled", "sent_s": 0.001, "engine_s": {"queue": 0.5, "prefill": 0.1, "decode": 1.38}, "is_local": True,
          "ttft_s": 0.61, "last_s": 1.99, "completion_tokens": 12, "stream": True, "total_s": 2.0},
         "The caller left after 2,000 ms, while its answer was written, after 12 tokens.",
         ["accept", "send", "engine queue", "prefill", "decode", "deliver"]),
        ({"status": "interrupted", "sent_s": 0.001, "backend": "b1", "total_s": 2.0},
         "Cut off after 2,000 ms, before any of the answer came: the server was stopped.", ["accept", "send"]),
        ({"status": "failed", "http_status": 502, "error": "upstream_failed", "backend": "b1", "failed": ("b0",),
          "sent_s": 0.5, "total_s": 0.9},
         "Failed at b1 with status 502 after 900 ms, before any of the answer came (upstream_failed).",
         ["accept", "gateway queue", "send"]),
    ],
)  # fmt: skip
def test_each_way_to_end(fields: dict[str, Any], first: str, spans: list[str]) -> None:
    request = SeenRequest(**{"id": "req-a", "arrived": 0.0, "path": "/v1/completions", "accepted_s": 0.001, **fields})
    found = told(request, None)
    assert found.sentences[0] == first
    assert [span.name for span in found.spans] == spans


def test_retries_and_hedges_are_told() -> None:
    retried = seen(is_local=False, backend="b1", failed=("b0",), sent_s=0.3, spent=None)
    found = told(retried, None)
    assert "b0 failed on this request, which took 299 ms; b1 was asked next." in found.sentences
    hedged = told(seen(is_local=False, backend="b1", why="hedge"), None)
    assert "Another backend had not begun in time, so b1 was asked too, and answered first." in hedged.sentences


def test_a_backend_that_tells_nothing_is_described_from_outside() -> None:
    streamed = told(seen(is_local=False, backend="v"), None)
    assert [span.name for span in streamed.spans] == ["accept", "prefill", "decode", "deliver"]
    assert streamed.sentences[:2] == [
        "The tokens after the first took 601 ms (64 tokens in all).",
        "549 ms of 1,180 ms: until the first token of v; its queue, the prompt and the way to it are not told apart.",
    ]
    whole = told(seen(is_local=False, backend="v", stream=False, ttft_s=None, last_s=None, first_byte_s=1.17), None)
    assert [span.name for span in whole.spans] == ["accept", "decode", "deliver"]
    assert whole.sentences[0] == "v took 1,169 ms for its whole answer of 64 tokens."


def test_a_remote_engine_lies_between_sent_and_last() -> None:
    """Its own clock says how long its parts took; the rest is the network."""
    remote = seen(is_local=False, backend="r0", sent_s=0.010, ttft_s=0.6, last_s=1.25, total_s=1.3)
    found = told(remote, SPENT)
    parts = {span.name: (round(span.start_s, 3), round(span.seconds, 3)) for span in found.spans}
    assert parts["send"] == (0.01, 0.048)  # to the engine's arrival: first token at 0.6, less 412 and 130 ms
    assert (parts["engine queue"], parts["prefill"], parts["decode"]) == ((0.058, 0.412), (0.47, 0.13), (0.6, 0.6))
    assert parts["deliver"] == (1.2, 0.1)
    assert any("on the way to r0" in sentence for sentence in found.sentences)


@pytest.mark.parametrize(("fields", "sentence", "detail"), [
    ({"pool": "tts"}, "the worker pool tts, its queue and its work, until its answer began.", "pool tts"),
    ({"pool": "tts", "is_local": False, "backend": "b0"},
     "the worker pool tts of b0, its queue and its work, until its answer began.", "pool tts at b0"),
    ({"is_local": False, "backend": "b0"}, "b0, its queue and its work, until its answer began.", "at b0"),
    ({}, "a worker pool, its queue and its work, until its answer began.", ""),
])  # fmt: skip
def test_what_a_worker_pool_took_is_not_the_engines(fields: dict[str, Any], sentence: str, detail: str) -> None:
    request = seen(path="/v1/audio/speech", stream=False, prompt_tokens=0, cached_tokens=0, completion_tokens=0,
                   ttft_s=None, last_s=None, first_byte_s=0.901, total_s=1.001, **fields)  # fmt: skip
    found = told(request, None)
    assert [span.name for span in found.spans] == ["accept", "worker", "deliver"]
    assert found.spans[1].detail == detail
    assert found.sentences == [
        f"900 ms of 1,001 ms: {sentence}",
        "100 ms of 1,001 ms: from the beginning of the answer to its end (the rest was made, the network, a caller that reads "
        "slowly).",
    ]


def test_a_caller_that_leaves_a_worker_pool() -> None:
    request = seen(path="/v1/audio/speech", status="cancelled", stream=False, completion_tokens=0, ttft_s=None, last_s=None,
                   first_byte_s=None, total_s=2.0)  # fmt: skip
    found = told(request, None)
    assert [span.name for span in found.spans] == ["accept", "worker"]
    assert found.sentences == [
        "The caller left after 2,000 ms, while it waited for a worker, or one worked on it.",
        "1,999 ms of 2,000 ms: a worker pool, its queue and its work, without an answer.",
    ]


def test_an_engine_that_tells_more_than_there_was_time_for_is_cut() -> None:
    found = told(seen(total_s=0.5, last_s=0.5, ttft_s=0.2), SPENT)
    assert [span.name for span in found.spans] == ["accept", "engine queue", "prefill"]
    assert abs(sum(span.seconds for span in found.spans) - 0.5) < 1e-12


def test_what_is_negligible_is_not_told() -> None:
    spent = TimeSpent(
        queue_s=0.004, waits=[Wait("rows", 0.004)], prefill_s=0.004, computed_tokens=3, decode_s=1.165, num_steps=63
    )
    found = told(seen(last_s=1.179, ttft_s=0.01), spent)
    assert found.sentences == ["Decoding took 1,165 ms for 64 tokens in 63 steps."]
    long = told(seen(total_s=100.0), TimeSpent(queue_s=0.05, waits=[Wait("rows", 0.05)], decode_s=99.0))
    assert not any("max_num_seqs" in sentence for sentence in long.sentences)
    nothing = told(SeenRequest(id="x", arrived=0.0, path="/tokenize", status="ok", sent_s=0.0, total_s=0.001), None)
    assert nothing.sentences == ["It took 1.0 ms in all; no part of it stands out."]


DURATIONS = {0.0: "0 ms", 0.0004: "0.4 ms", 0.00996: "10 ms", 0.412: "412 ms", 1.18: "1,180 ms", 12.34: "12.3 s"}
PROMPTS = {1: "a 1-", 8: "an 8-", 11: "an 11-", 80: "an 80-", 110: "a 110-", 1800: "a 1,800-", 18_000: "an 18,000-"}


def test_numbers_in_words() -> None:
    assert {seconds: ms(seconds) for seconds in DURATIONS} == DURATIONS
    assert [length(seconds) for seconds in (0.133, 3.069, 100.4)] == ["133 ms", "3.1 s", "100.4 s"]
    assert {tokens: a_prompt(tokens) for tokens in PROMPTS} == {
        tokens: f"{said}token prompt" for tokens, said in PROMPTS.items()
    }


@pytest.mark.parametrize(
    "wrong",
    [
        {"queue_s": -1.0},
        {"decode_s": 1e300},
        {"cached_tokens": -5},
        {"waits": [{"why": "boredom", "seconds": 1.0}]},
        {"behind": [{"prompt_tokens": 1, "seconds": 1.0}] * 1000},
        {"behind": [{"prompt_tokens": 1, "seconds": 1.0, "request_id": "x" * 1000}]},
        {"missed": {"odd": 1}},
        {"num_steps": "many"},
    ],
)
def test_a_backend_cannot_tell_nonsense(wrong: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(wrong), type=EngineFacts)
