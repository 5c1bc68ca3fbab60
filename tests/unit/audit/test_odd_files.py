"""Whatever stands in place of a file, every command ends with a verdict: no hang, no traceback, bounded memory."""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.unit.audit.trails import (
    ODD_FILES,
    ask,
    files,
    forge,
    in_time,
    make_chain,
    pending_record,
    put_odd,
    running,
    write_days,
)  # fmt: skip
from tonle.audit import day_ledger, findings, regular_file, verify_ledgers
from tonle.audit.audit_options import KEY_NAME
from tonle.audit.chain import Chain
from tonle.audit.index import INDEX_NAME
from tonle.audit.recover import recover
from tonle.audit.regular_file import OddFileError, read_regular
from tonle.audit.retention import prune_days
from tonle.audit.signing_keys import PUBLIC_NAME, load_key
from tonle.audit.verify import verify
from tonle.cli.app import app

DAYS = ("2025-01-30", "2025-01-31", "2025-02-02")


def tonle(*arguments: object) -> Result:
    """As people type it; `Result.exception` is a SystemExit or nothing, never a traceback."""
    result: Result = in_time(lambda: CliRunner().invoke(app, ["audit", *map(str, arguments)]))
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    return result


@pytest.fixture
def trail(tmp_path: Path) -> Path:
    directory = tmp_path / "audit"
    directory.mkdir()
    write_days(directory, dict.fromkeys(DAYS, 3))
    assert tonle("verify", directory).exit_code == 0
    return directory


def record_of(trail: Path) -> Path:
    return files(trail, DAYS[1])[1]


PLACES: dict[str, Callable[[Path], Path]] = {
    "record": record_of,
    "ledger": lambda trail: trail / DAYS[1] / day_ledger.LEDGER_NAME,
    "last ledger": lambda trail: trail / DAYS[-1] / day_ledger.LEDGER_NAME,
    "head": lambda trail: trail / DAYS[1] / day_ledger.HEAD_NAME,
    "latest": lambda trail: trail / day_ledger.LATEST_NAME,
    "day": lambda trail: trail / DAYS[1],
    "public key": lambda trail: trail / PUBLIC_NAME,
}


@pytest.mark.parametrize("kind", ODD_FILES)
@pytest.mark.parametrize("place", PLACES)
def test_verify_ends_with_a_finding(trail: Path, place: str, kind: str) -> None:
    path = PLACES[place](trail)
    put_odd(path, kind)
    done = tonle("verify", trail)
    if (place, kind) == ("public key", "link to a file"):  # that is how secrets are mounted
        assert done.exit_code == 0
        return
    assert done.exit_code == 1
    named = done.stdout + done.stderr
    assert path.name in named or DAYS[1] in named, named


@pytest.mark.parametrize("kind", ODD_FILES)
@pytest.mark.parametrize("name", [".lock", "index.sqlite", "open", "audit.key", "2025-02-03"])
def test_verify_ends_whatever_else_is_odd(trail: Path, name: str, kind: str) -> None:
    put_odd(trail / name, kind)
    done = tonle("verify", trail)
    is_empty_day = kind == "folder"  # which a crash may leave
    assert done.exit_code == (1 if name == "2025-02-03" and not is_empty_day else 0), done.output


@pytest.mark.parametrize("kind", ODD_FILES)
def test_an_odd_orphan_is_a_finding_and_recovery_goes_on(trail: Path, kind: str) -> None:
    path = trail / DAYS[-1] / "chat_completions_00000000_20250202T000000000000Z.json"
    put_odd(path, kind)
    done = tonle("recover", trail)
    assert done.exit_code == 0, done.output
    if kind in ("fifo", "folder", "link to itself", "link to a device", "link to a file", "sparse"):
        assert f"foreign: {DAYS[-1]}/{path.name}" in tonle("verify", trail).stdout
    make_chain(trail).append([pending_record("2025-02-03")])


@pytest.mark.parametrize(
    "chain", ["5", "{}", '{"version": 1}', '{"version": 1, "seq": [], "prev": {}, "file": 7, "hash": {}, "mac": []}',
              '{"version": 1, "seq": 1, "salts": 7, "redacted": [], "hash": "x", "mac": "x"}',
              '{"version": 1, "seq": 1, "salt": 7, "prev": "", "file": "", "redacted": {"output": 5}}'])  # fmt: skip
def test_a_record_of_odd_types_is_a_finding(trail: Path, chain: str) -> None:
    orphan = trail / DAYS[-1] / "chat_completions_00000000_20250202T000000000000Z.json"
    record = json.loads(record_of(trail).read_text())
    for path in (record_of(trail), orphan):
        path.write_text(json.dumps({**record, "chain": json.loads(chain)}))
    assert tonle("recover", trail).exit_code == 0
    assert tonle("verify", trail).exit_code == 1
    for command in (["query"], ["export"], ["export", "--format", "csv"]):
        assert tonle(command[0], trail, *command[1:]).exit_code == 0


@pytest.mark.parametrize("name", ["../../../etc/hostname", "a\0b", "x" * 5000, "..", "", "/etc/hostname"])
def test_a_ledger_that_names_what_no_file_is_called(trail: Path, name: str) -> None:
    path = trail / DAYS[1] / day_ledger.LEDGER_NAME
    lines = [line for _, line in day_ledger.read_lines(path.read_bytes())]
    lines[1].file = name
    link, texts = lines[0].prev or "", []
    for line in lines:
        line.link = ""
        texts.append(day_ledger.link(line, link))
        link = line.link
    path.write_bytes(b"".join(texts))
    done = tonle("verify", trail)
    assert done.exit_code == 1 and "names a file that cannot be in the folder" in done.stdout
    assert tonle("query", trail).exit_code == 0
    assert tonle("reindex", trail).exit_code == 0


@pytest.mark.parametrize(
    "line",
    [b"\xff\xff", b"[" * 100_000, b'{"seq":' + b"9" * 5000 + b"}", b"null", b'{"seq":1}', b"\x00" * 1000,
     b'{"seq":4,"kind":"recovery","time":"","facts":{"truncated":5,"torn":7}}',
     b'{"seq":4,"kind":"recovery","time":"","facts":{"lost_day":[],"bad_head":"x"}}',
     b'{"seq":4,"kind":"gap","time":"","facts":{"lost":{"a":[]}}}',
     b'{"seq":4,"kind":"redacted","time":"","day":"../..","file":"../../x"}'])  # fmt: skip
def test_an_odd_ledger_line_is_a_finding(trail: Path, line: bytes) -> None:
    with (trail / DAYS[1] / day_ledger.LEDGER_NAME).open("ab") as file:
        file.write(line + b"\n")
    assert tonle("verify", trail).exit_code == 1
    assert tonle("query", trail).exit_code == 0


@pytest.mark.parametrize("signature", ["é" * 128, "", "zz", "f" * 10_000])
@pytest.mark.parametrize("name", [f"{DAYS[1]}/{day_ledger.HEAD_NAME}", day_ledger.LATEST_NAME])
def test_an_odd_signature_is_a_finding(trail: Path, name: str, signature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head = json.loads((trail / name).read_text())
    (trail / name).write_text(json.dumps({**head, "signature": signature}))
    assert "signature: " in tonle("verify", trail).stdout
    (trail / KEY_NAME).write_text(f"hmac-sha256 {'ab' * 32}\n")
    assert tonle("verify", trail, "--key-file", trail / KEY_NAME).exit_code == 1


def test_file_names_of_any_bytes_are_printed_harmlessly(trail: Path) -> None:
    folder = os.fsencode(trail / DAYS[1])
    for name in (b"\xff\xfe.json", b"\x1b[2Jx.json", b"a\nedited: innocent: nothing.json", "ស.json".encode()):
        with open(folder + b"/" + name, "wb"):  # noqa: PTH123 - pathlib takes no bytes
            pass
    done = tonle("verify", trail)
    assert done.exit_code == 1 and len(done.stdout.splitlines()) == 4
    assert "\x1b" not in done.stdout and "\\x" in done.stdout and "ស.json" in done.stdout
    assert "\x1b" not in tonle("verify", trail, "--json").stdout


def test_notes_are_no_markup_and_no_escape_sequences(tmp_path: Path) -> None:
    chain = write_days(tmp_path, {DAYS[0]: 1})
    from tonle.audit.chain import Event

    chain.append([Event("gap", {"facts": {"lost": "\x1b[2J[/dim][red]", "refused": "\nno findings"}})])
    chain.sign()
    done = tonle("verify", tmp_path)
    assert done.exit_code == 0 and "\x1b" not in done.stderr and "[red]" in done.stderr
    assert "\nno findings" not in done.stderr


def test_thousands_of_junk_files_are_counted_and_the_first_are_listed(
    trail: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(findings, "MAX_OF_A_KIND", 100)
    for number in range(3000):
        (trail / DAYS[0] / f"junk-{number}").touch()
    record_of(trail).unlink()
    done = tonle("verify", trail)
    assert done.exit_code == 1 and "deleted: " in done.stdout
    assert len(done.stdout.splitlines()) == 102 and "and 2,900 more" in done.stdout
    assert "3,001 findings" in done.stderr


def test_a_lock_that_is_held_for_ever_does_not_stop_verify(trail: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regular_file, "LOCK_WAIT_S", 0.05)
    fd = os.open(trail / ".lock", os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert tonle("verify", trail).exit_code == 0
    finally:
        os.close(fd)


def test_a_ledger_that_never_ends_is_read_as_far_as_its_head(trail: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_ledgers, "MAX_LINES_AFTER_HEAD", 50)
    with (trail / DAYS[1] / day_ledger.LEDGER_NAME).open("ab") as file:
        file.write(b"\n" * 10_000)
    done = tonle("verify", trail)
    assert done.exit_code == 1 and "it goes on after line 53" in done.stdout


def test_a_file_that_grows_while_it_is_read_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a" * 3000)
    monkeypatch.setattr(regular_file, "PIECE_BYTES", 1000)
    real = os.read

    def grow(fd: int, count: int) -> bytes:
        with path.open("ab") as file:
            file.write(b"b" * 2000)
        return real(fd, count)

    monkeypatch.setattr(os, "read", grow)
    assert read_regular(path, 1 << 20) == b"a" * 3000


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a device")
def test_a_device_is_not_read(tmp_path: Path) -> None:
    os.mknod(tmp_path / "zero", 0o600 | 0o020000, os.makedev(1, 5))
    with pytest.raises(OddFileError, match="a device"):
        read_regular(tmp_path / "zero", 100, follow_links=True)


LIMITED = """
import resource, sys
from pathlib import Path
from tonle.cli.app import app
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (768 << 20),) * 2)
app(["audit", *sys.argv[1:]])
"""


@pytest.mark.parametrize("place", ["record", "ledger", "head", "latest", "public key"])
def test_sparse_files_of_a_terabyte_fit_in_bounded_memory(trail: Path, place: str) -> None:
    put_odd(PLACES[place](trail), "sparse")
    command = [sys.executable, "-c", LIMITED, "verify", str(trail)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "finding" in done.stderr


def test_a_large_record_that_differs_is_named_without_being_parsed(trail: Path) -> None:
    with record_of(trail).open("ab") as file:
        file.truncate(200 << 20)
    done = tonle("verify", trail)
    assert done.exit_code == 1 and f"edited: {DAYS[1]}/{record_of_name(trail)}" in done.stdout


def record_of_name(trail: Path) -> str:
    lines = day_ledger.read_lines((trail / DAYS[1] / day_ledger.LEDGER_NAME).read_bytes())
    return str(lines[1][1].file)


# -- the other commands


@pytest.mark.parametrize("kind", ODD_FILES)
@pytest.mark.parametrize("place", ["record", "ledger", "day"])
def test_commands_over_records_pass_over_what_is_none(trail: Path, place: str, kind: str) -> None:
    assert tonle("query", trail).exit_code == 0  # with an index from before, then with a new one
    path = PLACES[place](trail)
    put_odd(path, kind)
    assert tonle("query", trail, "--json").exit_code == 0
    assert tonle("export", trail, "--format", "csv").exit_code == 0
    tonle("show", trail, path.name)
    assert tonle("head", trail).exit_code == 0
    for _ in range(2):
        done = tonle("export", trail)
        assert done.exit_code == 0
        if place == "record":
            assert len(done.stdout.splitlines()) == 8
        assert tonle("reindex", trail).exit_code == 0


@pytest.mark.parametrize("kind", ["fifo", "folder", "link to itself", "link to a device", "link to a file"])
@pytest.mark.parametrize("name", [INDEX_NAME, INDEX_NAME + "-journal"])
def test_an_index_that_is_none_is_refused(trail: Path, name: str, kind: str) -> None:
    put_odd(trail / name, kind)
    done = tonle("query", trail)
    assert done.exit_code == 1 and "not the search index; remove it" in done.stderr


def test_a_forged_index_leads_nowhere_else(trail: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text('{"id": "x"}')
    tonle("query", trail)
    with sqlite3.connect(trail / INDEX_NAME) as database:
        database.execute("UPDATE records SET day = '..', file = 'secret.json', id = 'x' WHERE rowid = 1")
    assert tonle("show", trail, "x").exit_code == 1
    assert "secret" not in tonle("export", trail).stdout
    tonle("redact", trail, "--all", "--field", "output")
    assert secret.read_text() == '{"id": "x"}'


ESCAPES = "\x1b[2J\x1b]0;title\x07\x9b31m\x7f"


def test_escape_sequences_in_records_are_not_printed_raw(tmp_path: Path) -> None:
    with running(tmp_path) as trail:
        record = trail.open("/v1/chat/completions", request_id=f"r{ESCAPES}", body={"model": ESCAPES, "messages": []})
        record.key_id = ESCAPES
        record.close("ok", http_status=200, output=f"text {ESCAPES}")
    short_id = record.id
    for command in (
        ["query"], ["query", "--json"], ["show", short_id], ["export"], ["export", "--format", "csv"], ["verify"]
    ):  # fmt: skip
        done = tonle(command[0], tmp_path, *command[1:])
        assert done.exit_code == 0
        assert not set("\x1b\x07\x7f\x9b") & set(done.stdout + done.stderr), command
    assert json.loads(tonle("show", tmp_path, short_id).stdout)["output"] == f"text {ESCAPES}"
    assert json.loads(tonle("export", tmp_path).stdout)["key_id"] == ESCAPES
    file = files(tmp_path)[0]
    file.write_bytes(file.read_bytes().replace(b"text ", b"\x1b[2J"))
    assert "\x1b" not in tonle("show", tmp_path, file.name).stdout


def test_numbers_and_types_that_no_column_holds(trail: Path) -> None:
    path = record_of(trail)
    record = json.loads(path.read_text())
    odd = {"usage": {"prompt_tokens": 10**30, "completion_tokens": "x"}, "latency_ms": {"total": "fast"}, "id": "odd-one",
           "time": 5, "model": ["m"], "http_status": {"a": 1}, "messages": [[[[["deep"]]]]]}  # fmt: skip
    path.write_text(json.dumps(record | odd))
    assert "odd-one" in tonle("query", trail).stdout
    assert tonle("query", trail, "--text", "deep", "--json").stdout.count("\n") == 1


@pytest.mark.parametrize("kind", ["fifo", "binary", "deep", "sparse"])
@pytest.mark.parametrize("name", [day_ledger.LEDGER_NAME, day_ledger.HEAD_NAME])
def test_retention_keeps_a_day_that_is_not_in_order(
    trail: Path, name: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    chain = Chain(trail, load_key(trail / KEY_NAME))
    chain.append([pending_record(day_ledger.today())])
    put_odd(trail / DAYS[0] / name, kind)
    removed = in_time(lambda: prune_days(chain, 7))
    assert removed == list(DAYS[1:]) and "are kept" in caplog.text
    assert (trail / DAYS[0]).exists()


def test_what_is_in_order_stays_in_order(trail: Path, tmp_path: Path) -> None:
    """The bounds are no findings by themselves."""
    with running(trail) as more:
        ask(more, output="x" * (3 << 20))
        ask(more, output="ស" * 100_000)
    assert tonle("verify", trail).exit_code == 0
    recover(make_chain(trail))
    assert verify(trail).ok
    forge(trail, edit=lambda content: content)
    assert not verify(trail).ok
