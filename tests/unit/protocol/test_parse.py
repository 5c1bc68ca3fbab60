"""Bodies into requests, and words for what is wrong with them. More single fields are in tests/http/test_errors.py."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonle.errors import InvalidRequest
from tonle.protocol.fields import CHAT_ONLY, NO_EFFECT, REFUSED, STRIPPED
from tonle.protocol.openai import ChatRequest, CompletionRequest, Message
from tonle.protocol.parse import MAX_WARNINGS, decode_object, parse
from tonle.protocol.structured_fields import StructuredOutputs

HELLO = {"messages": [{"role": "user", "content": "hi"}]}


def chat(**fields: Any) -> tuple[ChatRequest, list[str]]:
    request, warnings = parse(msgspec.json.encode({**HELLO, **fields}), ChatRequest)
    return request, [warning.param for warning in warnings]


def test_known_fields_give_no_warning() -> None:
    request, warnings = chat(temperature=1, stop=["a"], logit_bias={"1": 2}, stream_options={"include_usage": True})
    assert not warnings
    assert request.messages == [Message(role="user", content="hi")]
    assert request.temperature == 1.0 and isinstance(request.temperature, float)
    assert request.logit_bias == {"1": 2.0}


@pytest.mark.parametrize("name", sorted(NO_EFFECT | STRIPPED.keys()))
def test_harmless_fields_are_reported(name: str) -> None:
    assert chat(**{name: "x"})[1] == [name]
    assert chat(**{name: None})[1] == [], "null is absent"


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_fields_that_would_change_the_answer_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name} cannot be served: ") as error:
        chat(**{name: {"something": "real"}})
    assert error.value.param == name
    assert chat(**{name: None})[1] == []
    for neutral in REFUSED[name].neutral:
        assert chat(**{name: neutral})[1] == [], "asks for nothing, so there is nothing to say"


@pytest.mark.parametrize("name", sorted(CHAT_ONLY))
def test_what_only_chats_have_is_refused_elsewhere(name: str) -> None:
    def complete(value: Any) -> list[str]:
        body = msgspec.json.encode({"prompt": "a", name: value})
        return [warning.param for warning in parse(body, CompletionRequest)[1]]

    with pytest.raises(InvalidRequest, match=f"^{name} cannot be served: ") as error:
        complete({"something": "real"})
    assert error.value.param == name
    assert complete(None) == []
    for neutral in CHAT_ONLY[name].neutral:
        assert complete(neutral) == []
    assert name in ChatRequest.__struct_fields__


@pytest.mark.parametrize("inner", sorted(StructuredOutputs.other_fields.no_effect))
def test_harmless_fields_inside_others_are_reported(inner: str) -> None:
    outer = "structured_outputs"
    _, warnings = parse(msgspec.json.encode({**HELLO, outer: {"regex": "a", inner: True, "x": 1}}), ChatRequest)
    assert [(each.param, each.message) for each in warnings] == [
        (f"{outer}.{inner}", "accepted, has no effect"),
        (f"{outer}.x", "unknown field, ignored"),
    ]


def test_true_is_not_one() -> None:
    with pytest.raises(InvalidRequest):
        chat(best_of=True)


def test_tables_do_not_overlap() -> None:
    known = set(ChatRequest.__struct_fields__)
    assert not known & NO_EFFECT and not known & REFUSED.keys() and not known & STRIPPED.keys()
    assert not NO_EFFECT & REFUSED.keys() and not STRIPPED.keys() & REFUSED.keys()


def test_unknown_fields_at_every_depth() -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "x", "cache_control": {}}],
            "mood": "good",
            "refusal": None,
        },
    ]
    _, warnings = chat(messages=messages, stream_options={"often": True}, foo=1, chat_template_kwargs={"free": "form"})
    assert warnings == ["messages[1].content[0].cache_control", "messages[1].mood", "stream_options.often", "foo"]


def test_warnings_are_bounded() -> None:
    _, warnings = parse(msgspec.json.encode({**HELLO, **{f"f{i}" * 500: 1 for i in range(900)}}), ChatRequest)
    assert len(warnings) == MAX_WARNINGS + 1
    assert warnings[-1].message == f"{900 - MAX_WARNINGS} more fields were not used"
    assert all(len(warning.param) <= 100 for warning in warnings)


@pytest.mark.parametrize("prompt", ["a", ["a", "b"], [1, 2], [[1], [2]]])
def test_prompts(prompt: Any) -> None:
    assert parse(msgspec.json.encode({"prompt": prompt}), CompletionRequest)[0].prompt == prompt


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["a"] * 4097}, "prompt"), ({"prompt": [[1]] * 4097}, "prompt"), ({"n": 4097}, "n"),
        ({"prompt": ["a"] * 65, "n": 64}, "prompt"), ({"n": 10**400}, "n"),
        ({"prompt": [1] * 10_000}, None), ({"prompt": ["a"] * 64, "n": 64}, None), ({"n": -5}, None), ({"n": "5"}, None),
    ],
)  # fmt: skip
def test_answers_are_bounded_whichever_server_gives_them(fields: dict[str, Any], param: str | None) -> None:
    body = msgspec.json.encode(fields)
    if param is None:
        assert decode_object(body) == fields
        return
    with pytest.raises(InvalidRequest, match=r"at most 4096|more than the 4096 answers") as refusal:
        decode_object(body)
    assert refusal.value.param == param


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes(body: bytes) -> None:
    try:
        parse(body, ChatRequest)
    except InvalidRequest as error:
        assert error.message


texts = st.text("aក\n ", max_size=5)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from([*ChatRequest.__struct_fields__, *REFUSED, "user", "x"]), json_values, max_size=4)
)
def test_any_values(body: dict[str, Any]) -> None:
    """Whatever the types, a request comes out or an error that names a field."""
    try:
        parse(msgspec.json.encode(HELLO | body), ChatRequest)
    except InvalidRequest as error:
        assert error.param is not None and "`" not in error.message
