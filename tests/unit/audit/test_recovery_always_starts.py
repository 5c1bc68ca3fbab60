"""Whatever lies in the directory, a server starts: what cannot be repaired is set aside and stays a finding."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.audit.test_crash import reopen
from tests.unit.audit.trails import CHAT, ask, files, make_chain, records, running, write_days
from tonle.audit import day_ledger
from tonle.audit.intents import Intents, left_behind
from tonle.audit.record import Record
from tonle.audit.recover import recover
from tonle.audit.verify import verify

KILLED = """
import os, signal, sys
from pathlib import Path
from tonle.audit import AuditOptions, AuditTrail
trail = AuditTrail(AuditOptions(directory=Path(sys.argv[1]), fsync="never", min_free_bytes=0))
trail.start()
for depth in map(int, sys.argv[2].split(",")):
    body = b'{"x":' + b"[" * depth + b'"innermost"' + b"]" * depth + b"}"
    trail.open("/v1/chat/completions", request_id=f"deep-{depth}", body=body)
os.kill(os.getpid(), signal.SIGKILL)
"""
STARTED = """
import sys
from pathlib import Path
from tonle.audit import AuditOptions, AuditTrail
trail = AuditTrail(AuditOptions(directory=Path(sys.argv[1]), fsync="never", min_free_bytes=0))
trail.start()
trail.open("/v1/chat/completions", request_id=sys.argv[2]).close("ok", http_status=200)
trail.close()
"""


def test_deep_bodies_and_kill_9(tmp_path: Path) -> None:
    """Which depth breaks a parser depends on how deep its caller is: so each, and in processes of their own."""
    depths = [100, 500, *range(940, 1000), 30_000]
    command = [sys.executable, "-c", KILLED, str(tmp_path), ",".join(map(str, depths))]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    for name in ("first", "second"):
        subprocess.run([sys.executable, "-c", STARTED, str(tmp_path), name], check=True)
    found = {record["request_id"]: record for record in records(tmp_path)}
    assert found.keys() == {"first", "second", *(f"deep-{depth}" for depth in depths)}
    for depth in depths:
        record = found[f"deep-{depth}"]
        assert record["status"] == "interrupted"
        assert "innermost" in json.dumps(record["parameters"]), depth
    assert verify(tmp_path).ok


def last_line_garbage(folder: Path) -> None:
    with (folder / "2025-02-01" / "chain.jsonl").open("ab") as ledger:
        ledger.write(b"\0" * 300 + b"\n")


def deep_last_line(folder: Path) -> None:
    with (folder / "2025-02-01" / "chain.jsonl").open("ab") as ledger:
        ledger.write(b'{"seq":9,"x":' + b"[" * 5000 + b"\n")


def ledger_of_zeros(folder: Path) -> None:
    path = folder / "2025-02-01" / "chain.jsonl"
    path.write_bytes(b"\0" * path.stat().st_size)


def line_in_the_middle(folder: Path) -> None:
    path = folder / "2025-02-01" / "chain.jsonl"
    lines = path.read_bytes().split(b"\n")
    lines[1] = b"\xff" * len(lines[1])
    path.write_bytes(b"\n".join(lines))


def ledger_of_the_day_before(folder: Path) -> None:
    path = folder / "2025-01-31" / "chain.jsonl"
    path.write_bytes(b"no JSON\n" + path.read_bytes() + b"nor this\n")


def ledger_is_a_directory(folder: Path) -> None:
    (folder / "2025-02-01" / "chain.jsonl").unlink()
    (folder / "2025-02-01" / "chain.jsonl").mkdir()


def _as_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def ledger_is_a_fifo(folder: Path) -> None:
    _as_fifo(folder / "2025-02-01" / "chain.jsonl")


def ledger_is_a_link(folder: Path) -> None:
    (folder / "2025-02-01" / "chain.jsonl").unlink()
    (folder / "2025-02-01" / "chain.jsonl").symlink_to("/dev/zero")


def ledger_of_the_day_before_is_a_fifo(folder: Path) -> None:
    _as_fifo(folder / "2025-01-31" / "chain.jsonl")


def head_is_a_fifo(folder: Path) -> None:
    _as_fifo(folder / "2025-02-01" / "head.json")


def latest_is_a_fifo(folder: Path) -> None:
    _as_fifo(folder / "latest.json")


def deep_head(folder: Path) -> None:
    (folder / "2025-02-01" / "head.json").write_bytes(b'{"kind":' + b"[" * 5000)


def deep_latest(folder: Path) -> None:
    (folder / "latest.json").write_bytes(b'{"kind":' + b"[" * 5000)


def deep_record(folder: Path) -> None:
    path = folder / "2025-02-01" / "chat_completions_abcdabcd_20250201T000000000000Z.json"
    path.write_bytes(b'{"chain":' + b"[" * 5000)


def odd_chain_in_a_record(folder: Path) -> None:
    path = folder / "2025-02-01" / "chat_completions_abcdabcd_20250201T000000000000Z.json"
    path.write_text('{"chain": {"version": 1, "seq": [], "salts": 3}}')


def record_is_a_directory(folder: Path) -> None:
    (folder / "2025-02-01" / "chat_completions_abcdabcd_20250201T000000000000Z.json").mkdir()


def page_is_a_directory(folder: Path) -> None:
    (folder / "open").mkdir(exist_ok=True)
    (folder / "open" / "1-x-1.log").mkdir()


def temp_is_a_directory(folder: Path) -> None:
    (folder / "2025-02-01" / ".tmp-x").mkdir()


def signed_line_of_another_kind(folder: Path) -> None:
    (folder / "open").mkdir(exist_ok=True)
    key = reopen(folder).key
    lines = [b"[1,2]", b"[" * 5000, b'["id",1,"/v1/x","r",7,null]']
    page = b"".join(key.mac(line).encode() + b" " + line + b"\n" for line in lines)
    (folder / "open" / "1-x-1.log").write_bytes(page + b"\0" * 100)


DAMAGES = [last_line_garbage, deep_last_line, ledger_of_zeros, line_in_the_middle, ledger_of_the_day_before,
           ledger_is_a_directory, deep_head, deep_latest, deep_record, odd_chain_in_a_record, record_is_a_directory,
           ledger_is_a_fifo, ledger_is_a_link, ledger_of_the_day_before_is_a_fifo, head_is_a_fifo, latest_is_a_fifo,
           page_is_a_directory, temp_is_a_directory, signed_line_of_another_kind]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_server_starts_and_records(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    write_days(tmp_path, {"2025-01-31": 3, "2025-02-01": 3})
    damage(tmp_path)
    for number in range(2):
        with running(tmp_path) as trail:
            ask(trail, output=f"start {number}")
            assert trail.flush()
    outputs = [json.loads(path.read_text())["output"] for path in files(tmp_path, day_ledger.today())]
    assert [output for output in outputs if output and output.startswith("start")] == ["start 0", "start 1"]
    report = verify(tmp_path)
    assert report.findings or report.notes or damage in (page_is_a_directory, temp_is_a_directory), "told"


def test_a_cut_ledger_is_kept_whole(tmp_path: Path) -> None:
    write_days(tmp_path, {"2025-02-01": 3})
    path = tmp_path / "2025-02-01" / "chain.jsonl"
    path.write_bytes(path.read_bytes() + b"x" * 5000 + b"\n")
    notes = recover(reopen(tmp_path))
    assert (tmp_path / notes["cut"]["kept_in"]).read_bytes() == b"x" * 5000 + b"\n"


def test_a_process_that_runs_does_not_write_behind_half_a_line(tmp_path: Path) -> None:
    """Another process that shares the directory was killed while it wrote."""
    with running(tmp_path) as trail:
        ask(trail)
        assert trail.flush()
        with (tmp_path / day_ledger.today() / "chain.jsonl").open("ab") as ledger:
            ledger.write(b'{"seq":2,"kind":"rec')
        ask(trail)
    report = verify(tmp_path)
    assert report.ok, report.findings
    assert report.num_records == 2


# -- ids


def test_ids_never_meet(tmp_path: Path) -> None:
    ids = {Record(lambda record: None, CHAT).id for _ in range(1000)}
    assert all(re.fullmatch("[0-9a-f]{32}", name) for name in ids)
    chain = make_chain(tmp_path)
    intents = Intents(tmp_path, chain.key)
    assert re.fullmatch(r"\d+-[0-9a-f]{32}-1\.log", Path(intents.owner).name)
    intents.close()


def test_pages_with_short_ids_are_recovered(tmp_path: Path) -> None:
    """As an earlier version left them."""
    chain = make_chain(tmp_path)
    line = b'["deadbeef",1735689600000000000,"/v1/completions","old-1","10.0.0.7","{\\"prompt\\":\\"hi\\"}"]'
    (tmp_path / "open").mkdir(exist_ok=True)
    page = chain.key.mac(line).encode() + b" " + line + b"\n"
    (tmp_path / "open" / "77-0a1b2c3d-1.log").write_bytes(page + b"\0" * 4000)
    assert [intent.id for intent in left_behind(tmp_path, chain.key).requests] == ["deadbeef"]
    recover(chain)
    [record] = records(tmp_path)
    assert (record["id"], record["request_id"], record["prompt"]) == ("deadbeef", "old-1", "hi")
    assert verify(tmp_path).ok
