"""Whatever a trail lives through, it verifies; whatever is done to it behind its back, it does not."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.audit.trails import ODD_FILES, files, forge, in_time, make_chain, pending_record, put_odd
from tonle.audit import day_ledger, seal
from tonle.audit.anchor_keeper import AnchorKeeper
from tonle.audit.audit_options import KEY_NAME, AuditOptions
from tonle.audit.chain import Chain
from tonle.audit.recover import recover
from tonle.audit.retention import prune_days, redact_records, removing
from tonle.audit.signing_keys import ED25519, HMAC, PUBLIC, PUBLIC_NAME, SigningKey, load_key
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
        AnchorKeeper(AuditOptions(directory=directory), chain.key).advance()
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
            assert report.anchors or not num_records, "its end is known, and agrees"
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


def relink(path: Path, order: list[int]) -> None:
    """The lines of a ledger in another order, numbered and linked again: that needs no key."""
    lines = [line for _, line in day_ledger.read_lines(path.read_bytes())]
    first, texts = lines[0], []
    link = first.prev or day_ledger.GENESIS
    after, prev = first.after, first.prev
    first.after = first.prev = None
    for seq, index in enumerate(order, 1):
        line = lines[index]
        line.seq, line.link = seq, ""
        line.after, line.prev = (after, prev) if seq == 1 else (None, None)
        texts.append(day_ledger.link(line, link))
        link = line.link
    path.write_bytes(b"".join(texts))


def sign_again(directory: Path, forger: SigningKey) -> None:
    """Heads for everything as it is now, with a key of one's own, and its public half where the real one was."""
    for day in day_ledger.days_in(directory):
        ledger = directory / day / day_ledger.LEDGER_NAME
        lines = day_ledger.read_lines(ledger.read_bytes()) if ledger.is_file() else []
        seq, link = (lines[-1][1].seq, lines[-1][1].link) if lines else (0, day_ledger.GENESIS)
        (directory / day / day_ledger.HEAD_NAME).write_bytes(day_ledger.sign_head(forger, "day", day, seq, link))
        latest = day_ledger.sign_head(forger, "latest", day, seq, link)
        (directory / day_ledger.LATEST_NAME).write_bytes(latest)
    (directory / PUBLIC_NAME).write_text(f"{PUBLIC} {forger.public_bytes.hex()}\n")


def attack(directory: Path, name: str, where: int, odd: str) -> bool:
    """Whether anything was changed at all."""
    days = day_ledger.days_in(directory)
    day = days[where % len(days)]
    ledger = directory / day / day_ledger.LEDGER_NAME
    num_lines = len(day_ledger.read_lines(ledger.read_bytes()))
    match name:
        case "forge":
            forge(directory, edit=lambda content: content.replace(b"answer", b"forged"), replace_secret=bool(where % 2))
        case "delete":
            paths = sorted(path for path in directory.glob("*-*-*/*"))
            paths[where % len(paths)].unlink()
        case "delete day":
            shutil.rmtree(directory / day)
        case "reorder":
            relink(ledger, [(index + 1) % num_lines for index in range(num_lines)])
            return num_lines > 1
        case "drop line":
            gone = where % num_lines
            gone_file = day_ledger.read_lines(ledger.read_bytes())[gone][1].file
            relink(ledger, [index for index in range(num_lines) if index != gone])
            (directory / day / str(gone_file)).unlink()
        case "swap days":
            other = days[(where + 1) % len(days)]
            (directory / day).rename(directory / "x")
            if other != day:
                (directory / other).rename(directory / day)
            (directory / "x").rename(directory / other)
            return other != day
        case "odd":
            paths = sorted([*directory.glob("*-*-*/*"), *directory.glob("*-*-*"), directory / day_ledger.LATEST_NAME])
            put_odd(paths[where % len(paths)], odd)
    return True


ATTACKS = ("forge", "delete", "delete day", "reorder", "drop line", "swap days", "odd")


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    name=st.sampled_from(ATTACKS),
    where=st.integers(0, 10_000),
    odd=st.sampled_from(ODD_FILES),
    resign=st.booleans(),
)
@settings(max_examples=120, deadline=None)
def test_any_attack_is_found_by_who_knows_the_key(
    sizes: list[int], name: str, where: int, odd: str, resign: bool
) -> None:
    """Also if everything is signed again by the attacker. There is always a verdict."""
    directory = Path(tempfile.mkdtemp())
    try:
        chain = make_chain(directory)
        for day, size in zip(DAYS, sizes, strict=False):
            chain.append([pending_record(day, output=f"answer {number}") for number in range(size)])
            chain.sign()
        assert verify(directory, remember=True).ok  # the key and the end of the chain are known from now on
        changed = attack(directory, name, where, odd)
        if resign and name != "odd":
            sign_again(directory, SigningKey(ED25519, b"x" * 32))
            changed = True
        report = in_time(lambda: verify(directory))
        assert report.ok != changed, (report.findings, name)
    finally:
        shutil.rmtree(directory)


@given(
    before=st.integers(1, 4),
    after=st.integers(1, 4),
    restarts=st.integers(0, 2),
    more=st.integers(0, 9),
    days=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_a_rollback_is_found_whatever_comes_after_it(
    before: int, after: int, restarts: int, more: int, days: bool
) -> None:
    """The real key signs on, from an earlier copy of the last day."""
    directory = Path(tempfile.mkdtemp())
    try:
        chain = make_chain(directory)
        if days:
            chain.append([pending_record(DAYS[0])])
        chain.append([pending_record(DAYS[1]) for _ in range(before)])
        chain.sign()
        copy = {path: path.read_bytes() for path in (directory / DAYS[1]).iterdir()}
        chain.append([pending_record(DAYS[1]) for _ in range(after)])
        chain.sign()
        assert verify(directory, remember=True).ok
        shutil.rmtree(directory / DAYS[1])
        (directory / DAYS[1]).mkdir()
        for path, content in copy.items():
            path.write_bytes(content)
        for _ in range(restarts):
            recover(chain := Chain(directory, load_key(directory / KEY_NAME)))
            chain.append([pending_record(DAYS[2]) for _ in range(more)])
            chain.sign()
        assert "rollback" in {finding.problem for finding in verify(directory, remember=True).findings}
    finally:
        shutil.rmtree(directory)
