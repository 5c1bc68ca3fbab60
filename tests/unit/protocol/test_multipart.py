"""Forms: what is read from them, what is refused and how it is explained, and one field set anew."""

from __future__ import annotations

import random
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonle.errors import InvalidRequest
from tonle.protocol import multipart
from tonle.protocol.multipart import Form, boundary_of, is_form, parse_form, with_field

HEADER = "multipart/form-data; boundary=xyz"

Fields = list[tuple[str, bytes, str | None]]  # name, data, filename


def encode(fields: Fields, boundary: str = "xyz") -> bytes:
    """A plain encoder, to hold the parser to."""
    out = []
    for name, data, filename in fields:
        head = f"--{boundary}\r\nContent-Disposition: form-data; name={_quoted(name)}"
        if filename is not None:
            head += f"; filename={_quoted(filename)}\r\nContent-Type: audio/wav"
        out.append(head.encode() + b"\r\n\r\n" + data + b"\r\n")
    return b"".join(out) + f"--{boundary}--\r\n".encode()


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def plain(form: Form) -> Fields:
    return [(part.name, bytes(part.data), part.filename) for part in form.parts]


def one(head: str, data: bytes = b"1") -> bytes:
    return b"--xyz\r\n" + head.encode() + b"\r\n\r\n" + data + b"\r\n--xyz--"


NAMES = st.text(st.characters(exclude_categories=("Cc", "Cs")), min_size=1, max_size=20)
DATA = st.one_of(
    st.binary(max_size=200), st.lists(st.sampled_from([b"\r\n", b"--", b"xy", b"z", b"-", b"\r", b""])).map(b"".join)
)
FIELDS = st.lists(st.tuples(NAMES, DATA, st.none() | NAMES), max_size=6)


def free_of_boundary(fields: Fields) -> Fields:
    return [(name, data, filename) for name, data, filename in fields if b"\r\n--xyz" not in b"\r\n" + data]


@given(FIELDS)
@settings(max_examples=200, deadline=None)
def test_what_was_encoded_is_read(fields: Fields) -> None:
    fields = free_of_boundary(fields)
    body = encode(fields)
    assert plain(parse_form(body, HEADER)) == fields
    assert plain(parse_form(b"preamble\r\n" + body + b"epilogue", HEADER)) == fields


@given(FIELDS, st.text(st.characters(exclude_categories=("Cs",)), max_size=20))
@settings(max_examples=200, deadline=None)
def test_one_field_is_set_and_the_others_stay(fields: Fields, value: str) -> None:
    fields = [field for field in free_of_boundary(fields) if field[0] != "model"]
    new = ("model", value.encode(), None)
    added = with_field(parse_form(encode(fields), HEADER), "model", value)
    assert plain(parse_form(added, HEADER)) == [new, *fields]
    for place in range(len(fields) + 1):
        with_it = [*fields[:place], ("model", b"old", None), *fields[place:]]
        replaced = with_field(parse_form(encode(with_it), HEADER), "model", value)
        assert plain(parse_form(replaced, HEADER)) == [*fields[:place], new, *fields[place:]]


@given(st.binary(max_size=300), st.integers(0, 400), st.integers(0, 400))
@settings(max_examples=300, deadline=None)
def test_broken_bodies_are_refused_or_read_but_never_crash(noise: bytes, at: int, cut: int) -> None:
    body = encode([("model", b"m", None), ("file", noise, "a.wav"), ("prompt", "ខ្មែរ".encode(), None)])
    for broken in (noise, body[:at], body[:at] + noise + body[at + cut :]):
        try:
            form = parse_form(broken, HEADER)
        except InvalidRequest:
            continue
        # What was read can be written, and is then read the same.
        if sum(part.name == "model" for part in form.parts) < 2:
            again = parse_form(with_field(form, "model", "other"), HEADER)
            assert [part for part in plain(again) if part[0] != "model"] == [
                part for part in plain(form) if part[0] != "model"
            ]


def test_files_are_views_of_the_body() -> None:
    body = encode([("file", b"\x00" * 1000, "a.wav")])
    part = parse_form(body, HEADER).file("file")
    assert part is not None and part.data.obj is body
    assert (part.filename, part.content_type) == ("a.wav", "audio/wav")


def test_fields_are_read_as_text() -> None:
    form = parse_form(encode([("a", "ខ្មែរ".encode(), None), ("g[]", b"word", None), ("g[]", b"segment", None)]), HEADER)
    assert form.text("a") == "ខ្មែរ"
    assert form.texts("g[]") == ["word", "segment"]
    assert form.text("b") is None and form.file("b") is None and form.texts("b") == []
    with pytest.raises(InvalidRequest, match=r"g\[\] is given 2 times"):
        form.text("g[]")
    with pytest.raises(InvalidRequest, match="a must be a file"):
        form.file("a")


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (("f", b"x", "name"), "f must be a field with text, not a file"),
        (("f", b"\xff", None), "f is not valid UTF-8"),
        (("f", b"x" * (multipart.MAX_TEXT_BYTES + 1), None), "f is longer than"),
    ],
)
def test_text_that_is_none_is_refused(part: tuple[str, bytes, str | None], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as error:
        parse_form(encode([part]), HEADER).text("f")
    assert error.value.param == "f"


@pytest.mark.parametrize(
    ("parameters", "name", "filename"),
    [
        ('name="a\\"b"', 'a"b', None),
        ("name=plain", "plain", None),
        ('name="a;b" ; filename="x"', "a;b", "x"),
        ('NAME="a";FileName="C:\\sounds\\a.wav"', "a", "C:\\sounds\\a.wav"),
        ('name="a"; filename="x"; filename*=UTF-8\'\'%e1%9e%81.wav', "a", "ខ.wav"),
        ("name=\"a\"; filename*=iso-8859-1'en'%e9.wav", "a", "é.wav"),
        ('name="ខ្មែរ"', "ខ្មែរ", None),
        ('name="a"; filename=""', "a", ""),
    ],
)
def test_names_in_their_forms(parameters: str, name: str, filename: str | None) -> None:
    (part,) = parse_form(one(f"content-disposition: form-data; {parameters}"), HEADER).parts
    assert (part.name, part.filename) == (name, filename)


def test_a_part_without_data_may_share_its_line_break() -> None:
    body = b'--xyz\r\nContent-Disposition: form-data; name="model"\r\n\r\n--xyz--'
    form = parse_form(body, HEADER)
    assert plain(form) == [("model", b"", None)]
    assert plain(parse_form(with_field(form, "model", "m"), HEADER)) == [("model", b"m", None)]


GOOD = 'Content-Disposition: form-data; name="a"'


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is empty"),
        (b"{}", "does not occur in the body"),
        (one(GOOD)[:-10], "part 1 does not end: the body stops before the closing boundary"),
        (one(GOOD)[:-2] + b"\r\n", "headers of part 2 do not end"),
        (b"--xyz\r\n" + GOOD.encode(), "the headers of part 1 do not end"),
        (one("X: " + "y" * multipart.MAX_HEAD_BYTES + "\r\n" + GOOD), "the headers of part 1 do not end"),
        (one("\r\n".join(f"x-{i}: 1" for i in range(20))), "more than 16 headers"),
        (one(GOOD, b"1\r\n--xyzz"), "may not occur inside of a part"),
        (one(GOOD).replace(b"\r\n", b"\n"), "line break"),
        (one("Content-Type: text/plain"), "must have a header Content-Disposition"),
        (one(""), "must have a header Content-Disposition"),
        (one("Content-Disposition: attachment; name=a"), "must have a header Content-Disposition"),
        (one('Content-Disposition: form-data; name=""'), "must have a header Content-Disposition"),
        (one(GOOD + '; name="b"'), "has the parameter name twice"),
        (one(GOOD + "\r\n" + GOOD), "has the header content-disposition twice"),
        (one(GOOD + "\r\n folded"), "each must be one line"),
        (one(GOOD + '; filename="open'), "is malformed"),
        (one(f'Content-Disposition: form-data; name="{"n" * 201}"'), "the name of part 1 is longer"),
        (one(GOOD + f'; filename="{"n" * 1001}"'), "its filename is longer"),
        (one(GOOD + "; filename*=KOI8''x"), "must look like UTF-8''name.wav"),
        (one(GOOD + "; filename*=UTF-8''%ff"), "is not valid UTF-8"),
        (one(GOOD + "\r\nContent-Transfer-Encoding: base64"), "transfer encoding base64 is not supported"),
        (b"--xyz\r\nX: \xff\r\n\r\n\r\n--xyz--", "are not valid UTF-8"),
        (encode([("a", b"", None)] * 129), "more than 128 parts"),
    ],
)
def test_what_is_wrong_is_explained(body: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse_form(body, HEADER)


def test_the_boundary_comes_from_the_header() -> None:
    assert boundary_of('Multipart/Form-Data; charset=utf-8; Boundary="a b:c"') == b"a b:c"
    assert is_form(HEADER) and not is_form("application/json")
    for header, message in [
        ("application/json", "must be multipart/form-data, not application/json"),
        ("", "not nothing"),
        ("multipart/form-data", "has no boundary"),
        ("multipart/form-data; boundary=" + "x" * 71, "1 to 70 letters"),
        ('multipart/form-data; boundary="é"', "1 to 70 letters"),
        ('multipart/form-data; boundary="ends "', "1 to 70 letters"),
        ("multipart/form-data; boundary=a; boundary=b", "twice"),
        ("multipart/form-data; boundary=" + "x" * 2000, "too long"),
    ]:
        with pytest.raises(InvalidRequest, match=message):
            boundary_of(header)


def test_a_value_may_not_hold_the_boundary() -> None:
    with pytest.raises(InvalidRequest, match="boundary of the form occurs in the value"):
        with_field(parse_form(one(GOOD), HEADER), "a", "\r\n--xyz--")
    twice = parse_form(encode([("a", b"", None)] * 2), HEADER)
    with pytest.raises(InvalidRequest, match="a is given 2 times"):
        with_field(twice, "a", "1")


def test_large_files_with_many_near_boundaries_take_linear_time() -> None:
    # Each line of the file is all but the boundary; with a search that starts anew at each this would not end.
    boundary = "-" * 60 + "".join(random.Random(1).choices(string.ascii_letters, k=10))
    data = ("\r\n--" + boundary[:-1]).encode() * 100_000
    form = parse_form(encode([("file", data, "x")], boundary), f"multipart/form-data; boundary={boundary}")
    assert len(form.parts[0].data) == len(data)
