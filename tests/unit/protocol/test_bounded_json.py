"""JSON within bounds: what is too deep or too much is refused, before it is decoded; text in strings never counts."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonle.errors import InvalidRequest
from tonle.protocol import bounded_json
from tonle.protocol.bounded_json import MAX_DEPTH, MAX_VALUES, decode_json
from tonle.protocol.parse import decode_object

SIZE = 8 * 1024**2  # the largest body a server takes unless told otherwise


def nested(depth: int, opening: str = "[", closing: str = "]") -> bytes:
    return (opening * depth + closing * depth).encode()


def flood(unit: bytes) -> bytes:
    return b'{"x":[' + b",".join([unit] * ((SIZE - 8) // (len(unit) + 1))) + b"]}"


@pytest.mark.parametrize("depth", [MAX_DEPTH, 500, 985, 5000])
def test_a_deep_field_is_refused(depth: int) -> None:
    with pytest.raises(InvalidRequest, match=r"is nested too deeply: at most 128"):
        decode_object(b'{"x": ' + nested(depth) + b"}")


def test_the_deep_field_is_named() -> None:
    body = b'{"a": [[1], {"b": 2}], "tools": %b, "c": []}' % nested(MAX_DEPTH, '{"a":', "}").replace(b":}", b":1}")
    with pytest.raises(InvalidRequest, match=r"^tools is nested too deeply") as refusal:
        decode_object(body)
    assert refusal.value.param == "tools"


def test_the_depth_allowed() -> None:
    assert decode_object(b'{"x": ' + nested(MAX_DEPTH - 1) + b"}")["x"][0][0][0]
    many = b'{"x": [' + b",".join([nested(MAX_DEPTH - 2)] * 100) + b"]}"  # wide as well as deep
    assert len(decode_object(many)["x"]) == 100
    with pytest.raises(InvalidRequest):
        decode_object(many.replace(b"[]", b"[[]]", 1))


@pytest.mark.parametrize(
    ("unit", "what"),
    [
        (b"[5]", "lists and objects"), (b"[]", "lists and objects"), (b"{}", "lists and objects"),
        (b'{"a":1}', "strings"), (b'""', "strings"), (b'"\\""', "strings"), (b"5", "values"), (b"null", "values"),
        (b"2.2250738585072012e-308", "fraction"), (b"1e9", "values"), (b"1E300000", "fraction"),
        (b"9" * 4000, "more than 100 digits"),
    ],
)  # fmt: skip
def test_a_flood_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch, unit: bytes, what: str) -> None:
    monkeypatch.setattr(bounded_json, "_decode", lambda text: pytest.fail("decoded"))
    with pytest.raises(InvalidRequest, match=f"^the body holds (more than|a number of) .*{what.split()[-1]}"):
        decode_object(flood(unit))


@pytest.mark.parametrize(
    "text",
    ["if (a[0] == {1, 2}) { return [[[[1.5e-308]]]]; } // \"quoted\" \\ \\\" \n" * 40_000, '"' * SIZE, "\\" * 10**6,
     "9" * 10**6, "1.5," * 10**6, "[" * 10**6, "]" * 10**6],
    ids=["code", "quotes", "backslashes", "digits", "numbers", "opened", "closed"],
)  # fmt: skip
def test_text_may_hold_anything(text: str) -> None:
    body = msgspec.json.encode({"messages": [{"role": "user", "content": text}], "n": 1})
    assert decode_object(body)["messages"][0]["content"] == text


def test_a_million_token_ids_pass() -> None:
    ids = [number % 150_000 for number in range(1_000_000)]
    assert decode_object(msgspec.json.encode({"prompt": ids}))["prompt"] == ids


def test_a_body_of_very_many_fields_is_refused() -> None:
    assert len(decode_object(msgspec.json.encode({str(number): 1 for number in range(1000)}))) == 1000
    with pytest.raises(InvalidRequest, match="the body has 1001 fields; at most 1000 are allowed"):
        decode_object(msgspec.json.encode({str(number): 1 for number in range(1001)}))


def test_numbers_are_read_as_python_reads_them() -> None:
    texts = ["8.98846567431158e307", "2.2250738585072012e-308", "-0.0", "5e-324", "1e22", "9007199254740993.0", "0.1"]
    assert [repr(value) for value in decode_json(f"[{','.join(texts)}]".encode())] == [repr(float(t)) for t in texts]
    for text in (b'{"x":1e400}', b'{"x":-1e400}', b'{"x":%b}' % (b"9" * 5000), b'{"x":%b.0}' % (b"9" * 310)):
        with pytest.raises(InvalidRequest, match="out of range"):
            decode_object(text)


def test_half_a_surrogate_pair_is_said_to_be_one() -> None:
    with pytest.raises(InvalidRequest, match=r"half of a surrogate pair \(byte 6\)"):
        decode_object(rb'{"x":"\ud800"}')
    assert decode_object(rb'{"x":"\ud83d\ude00"}') == {"x": "😀"}


texts = st.text('a"\\[]{},:.e5', max_size=6)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.sampled_from([1.5, 1e300, -2.5e-10]) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)


def counted(value: Any) -> dict[str, int]:
    """Containers, strings, fractions and depth, by looking at every value."""
    found = {"containers": 0, "strings": 0, "fractions": 0, "depth": 0}

    def look(each: Any, depth: int) -> None:
        found["containers"] += isinstance(each, dict | list)
        found["strings"] += isinstance(each, str)
        found["fractions"] += repr(each).count(".") + repr(each).count("e") if isinstance(each, float) else 0
        found["depth"] = max(found["depth"], depth if isinstance(each, dict | list) else 0)
        for inner in [*each, *each.values()] if isinstance(each, dict) else each if isinstance(each, list) else ():
            look(inner, depth + 1)

    look(value, 1)
    return found


@settings(deadline=None)
@given(values, st.integers(1, 8), st.sampled_from([None, 1]), st.booleans())
def test_counts_are_exact(value: Any, most: int, indent: int | None, ascii_only: bool) -> None:
    """With small bounds, exactly the texts that exceed one are refused."""
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode()
    found = counted(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounded_json, "SMALL_BYTES", 0)
        for bound in ("DEPTH", "CONTAINERS", "STRINGS", "FRACTIONS"):
            patch.setattr(bounded_json, f"MAX_{bound}", most)
        try:
            assert decode_json(text) == value
            refused = False
        except InvalidRequest:
            refused = True
    assert refused == any(number > most for number in found.values()), found


@settings(deadline=None)
@given(st.binary(max_size=60) | texts.map(str.encode))
def test_any_bytes_are_decoded_or_refused(text: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounded_json, "SMALL_BYTES", 0)
        try:
            decode_object(text)
        except InvalidRequest as refusal:
            assert refusal.message


def test_the_bounds_leave_room() -> None:
    """Ten thousand messages with parts; a schema thirty objects deep inside a tool."""
    part = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    body = msgspec.json.encode({"messages": [part] * (10_000)})
    assert len(decode_object(body)["messages"]) == 10_000
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(30):
        schema = {"type": "object", "properties": {"inner": {"anyOf": [schema]}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert decode_object(msgspec.json.encode({"tools": [tool]}))
    assert MAX_VALUES > 10**6
