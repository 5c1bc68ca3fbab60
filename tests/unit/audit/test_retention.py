"""Forgetting keeps the chain whole: redaction by field and by pattern, pruning of days and of words."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.unit.audit.trails import BODY, ask, files, make_chain, pending_record, records, running, write_days
from tonle.audit import day_ledger, seal
from tonle.audit.redaction import BUILT_IN, Redactor
from tonle.audit.retention import masking, old_days, prune_days, redact_records, removing
from tonle.audit.signing_keys import HMAC, SigningKey
from tonle.audit.verify import verify
from tonle.errors import InvalidRequest

KEY = SigningKey(HMAC, b"k" * 32)


@pytest.mark.parametrize("name", seal.SEALED)
def test_any_sealed_field_can_go(tmp_path: Path, name: str) -> None:
    chain = write_days(tmp_path, {"2025-01-31": 3})
    path = files(tmp_path)[1]
    before = json.loads(path.read_text())
    changed = redact_records(chain, [path], removing([name]), reason="asked")
    assert changed == ([path] if before[name] is not None else [])
    after = json.loads(path.read_text())
    assert after["chain"]["hash"] == before["chain"]["hash"]
    report = verify(tmp_path)
    assert report.ok, report.findings
    if changed:
        assert after[name] == "[redacted]"
        assert after["chain"]["redacted"][name]["reason"] == "asked"
        assert "salt" not in after["chain"]
        assert name not in after["chain"]["salts"], "with it, a short value could be guessed from its digest"
        assert report.num_redacted == 1
    others = {field: value for field, value in before.items() if field not in (name, "chain")}
    assert {field: after[field] for field in others} == others


def test_fields_can_go_one_after_the_other(tmp_path: Path) -> None:
    chain = write_days(tmp_path, {"2025-01-31": 2})
    for name in ("user_input", "messages", "output", "user_input"):
        redact_records(chain, files(tmp_path), removing([name]), reason="asked")
        report = verify(tmp_path)
        assert report.ok, report.findings
    assert "dara" not in "".join(path.read_text() for path in files(tmp_path))


def test_a_redaction_covers_up_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even the holder of the key cannot change another field along with a redaction."""
    chain = write_days(tmp_path, {"2025-01-31": 2})
    path = files(tmp_path)[0]
    honest = seal.redact

    def dishonest(content: bytes, *args: Any, **facts: Any) -> bytes:
        return honest(content, *args, **facts).replace(b"river", b"ocean")

    monkeypatch.setattr("tonle.audit.retention.redact", dishonest)
    redact_records(chain, [path], removing(["output"]), reason="asked")
    [finding] = verify(tmp_path).findings
    assert (finding.problem, finding.file) == ("edited", f"2025-01-31/{path.name}")


def test_facts_cannot_be_redacted() -> None:
    content, _ = seal.seal(pending_record("2025-01-31").fields, KEY, seq=1, prev="0" * 64, file="x")
    with pytest.raises(InvalidRequest, match="model cannot be redacted"):
        seal.redact(content, {"model": None}, reason="", time="")


def test_masking_after_the_fact(tmp_path: Path) -> None:
    with running(tmp_path) as trail:
        ask(trail)
        ask(trail, body={"prompt": "nothing personal"}, output="none")
    chain = make_chain(tmp_path)
    changed = redact_records(chain, files(tmp_path), masking(Redactor(["email"])), reason="gdpr")
    assert len(changed) == 1
    assert records(tmp_path)[0]["messages"][1]["content"].endswith("I am at [email]")
    report = verify(tmp_path)
    assert report.ok, report.findings


def test_whole_days_go_and_the_chain_holds(tmp_path: Path) -> None:
    days = {"2025-01-30": 2, "2025-01-31": 3, "2025-02-01": 1}
    chain = write_days(tmp_path, days)
    chain.append([pending_record(day_ledger.today())])
    chain.sign()
    assert prune_days(chain, 1) == list(days)
    assert day_ledger.days_in(tmp_path) == [day_ledger.today()]
    report = verify(tmp_path)
    assert report.ok, report.findings
    assert report.num_records == 1
    assert [note.split(":")[0] for note in report.notes] == list(days)
    assert prune_days(chain, 1) == []


def test_only_some_days_go(tmp_path: Path) -> None:
    days = ("2025-01-30", "2025-01-31", "2025-02-01")
    write_days(tmp_path, dict.fromkeys(days, 1))
    assert old_days(tmp_path, 1, today="2025-02-01") == [days[0]]
    assert old_days(tmp_path, 30, today="2025-02-01") == []
    assert old_days(tmp_path, 1, today="2026-01-01") == list(days[:2]), "the newest always stays"


def test_a_trail_prunes_itself(tmp_path: Path) -> None:
    write_days(tmp_path, {"2025-01-30": 2, "2025-01-31": 3})
    with running(tmp_path, retention_days=30) as trail:
        ask(trail)
    assert "2025-01-30" not in day_ledger.days_in(tmp_path)
    assert verify(tmp_path).ok


def test_words_can_go_and_facts_stay(tmp_path: Path) -> None:
    chain = write_days(tmp_path, {"2025-01-30": 2})
    redact_records(chain, files(tmp_path), removing(seal.CONTENT), reason="older than 30 days")
    for record in records(tmp_path):
        assert record["usage"]["total_tokens"] == 16
        assert record["model"] == "river"
        assert record["messages"] == "[redacted]"
        assert "សួស្តី" not in json.dumps(record, ensure_ascii=False)
    assert verify(tmp_path).ok


@pytest.mark.parametrize(
    ("name", "text", "masked"),
    [
        ("email", "write to a.b+c@mail.example.co.uk.", "write to [email]."),
        ("email", "no @ here, nor a@b", None),
        ("card", "pay 4111 1111 1111 1111 now", "pay [card] now"),
        ("card", "4111-1111-1111-1112 fails its check digit", None),
        ("card", "order 1234567890123456", None),
        ("iban", "to GB82 WEST 1234 5698 7654 32 please", "to [iban] please"),
        ("iban", "DE89370400440532013000", "[iban]"),
        ("iban", "DE89370400440532013001", None),
        ("ipv4", "from 192.168.0.1:80", "from [ipv4]:80"),
        ("ipv4", "version 1.2.3.4.5 and 300.1.1.1", None),
        ("phone", "call +855 12 345 678!", "call [phone]!"),
        ("phone", "call 012 345 678", "call [phone]"),
        ("phone", "+1 (555) 123-4567", "[phone]"),
        ("phone", "in 2025 we had 1000000 users", None),
        ("ssn", "ssn 078-05-1120.", "ssn [ssn]."),
        ("secret", "key sk-abcdefghijklmnop1234", "key [secret]"),
    ],
)
def test_built_in_patterns(name: str, text: str, masked: str | None) -> None:
    assert Redactor([name]).mask(text, Counter()) == (masked or text)


def test_masking_reaches_every_string_and_leaves_the_rest() -> None:
    value = {"a": [1, None, "x@y.org", {"b": "x@y.org"}], "c": 1.5}
    counts: Counter[str] = Counter()
    assert Redactor(["all"]).mask(value, counts) == {"a": [1, None, "[email]", {"b": "[email]"}], "c": 1.5}
    assert counts == {"email": 2}
    assert Redactor(["all"]).mask(BODY["tools"], counts) is BODY["tools"]
    assert len(BUILT_IN) >= 6
    assert not Redactor([])
