"""Whatever a trail lives through, it verifies; whatever is done to it behind its back, it does not."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.audit.trails import files, make_chain, pending_record
from tonle.audit import day_ledger, seal
from tonle.audit.audit_options import KEY_NAME
from tonle.audit.chain import Chain
from tonle.audit.recover import recover
from tonle.audit.retention import prune_days, redact_records, removing
from tonle.audit.signing_keys import HMAC, SigningKey, load_key
from tonle.audit.verify import verify

DAYS = [f"2025-03-{day:02d}" for day in range(1, 8)]
KEY = SigningKey(HMAC, b"k" * 32)

json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(content=json_values, words=st.text(), names=st.lists(st.sampled_from(seal.SEALED), unique=True, max_size=4))
@settings(max_examples=150, deadline=None)
def test_a_seal_holds_whatever_the_record_says(content: Any, words: str, names: list[str]) -> None:
    document: dict[str, Any] = dict.fromkeys(seal.SEALED, content) | {"model": words, "facts": content}
    sealed, number = seal.seal(seal.encode_fields(document), KEY, seq=3, prev="0" * 64, file="x.json")
    assert seal.check(sealed) == number
    assert seal.is_ours(sealed, KEY)
    for name in names:  # one after the other
        sealed = seal.redact(sealed, {name: "[redacted]"}, reason=words, time="now")
        assert seal.check(sealed) == number


steps = st.one_of(
    st.tuples(st.just("write"), st.integers(1, 4)),
    st.tuples(st.just("next day"), st.integers(1, 2)),
    st.tuples(st.just("crash"), st.sampled_from(["file", "line", "half"])),
    st.tuples(st.just("restart"), st.just(0)),
    st.tuples(st.just("redact"), st.integers(0, 30)),
    st.tuples(st.just("prune"), st.just(0)),
)


def crash(chain: Chain, directory: Path, day: str, stage: str) -> None:
    """Write a record up to some point and forget that we did."""
    path = chain.ledger(day)
    before = path.read_bytes() if path.exists() else b""
    chain.append([pending_record(day)])
    newest = str(chain.tail.day)
    path = chain.ledger(newest)
    if newest != day:
        return  # the trail is ahead of this clock; the line stays, unsigned
    whole = path.read_bytes()
    kept = {"file": before, "line": whole, "half": whole[: (len(before) + len(whole)) // 2]}[stage]
    path.write_bytes(kept)


def live(directory: Path, script: list[tuple[str, Any]]) -> int:
    """Run the script; returns how many records there must be, at least until days are pruned."""
    chain, day, num_records = make_chain(directory), 0, 0
    for action, detail in script:
        if action == "write":
            chain.append([pending_record(DAYS[day % 7], output=str(number)) for number in range(detail)])
            chain.sign()
            num_records += detail
        elif action == "next day":
            day = min(day + detail, 6)
        elif action == "crash":
            crash(chain, directory, max(DAYS[day], chain.tail.day or ""), detail)
            num_records += 1
        elif action == "redact" and (found := files(directory)):
            recover(chain := Chain(directory, load_key(directory / KEY_NAME)))
            redact_records(chain, [found[detail % len(found)]], removing(["output", "messages"]), reason="test")
        elif action == "prune":
            recover(chain := Chain(directory, load_key(directory / KEY_NAME)))
            for gone in day_ledger.days_in(directory)[:-1]:
                if gone < "2025-03-03":
                    num_records -= len(files(directory, gone))
            keep = _days_since("2025-03-03")
            prune_days(chain, keep)
        if action in ("crash", "restart"):
            recover(chain := Chain(directory, load_key(directory / KEY_NAME)))
    return num_records


def _days_since(day: str) -> int:
    from datetime import date

    return (date.fromisoformat(day_ledger.today()) - date.fromisoformat(day)).days


@given(script=st.lists(steps, max_size=12))
@settings(max_examples=40, deadline=None)
def test_a_trail_verifies_after_any_life(script: list[tuple[str, Any]]) -> None:
    directory = Path(tempfile.mkdtemp())
    try:
        num_records = live(directory, script)
        if day_ledger.days_in(directory):
            report = verify(directory)
            assert report.ok, report.findings
            assert report.num_records == num_records
    finally:
        shutil.rmtree(directory)


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    damage=st.sampled_from(["flip", "delete", "swap", "cut", "add"]),
    where=st.integers(0, 10_000),
)
@settings(max_examples=60, deadline=None)
def test_any_damage_is_found(sizes: list[int], damage: str, where: int) -> None:
    directory = Path(tempfile.mkdtemp())
    try:
        chain = make_chain(directory)
        for day, size in zip(DAYS, sizes, strict=False):
            chain.append([pending_record(day, output=str(number)) for number in range(size)])
            chain.sign()
        # Everything in a day is covered, heads and ledgers too.
        targets = sorted(
            path for path in directory.glob("*-*-*/*") if damage not in ("swap", "cut") or "_" in path.name
        )
        path = targets[where % len(targets)]
        match damage:
            case "flip":
                content = bytearray(path.read_bytes().rstrip())  # a head ends in blanks that say nothing
                content[where % len(content)] ^= 1
                path.write_bytes(content)
            case "delete":
                path.unlink()
            case "swap":
                other = targets[(where + 1) % len(targets)]
                one, two = path.read_bytes(), other.read_bytes()
                path.write_bytes(two)
                other.write_bytes(one)
            case "cut":
                lines = chain.ledger(path.parent.name).read_bytes().splitlines(keepends=True)
                chain.ledger(path.parent.name).write_bytes(b"".join(lines[:-1]))
            case "add":
                shutil.copy(path, path.with_name("copy_of_" + path.name))
        assert verify(directory).ok == (damage == "swap" and len(targets) == 1)
    finally:
        shutil.rmtree(directory)
