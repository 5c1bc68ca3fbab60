"""Masking reaches every field that a caller has a part in, in whatever form the words come."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.unit.audit.test_hostile_records import deep_list
from tests.unit.audit.test_writer_process import apart
from tests.unit.audit.trails import CHAT, each_and_all, files, records, running
from tonle.audit import Answer, AuditTrail, BodySummary
from tonle.audit.redaction import Redactor
from tonle.audit.verify import verify
from tonle.protocol.answers import Choice

MAIL = "dara@example.org"
ESCAPED = r"dara\u0040example.org"
TRAILS = pytest.mark.parametrize("start", [running, apart], ids=["thread", "process"])


def on_disk(folder: Path) -> str:
    """All that was written, also in the files of open requests, with escapes taken out three times over."""
    text = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file()).decode(errors="replace")
    for _ in range(3):
        text = text.replace("\\\\", "\\").replace(r"\u0040", "@")
    return text


FIELDS = ("model", "route", "warnings", "client", "request_id", "response_id", "error", "usage", "cache", "experiment",
          "adapter", "model_config", "finish_reason", "key_id", "output")  # fmt: skip


def masked_field(trail: AuditTrail, tmp_path: Path, field: str) -> None:
    value: Any = {"route": {"why": MAIL, MAIL: 1}, "warnings": [f"{MAIL}: unknown field"], "usage": {"x": [MAIL]},
                  "error": {"message": f"there is no model '{MAIL}'"}, "cache": {"request_id": MAIL},
                  "experiment": {"arm": MAIL}, "model_config": {"root": MAIL}}.get(field, f"my {MAIL}")  # fmt: skip
    asked = {field: value} if field in ("client", "request_id") else {}
    record = trail.open(CHAT, body=b"{}", **asked)
    closing = {field: value} if field in ("error", "usage", "response_id", "finish_reason", "output") else {}
    if not asked and not closing:
        record.note(**{field: value})
    assert MAIL not in on_disk(tmp_path)
    record.close("refused", http_status=404, **closing)
    assert trail.flush(60)
    assert MAIL not in on_disk(tmp_path)


@pytest.mark.parametrize(("start", "fields"), each_and_all(running, apart, FIELDS))
def test_every_field_is_masked(tmp_path: Path, start: Any, fields: list[str]) -> None:
    with start(tmp_path, redact=("email",)) as trail:
        for field in fields:
            masked_field(trail, tmp_path, field)
    written = records(tmp_path)
    assert len(written) == len(fields)
    for field, record in zip(fields, written, strict=True):
        assert "[email]" in json.dumps(record[field]) or field == "usage"
    assert verify(tmp_path).ok


BODIES = {
    "malformed": rf'{{"prompt": "I am {ESCAPED}", ',
    "malformed, no quotes": rf"{{prompt: {ESCAPED} }}",
    "letters escaped": r'{"prompt": "\u0064ara@example\u002eorg", ',
    "a name": rf'{{"{ESCAPED}": 1}}',
    "user": rf'{{"user": "{ESCAPED}", "prompt": "x"}}',
    "metadata": rf'{{"metadata": {{"{ESCAPED}": "{ESCAPED}"}}, "prompt": "x"}}',
    "arguments": json.dumps({"messages": [{"role": "assistant", "tool_calls": [
        {"function": {"name": "mail", "arguments": rf'{{"to": "{ESCAPED}"}}'}}]}]}),
    "arguments in a malformed body": json.dumps({"arguments": rf'{{"to": "{ESCAPED}"}}'})[:-1],
    "a list": rf'["{ESCAPED}"]',
    "deep": '{"x":' + "[" * 110 + f'"{ESCAPED}"' + "]" * 110 + "}",
    "too deep": '{"x":' + "[" * 600 + f'"{ESCAPED}"' + "]" * 600 + "}",
    "deeper than a parser goes": '{"x":' + "[" * 3000 + f'"{ESCAPED}"' + "]" * 3000 + "}",
    "sampling": rf'{{"stop": ["{ESCAPED}"], "prompt": "x"}}',
    "model": rf'{{"model": "{ESCAPED}", "prompt": "x"}}',
}  # fmt: skip


@pytest.mark.parametrize(("start", "names"), each_and_all(running, apart, BODIES))
def test_escapes_of_json_are_masked_too(tmp_path: Path, start: Any, names: list[str]) -> None:
    with start(tmp_path, redact=("email",)) as trail:
        for name in names:
            trail.open(CHAT, body=BODIES[name].encode()).close("ok", http_status=200)
    assert MAIL not in on_disk(tmp_path)
    written = records(tmp_path)
    assert len(written) == len(names)
    for record in written:
        assert "[email]" in json.dumps(record)
        assert "could not be recorded" not in json.dumps(record)
    assert verify(tmp_path).ok


@pytest.mark.parametrize(("start", "depths"), each_and_all(running, apart, [100, 400, 499, 500, 600, 900]))
def test_no_depth_hides_a_prompt(tmp_path: Path, start: Any, depths: list[int]) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "secret plan"}], "x": "@@"})
    with start(tmp_path, redact=("email",)) as trail:
        for depth in depths:
            deep = body.replace('"@@"', "[" * depth + "]" * depth)
            trail.open(CHAT, body=deep.encode()).close("ok", http_status=200, output="answered")
    written = records(tmp_path)
    assert len(written) == len(depths)
    for record in written:
        assert (record["user_input"], record["output"]) == ("secret plan", "answered")
        assert record["warnings"] is None


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "utf-7"])
def test_what_cannot_be_searched_is_kept_as_hash_and_length(tmp_path: Path, encoding: str) -> None:
    raw = f'{{"prompt": "{MAIL}"'.encode(encoding)
    with running(tmp_path, redact=("email",)) as trail:
        trail.open(CHAT, body=raw).close("refused", http_status=400)
    [record] = records(tmp_path)
    if encoding == "utf-7":  # is ASCII
        assert record["parameters"]["body"].startswith("+AHsAI") or "[email]" in record["parameters"]["body"]
    else:
        told = record["parameters"]["body"]
        assert (told["received_bytes"], told["first"], len(told["sha256"])) == (len(raw), None, 64)


def test_what_a_cut_goes_through_is_left_out(tmp_path: Path) -> None:
    first = (b"x " * 1100)[: 2048 - 8] + MAIL.encode()[:8]
    with running(tmp_path, redact=("email",)) as trail:
        record = trail.open(CHAT, unread=BodySummary(9000, 9000, first, "00" * 32))
        record.close("refused", http_status=401)
    [record] = records(tmp_path)
    assert len(record["parameters"]["body"]["first"]) > 1000
    assert "dara" not in on_disk(tmp_path)


def test_masked_names_keep_their_values() -> None:
    counts: Counter[str] = Counter()
    masked = Redactor(("email",)).mask({"a@b.org": 1, "c@d.org": 2, "x": {"e@f.org": 3}}, counts)
    assert masked == {"[email]": 1, "[email] 2": 2, "x": {"[email]": 3}}
    assert counts == {"email": 3}


def test_masking_is_not_recursive() -> None:
    counts: Counter[str] = Counter()
    masked = Redactor(("email",)).mask([deep_list(50_000), MAIL], counts)
    assert masked[1] == "[email]"
    untouched = deep_list(50_000)
    assert Redactor(("email",)).mask(untouched, counts) is untouched


def test_ids_that_were_drawn_are_not_taken_for_numbers(tmp_path: Path) -> None:
    drawn = "req-012345678901234567890123"
    with running(tmp_path, redact=("all",)) as trail:
        trail.open(CHAT, request_id=drawn, client="203.0.113.7").close("ok", http_status=200)
    [record] = records(tmp_path)
    assert (record["request_id"], record["client"]) == (drawn, "[ipv4]")


def test_a_rule_for_one_field_may_name_any_of_them(tmp_path: Path) -> None:
    with running(tmp_path, redact=("model:email",)) as trail:
        trail.open(CHAT, body=json.dumps({"model": MAIL, "prompt": MAIL}).encode()).close("ok", http_status=200)
    [record] = records(tmp_path)
    assert (record["model"], record["prompt"]) == ("[email]", MAIL)


def test_lost_requests_are_named_under_the_same_rules(tmp_path: Path) -> None:
    with running(tmp_path, redact=("email",)) as trail:
        trail._lose([trail.open(CHAT, request_id=f"{MAIL}-1")], "for the test")
        trail._open.clear()
    assert MAIL not in on_disk(tmp_path)
    assert "[email]" in on_disk(tmp_path)


def test_tool_calls_in_answers_are_masked(tmp_path: Path) -> None:
    call = {"function": {"name": "mail", "arguments": rf'{{"to": "{ESCAPED}"}}'}}
    with running(tmp_path, redact=("email",)) as trail:
        answer = Answer(choices={0: Choice(tool_calls={0: call})})
        trail.open(CHAT, body=b"{}").close("ok", http_status=200, answer=answer)
    assert MAIL not in on_disk(tmp_path)
    assert "[email]" in files(tmp_path)[0].read_text()
