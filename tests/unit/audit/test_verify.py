"""Whatever is done to a trail behind its back, `verify` finds it and names the file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.unit.audit.trails import files, make_chain, pending_record, write_days
from tonle.audit import day_ledger, seal
from tonle.audit.audit_options import KEY_NAME
from tonle.audit.chain import Chain
from tonle.audit.recover import recover
from tonle.audit.signing_keys import HMAC, PUBLIC_NAME, SigningKey, load_key
from tonle.audit.verify import Finding, verify
from tonle.errors import ConfigError, NotFound

DAYS = ("2025-01-30", "2025-01-31", "2025-02-02")


@pytest.fixture
def trail(tmp_path: Path) -> Path:
    write_days(tmp_path, dict.fromkeys(DAYS, 5))
    report = verify(tmp_path)
    assert report.ok, report.findings
    assert (report.num_records, report.days) == (15, list(DAYS))
    return tmp_path


def only(directory: Path) -> Finding:
    findings = verify(directory).findings
    assert len(findings) == 1, findings
    return findings[0]


def named(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


@pytest.mark.parametrize("day", DAYS)
def test_any_flipped_byte_is_found(trail: Path, day: str) -> None:
    path = files(trail, day)[2]
    content = path.read_bytes()
    for position in range(0, len(content), 97):
        changed = bytearray(content)
        changed[position] ^= 1
        path.write_bytes(changed)
        finding = only(trail)
        assert (finding.problem, finding.file) == ("edited", named(path))
    path.write_bytes(content)
    assert verify(trail).ok


def test_an_edit_that_only_moves_white_space_is_found(trail: Path) -> None:
    path = files(trail)[0]
    path.write_text(json.dumps(json.loads(path.read_text()), indent=4, ensure_ascii=False))
    finding = only(trail)
    assert (finding.problem, finding.file) == ("edited", named(path))
    assert "layout" in finding.detail


def test_an_edit_that_fixes_its_own_hash_is_found(trail: Path) -> None:
    path = files(trail)[1]
    record = json.loads(path.read_text())
    chain = record.pop("chain")
    record["output"] = "something else"
    forger = SigningKey(HMAC, b"x" * 32)
    content, _ = seal.seal(seal.encode_fields(record), forger, seq=chain["seq"], prev=chain["prev"], file=chain["file"])
    path.write_bytes(content)
    assert only(trail).file == named(path)


@pytest.mark.parametrize("index", [0, 7, 14])
def test_a_deleted_file_is_found(trail: Path, index: int) -> None:
    path = files(trail)[index]
    path.unlink()
    finding = only(trail)
    assert (finding.problem, finding.file) == ("deleted", named(path))


def test_a_swapped_pair_is_found(trail: Path) -> None:
    one, two = files(trail, DAYS[1])[1:3]
    first = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(first)
    findings = verify(trail).findings
    assert [(finding.problem, finding.file) for finding in findings] == [
        ("swapped", named(one)),
        ("swapped", named(two)),
    ]
    assert named(two) in findings[0].detail


def test_swapped_ledger_lines_are_found(trail: Path) -> None:
    path = trail / DAYS[1] / day_ledger.LEDGER_NAME
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1], lines[2] = lines[2], lines[1]
    path.write_bytes(b"".join(lines))
    findings = verify(trail).findings
    assert {finding.problem for finding in findings} == {"reordered"}
    names = [named(path) for path in files(trail, DAYS[1])]
    assert {names[1], names[2]} <= {finding.file for finding in findings}


def test_a_changed_ledger_line_is_found(trail: Path) -> None:
    path = trail / DAYS[1] / day_ledger.LEDGER_NAME
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b'"time":"2', b'"time":"1')
    path.write_bytes(b"".join(lines))
    finding = only(trail)
    assert (finding.problem, finding.file) == ("reordered", named(files(trail, DAYS[1])[2]))


@pytest.mark.parametrize("day", DAYS)
def test_a_truncated_day_is_found(trail: Path, day: str) -> None:
    path = trail / day / day_ledger.LEDGER_NAME
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]))
    for record in files(trail, day)[3:]:
        record.unlink()
    findings = verify(trail).findings
    assert ("truncated", f"{day}/{day_ledger.LEDGER_NAME}") in {(finding.problem, finding.file) for finding in findings}


def test_a_truncated_day_stays_found_after_a_restart(trail: Path) -> None:
    path = trail / DAYS[-1] / day_ledger.LEDGER_NAME
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
    for record in files(trail, DAYS[-1])[3:]:
        record.unlink()
    chain = make_chain(trail)  # a server that starts
    chain.append([pending_record("2025-02-03")])
    chain.sign()
    finding = only(trail)
    assert (finding.problem, finding.file) == ("truncated", f"{DAYS[-1]}/{day_ledger.LEDGER_NAME}")
    assert "2 signed lines after seq 3" in finding.detail


@pytest.mark.parametrize("restart", [False, True])
def test_a_head_that_is_gone_is_found(trail: Path, restart: bool) -> None:
    path = trail / DAYS[-1] / day_ledger.LEDGER_NAME
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
    for record in files(trail, DAYS[-1])[3:]:
        record.unlink()
    (trail / DAYS[-1] / day_ledger.HEAD_NAME).unlink()
    if restart:
        make_chain(trail)
    assert not verify(trail).ok


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("with_latest", [False, True])
def test_the_last_day_cut_off_is_found(trail: Path, restart: bool, with_latest: bool) -> None:
    shutil.rmtree(trail / DAYS[-1])
    if not with_latest:
        (trail / day_ledger.LATEST_NAME).unlink()
    if restart:
        chain = make_chain(trail)
        chain.append([pending_record("2025-02-03")])
        chain.sign()
    assert {finding.problem for finding in verify(trail).findings} == {"day"}


def test_a_day_taken_out_of_the_middle_is_found(trail: Path) -> None:
    shutil.rmtree(trail / DAYS[1])
    finding = only(trail)
    assert (finding.problem, finding.file) == ("day", DAYS[1])


def test_a_head_of_another_key_is_found(trail: Path) -> None:
    forger = SigningKey(HMAC, b"x" * 32)
    path = trail / DAYS[0] / day_ledger.HEAD_NAME
    head = day_ledger.read_head(path)
    assert head is not None
    path.write_bytes(day_ledger.sign_head(forger, "day", head.day, head.seq, head.link))
    finding = only(trail)
    assert (finding.problem, finding.file) == ("signature", f"{DAYS[0]}/{day_ledger.HEAD_NAME}")


def test_a_day_head_is_no_latest_head(trail: Path) -> None:
    shutil.rmtree(trail / DAYS[-1])
    shutil.copy(trail / DAYS[1] / day_ledger.HEAD_NAME, trail / day_ledger.LATEST_NAME)
    finding = only(trail)
    assert (finding.problem, finding.file) == ("signature", day_ledger.LATEST_NAME)


@pytest.mark.parametrize("restart", [False, True])
def test_a_foreign_file_is_found_and_never_adopted(trail: Path, restart: bool) -> None:
    path = trail / DAYS[-1] / "chat_completions_00000000_20250202T000000000000Z.json"
    record = json.loads(files(trail)[-1].read_text())
    chain = record.pop("chain")
    forger = SigningKey(HMAC, b"x" * 32)
    fields = seal.encode_fields(record)
    content, _ = seal.seal(fields, forger, seq=chain["seq"] + 1, prev=chain["hash"], file=path.name)
    path.write_bytes(content)
    if restart:
        recover(make_chain(trail))
    finding = only(trail)
    assert (finding.problem, finding.file) == ("foreign", named(path))


def test_forged_lines_after_the_head_are_not_signed_by_a_restart(trail: Path) -> None:
    """Links need no key; only what the key's holder wrote may be taken over after a crash."""
    path = trail / DAYS[-1] / day_ledger.LEDGER_NAME
    last = day_ledger.read_lines(path.read_bytes())[-1][1]
    forged = day_ledger.LedgerLine(seq=last.seq + 1, kind="pruned", time=last.time, day=DAYS[0], hash="0" * 64)
    with path.open("ab") as file:
        file.write(day_ledger.link(forged, last.link))
    assert only(trail).problem == "signature"
    notes = recover(reopen(trail))
    assert "cut" in notes
    report = verify(trail)
    assert report.ok
    assert not any("removed" in note for note in report.notes)


def reopen(directory: Path) -> Chain:
    return Chain(directory, load_key(directory / KEY_NAME))


def test_a_tombstone_without_a_ledger_line_is_an_edit(trail: Path) -> None:
    path = files(trail)[3]
    path.write_bytes(seal.redact(path.read_bytes(), {"output": "gone"}, reason="", time=""))
    finding = only(trail)
    assert (finding.problem, finding.file) == ("edited", named(path))
    assert "without a ledger line" in finding.detail


def test_one_day_can_be_checked_alone(trail: Path) -> None:
    files(trail, DAYS[0])[0].unlink()
    assert verify(trail, day=DAYS[1]).ok
    assert verify(trail, day=DAYS[1]).num_records == 5
    assert not verify(trail, day=DAYS[0]).ok
    assert not verify(trail, day="2020-01-01").ok


def test_an_anchor_kept_elsewhere_shows_a_rollback(trail: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    copy = tmp_path_factory.mktemp("copy") / "audit"
    shutil.copytree(trail, copy)
    chain = make_chain(trail)
    chain.append([pending_record("2025-02-03")])
    chain.sign()
    anchor = verify(trail).last
    assert verify(trail, anchor=anchor).ok
    assert verify(copy).ok, "a whole old copy is in order by itself"
    assert [finding.problem for finding in verify(copy, anchor=anchor).findings] == ["truncated"]


def test_the_wrong_key_and_no_key(trail: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("keys")
    (trail / KEY_NAME).rename(elsewhere / "mine")
    (trail / PUBLIC_NAME).unlink(missing_ok=True)
    with pytest.raises(ConfigError, match="--key-file"):
        verify(trail)
    assert verify(trail, key_file=elsewhere / "mine").ok
    (elsewhere / "other").write_text(f"{HMAC} {'ab' * 32}\n")
    assert {finding.problem for finding in verify(trail, key_file=elsewhere / "other").findings} == {"signature"}
    (elsewhere / "nonsense").write_text("hello")
    with pytest.raises(ConfigError, match="no audit key"):
        verify(trail, key_file=elsewhere / "nonsense")


def test_nothing_to_verify_is_no_success(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        verify(tmp_path / "nowhere")
    (tmp_path / KEY_NAME).write_text(f"{HMAC} {'ab' * 32}\n")
    with pytest.raises(NotFound):
        verify(tmp_path)


def test_ed25519_lets_an_auditor_verify_without_the_secret(tmp_path: Path) -> None:
    write_days(tmp_path, {DAYS[0]: 2})
    assert load_key(tmp_path / KEY_NAME).algorithm == "ed25519"
    (tmp_path / KEY_NAME).unlink()
    public = load_key(tmp_path / PUBLIC_NAME)
    assert not public.can_sign
    assert verify(tmp_path).ok
    with pytest.raises(ConfigError):
        public.sign(b"")
