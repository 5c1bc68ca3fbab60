"""`parse_form`: a multipart/form-data body to its fields and files, within bounds; `with_field`: the body with one field set.

Does: find the parts in the bytes without copying files, read their names, explain what is wrong in the caller's words. Does
not: bound the body as a whole (the server does), decode files, or know which fields an endpoint has.

Where two readers could understand a body differently (a name given twice, a boundary inside of a part, folded headers) it is
refused: the gateway reads `model` from it, and the backend must find the same.
"""

from __future__ import annotations

import re
from urllib.parse import unquote_to_bytes

import msgspec

from tonle.errors import InvalidRequest

MAX_PARTS = 128
MAX_BOUNDARY_CHARS = 70  # RFC 2046
MAX_HEAD_BYTES = 8 * 1024  # all headers of one part; a file's name may be percent-encoded
MAX_HEADERS = 16  # of one part
MAX_NAME_CHARS = 200
MAX_FILENAME_CHARS = 1000
MAX_TEXT_BYTES = 256 * 1024  # of a field that is read as text: a prompt of 80,000 Khmer letters
MAX_CONTENT_TYPE_CHARS = 1000

FORM_TYPE = "multipart/form-data"

_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]*[0-9A-Za-z'()+_,./:=?-]")  # RFC 2046: may not end with a space
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_PARAMETER = re.compile(r'\s*;\s*([!#$%&\'*+.^_`|~0-9A-Za-z-]+)\s*=\s*("(?:[^"\\]|\\.)*"|[^\s;"]+)')
_QUOTED_PAIR = re.compile(r'\\(["\\])')  # other backslashes stand for themselves: filename="C:\sound.wav"
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_AS_IT_IS = ("", "binary", "8bit", "7bit")


class Part(msgspec.Struct, frozen=True):
    """One field or file. `data` is a view of the body; `filename` tells a file from a field."""

    name: str
    data: memoryview
    filename: str | None = None
    content_type: str = ""


class Form(msgspec.Struct, frozen=True):
    """The parts in the order of the body, and what `with_field` needs to write it anew."""

    parts: tuple[Part, ...]
    body: bytes
    boundary: bytes
    first: int  # where the first delimiter begins
    places: tuple[tuple[int, int], ...]  # of each part: where its data begins and ends

    def part(self, name: str) -> Part | None:
        """The one part of that name. Raises `InvalidRequest` if there are several."""
        found = [part for part in self.parts if part.name == name]
        if len(found) > 1:
            raise InvalidRequest(f"{name} is given {len(found)} times; send it once", param=name)
        return found[0] if found else None

    def text(self, name: str) -> str | None:
        """A field's text. Raises `InvalidRequest` if it is a file, given twice, too long or not UTF-8."""
        return None if (part := self.part(name)) is None else _text(part)

    def texts(self, name: str) -> list[str]:
        """Of a field that may be given several times, such as `timestamp_granularities[]`."""
        return [_text(part) for part in self.parts if part.name == name]

    def file(self, name: str) -> Part | None:
        """Raises `InvalidRequest` if it is there and is no file."""
        part = self.part(name)
        if part is not None and part.filename is None:
            raise InvalidRequest(f"{name} must be a file: a part with a filename", param=name)
        return part


def parse_form(body: bytes, content_type: str) -> Form:
    """`content_type`: the header's whole value, with the boundary. Raises `InvalidRequest`."""
    boundary = boundary_of(content_type)
    dash_boundary = b"--" + boundary
    delimiter = b"\r\n" + dash_boundary
    if not body:
        raise InvalidRequest(f"the body is empty; send {FORM_TYPE}")
    first = 0 if body.startswith(dash_boundary) else body.find(delimiter) + 2
    if first == 1:  # not found
        raise InvalidRequest("the boundary that content-type names does not occur in the body")
    view = memoryview(body)
    parts: list[Part] = []
    places: list[tuple[int, int]] = []
    at = first + len(dash_boundary)
    while (begin := _after_delimiter(body, at)) is not None:
        if len(parts) == MAX_PARTS:
            raise InvalidRequest(f"the form has more than {MAX_PARTS} parts")
        number = len(parts) + 1
        # A part without headers begins with the empty line; else one ends them.
        head_end = (
            begin - 2 if body.startswith(b"\r\n", begin) else body.find(b"\r\n\r\n", begin, begin + MAX_HEAD_BYTES)
        )
        if head_end < 0:
            raise InvalidRequest(
                f"the headers of part {number} do not end within {MAX_HEAD_BYTES} bytes; an empty line must follow them"
            )
        data = head_end + 4
        # The line break before a delimiter may be the one that ends the headers: a part with no data and no line of its own.
        end = body.find(delimiter, data - 2)
        if end < 0:
            raise InvalidRequest(
                f"part {number} does not end: the body stops before the closing boundary; was it cut off on its way?"
            )
        places.append((data, max(end, data)))
        parts.append(_part(body[begin : max(head_end, begin)], view[data : max(end, data)], number))
        at = end + len(delimiter)
    return Form(parts=tuple(parts), body=body, boundary=boundary, first=first, places=tuple(places))


def with_field(form: Form, name: str, value: str) -> bytes:
    """The form's body with the text field `name` set to `value`: in its place, or before the others. The boundary stays.

    Raises `InvalidRequest` if the name is given twice, or the caller's boundary occurs in the value.
    """
    data = value.encode()
    if b"--" + form.boundary in data:
        raise InvalidRequest(f"the boundary of the form occurs in the value of {name}; choose a longer, random one")
    form.part(name)  # given once at most
    view = memoryview(form.body)
    for part, (begin, end) in zip(form.parts, form.places, strict=True):
        if part.name == name:
            # Without data, the line break that ends the headers may be the delimiter's, too.
            gap = b"" if form.body.startswith(b"\r\n--" + form.boundary, end) else b"\r\n"
            return b"".join((view[:begin], data, gap, view[end:]))
    quoted = re.sub(r'(["\\])', r"\\\1", _CONTROL.sub("", name))
    head = f'Content-Disposition: form-data; name="{quoted}"\r\n\r\n'
    added = b"".join((b"--", form.boundary, b"\r\n", head.encode(), data, b"\r\n"))
    return b"".join((view[: form.first], added, view[form.first :]))


def is_form(content_type: str) -> bool:
    return content_type.partition(";")[0].strip().lower() == FORM_TYPE


def boundary_of(content_type: str) -> bytes:
    """From the header's value. Raises `InvalidRequest`."""
    if not is_form(content_type):
        shown = content_type.partition(";")[0][:MAX_NAME_CHARS] or "nothing"
        raise InvalidRequest(f"content-type must be {FORM_TYPE}, not {shown}")
    if len(content_type) > MAX_CONTENT_TYPE_CHARS:
        raise InvalidRequest("the header content-type is too long")
    boundary = _parameters(content_type, "the header content-type")[1].get("boundary")
    if boundary is None:
        raise InvalidRequest("content-type has no boundary; let the HTTP library set this header")
    if len(boundary) > MAX_BOUNDARY_CHARS or _BOUNDARY.fullmatch(boundary) is None:
        raise InvalidRequest(f"the boundary in content-type must be 1 to {MAX_BOUNDARY_CHARS} letters of RFC 2046")
    return boundary.encode()


def _after_delimiter(body: bytes, at: int) -> int | None:
    """Where the part begins whose delimiter ends at `at`; None if it was the closing one."""
    if body.startswith(b"--", at):
        return None
    line_end = body.find(b"\r\n", at, at + MAX_NAME_CHARS)
    if line_end < 0 or body[at:line_end].strip(b" \t"):
        raise InvalidRequest(
            f"the boundary at byte {at} is followed by something else than a line break (CR LF) or --; "
            "it may not occur inside of a part"
        )
    return line_end + 2


def _part(head: bytes, data: memoryview, number: int) -> Part:
    where = f"part {number}"
    headers = _headers(head, where)
    kind, parameters = _parameters(headers.get("content-disposition", ""), where)
    if kind != "form-data" or not parameters.get("name"):
        raise InvalidRequest(f'{where} must have a header Content-Disposition: form-data; name="…"')
    name = parameters["name"]
    if len(name) > MAX_NAME_CHARS or _CONTROL.search(name):
        raise InvalidRequest(
            f"the name of {where} is longer than {MAX_NAME_CHARS} characters, or has control characters"
        )
    if (encoding := headers.get("content-transfer-encoding", "").strip().lower()) not in _AS_IT_IS:
        raise InvalidRequest(
            f"{name}: the transfer encoding {encoding[:40]} is not supported; send the bytes as they are"
        )
    filename = parameters.get("filename")
    if (extended := parameters.get("filename*")) is not None:
        filename = _extended(extended, name)
    if filename is not None and len(filename) > MAX_FILENAME_CHARS:
        raise InvalidRequest(f"{name}: its filename is longer than {MAX_FILENAME_CHARS} characters", param=name)
    return Part(name=name, data=data, filename=filename, content_type=headers.get("content-type", "").strip())


def _headers(head: bytes, where: str) -> dict[str, str]:
    """Names in lower case."""
    try:
        text = head.decode()
    except UnicodeDecodeError:
        raise InvalidRequest(f"the headers of {where} are not valid UTF-8") from None
    lines = text.split("\r\n") if text else []
    if len(lines) > MAX_HEADERS:
        raise InvalidRequest(f"{where} has more than {MAX_HEADERS} headers")
    found: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name = name.lower()
        if not colon or _TOKEN.fullmatch(name) is None or _CONTROL.search(value.replace("\t", " ")):
            raise InvalidRequest(f"the headers of {where} are malformed: each must be one line, Name: value")
        if name in found:
            raise InvalidRequest(f"{where} has the header {name[:MAX_NAME_CHARS]} twice")
        found[name] = value
    return found


def _parameters(value: str, where: str) -> tuple[str, dict[str, str]]:
    """`form-data; name="a"; filename="b"` → the first word in lower case, and the rest. Quotes are taken off."""
    kind = value.partition(";")[0]
    found: dict[str, str] = {}
    at = len(kind)
    while at < len(value) and value[at:].strip(" \t;"):
        match = _PARAMETER.match(value, at)
        if match is None:
            raise InvalidRequest(
                f'{where} is malformed: expected parameters such as name="…" after {kind.strip()[:40]}'
            )
        name, text = match[1].lower(), match[2]
        if name in found:
            raise InvalidRequest(f"{where} has the parameter {name[:MAX_NAME_CHARS]} twice")
        found[name] = _QUOTED_PAIR.sub(r"\1", text[1:-1]) if text[0] == '"' else text
        at = match.end()
    return kind.strip().lower(), found


def _extended(value: str, name: str) -> str:
    """RFC 5987: `UTF-8'en'%e2%82%ac%20rates.wav`."""
    charset, quote, rest = value.partition("'")
    _, second, encoded = rest.partition("'")
    if not quote or not second or charset.lower() not in ("utf-8", "iso-8859-1"):
        raise InvalidRequest(f"{name}: filename* must look like UTF-8''name.wav (RFC 5987)", param=name)
    try:
        return unquote_to_bytes(encoded).decode(charset)
    except UnicodeDecodeError:
        raise InvalidRequest(f"{name}: filename* is not valid {charset}", param=name) from None


def _text(part: Part) -> str:
    if part.filename is not None:
        raise InvalidRequest(f"{part.name} must be a field with text, not a file", param=part.name)
    if len(part.data) > MAX_TEXT_BYTES:
        raise InvalidRequest(f"{part.name} is longer than {MAX_TEXT_BYTES} bytes", param=part.name)
    try:
        return str(part.data, "utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest(f"{part.name} is not valid UTF-8", param=part.name) from None
