"""Forms and sound files from callers: bytes that are almost right, and what is wrong is always explained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.target import FunctionTarget
from tonle.errors import InvalidRequest
from tonle.protocol.multipart import parse_form, with_field
from tonle.workers.endpoints.transcriptions import read_form

_PIECES = st.sampled_from([
    b"--b", b"--b--", b"\r\n", b"\r\n\r\n", b"\n", b"--", b"Content-Disposition: form-data; ", b'name="file"; filename="a"',
    b'name="model"', b"name=stream", b"true", b"filename*=UTF-8''%41", b'name="', b"\\", b'"', b";", b"\xff", b"\x00",
    b"--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"x\"\r\n\r\n1\r\n",
    b"--b\r\nContent-Disposition: form-data; name=\"temperature\"\r\n\r\nnan\r\n",
    b"--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n", b"Content-Type: a/b", b"x" * 300,
])  # fmt: skip
_HEADERS = st.sampled_from([
    "multipart/form-data; boundary=b", 'multipart/form-data; boundary="b"', "multipart/form-data",
    "multipart/form-data; boundary=",
    "multipart/form-data; boundary=b; boundary=c", 'multipart/form-data; boundary="', "text/plain", "",
])  # fmt: skip


def _check(case: Any, _folder: Path) -> str:
    pieces, header = case
    try:
        form = parse_form(b"".join(pieces), header)
    except InvalidRequest as error:
        assert len(error.message) < 500
        return "refused"
    try:
        again = parse_form(with_field(form, "model", "other"), header)
        assert again.text("model") == "other"
        assert [bytes(part.data) for part in again.parts if part.name != "model"] == [
            bytes(part.data) for part in form.parts if part.name != "model"
        ]
        read_form(form, translate=False)
    except InvalidRequest:
        return "refused later"
    return "read"


FORM_TARGETS = [
    FunctionTarget("forms", 20, st.tuples(st.lists(_PIECES | st.binary(max_size=4), max_size=12), _HEADERS), _check)
]
