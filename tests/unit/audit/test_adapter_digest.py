"""The content of the adapter that computed an answer: written, found, exported; absent from older trails, which stay valid."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest

from tests.unit.audit.test_middleware import Server, call, whole_reply, wrap
from tests.unit.audit.test_writer_process import apart
from tests.unit.audit.trails import CHAT, ask, files, records, running
from tonle.audit import export, pending
from tonle.audit.index import INDEX_NAME, Index, Query
from tonle.audit.record_file import read_record
from tonle.audit.verify import verify
from tonle.errors import InvalidRequest

A, B = "a" * 64, "0" * 62 + "11"


def answer(trail: Any, name: str, digest: Any) -> None:
    record = trail.open(CHAT, body=b'{"model": "x"}')
    record.note(adapter=name, adapter_digest=digest)
    record.close("ok", http_status=200, output="hi")


@pytest.mark.parametrize("start", [running, apart], ids=["thread", "process"])
def test_written_found_and_exported(tmp_path: Path, start: Any) -> None:
    with start(tmp_path, redact=("email", "phone", "card")) as trail:
        answer(trail, "khmer-qa", A)
        answer(trail, "khmer-qa", B)  # all digits: no pattern takes it for a number
        answer(trail, "other", A)
        ask(trail)
    assert [record["adapter_digest"] for record in records(tmp_path)] == [A, B, A, None]
    assert verify(tmp_path).ok
    with Index(tmp_path) as index:
        found = {wanted: [row.adapter_digest for row in index.find(Query(adapter=wanted))]
                 for wanted in ("khmer-qa", f"sha256:{A}", "sha256:" + "f" * 64)}  # fmt: skip
    assert found == {"khmer-qa": [A, B], f"sha256:{A}": [A, A], "sha256:" + "f" * 64: []}
    table = io.StringIO()
    export.write_csv((read_record(path) for path in files(tmp_path)), table)
    rows = list(csv.DictReader(io.StringIO(table.getvalue())))
    assert [row["adapter_digest"] for row in rows] == [A, B, A, ""]


def test_the_first_digits_of_a_digest_find_it(tmp_path: Path) -> None:
    with running(tmp_path) as trail:
        answer(trail, "one", A)
        answer(trail, "two", "a" * 16 + "0" * 48)
        answer(trail, "three", B)
        ask(trail)
    with Index(tmp_path) as index:

        def found(digits: str) -> list[str | None]:
            return [row.adapter for row in index.find(Query(adapter=f"sha256:{digits}"))]

        assert found("a" * 16) == found("A" * 8) == ["one", "two"]
        assert (found("a" * 17), found("0" * 8), found("f" * 8)) == (["one"], ["three"], [])
        for wrong in ("", "a" * 7, "a" * 65, "a" * 8 + "*", "aaaaaaa?", "khmer-qa"):
            with pytest.raises(InvalidRequest, match="at least 8"):
                found(wrong)


@pytest.mark.parametrize("odd", ["dara@example.org", A.upper(), A + "a", 7, {"x": A}, ["x"]])
def test_nothing_but_a_digest_is_written_there(tmp_path: Path, odd: Any) -> None:
    with running(tmp_path, redact=("email",)) as trail:
        answer(trail, "khmer-qa", odd)
    [record] = records(tmp_path)
    assert record["adapter_digest"] is None and verify(tmp_path).ok


def test_a_trail_from_before_is_still_valid_and_searchable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = pending.document

    def as_before(*args: Any, **options: Any) -> dict[str, Any]:
        fields = document(*args, **options)
        del fields["adapter_digest"]
        return fields

    monkeypatch.setattr(pending, "document", as_before)
    with running(tmp_path) as trail:
        answer(trail, "khmer-qa", A)
    monkeypatch.undo()
    assert "adapter_digest" not in records(tmp_path)[0] and verify(tmp_path).ok
    with Index(tmp_path):
        pass
    import sqlite3

    with sqlite3.connect(tmp_path / INDEX_NAME) as database:
        database.execute("PRAGMA user_version = 1")  # of an older Tonle: it is built again
    with running(tmp_path) as trail:
        answer(trail, "khmer-qa", B)
    assert verify(tmp_path).ok
    with Index(tmp_path) as index:
        assert index.num_added == 2
        assert [row.adapter_digest for row in index.find(Query(adapter="khmer-qa"))] == [None, B]


def test_the_middleware_takes_it_from_the_reply_and_looks_again_after_a_load(tmp_path: Path) -> None:
    server = Server(whole_reply(), content_type="application/json")
    headers: list[tuple[bytes, bytes]] = []

    async def with_header(scope: Any, receive: Any, send: Any) -> None:
        async def more(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *headers]}
            await send(message)

        await server(scope, receive, more)

    app = wrap(with_header, tmp_path)
    call(app)  # not an adapter yet
    server.models = {"data": [{"id": "river", "parent": "base"}]}
    call(app, {"lora_name": "river"}, "/v1/load_lora_adapter")
    call(app)
    for digest in (A, B, "nonsense"):
        headers[:] = [(b"X-Tonle-Adapter", f"river@sha256:{digest}".encode())]
        call(app)
    app.close()
    told = [(record["adapter"], record["adapter_digest"]) for record in records(tmp_path)]
    assert told == [(None, None), ("river", None), ("river", A), ("river", B), ("river", None)]
    assert verify(tmp_path).ok
