"""Trails with a few records in them, what an attacker may do to them, and a look at what is on disk."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tonle.audit import AuditOptions, AuditTrail
from tonle.audit.audit_options import KEY_NAME
from tonle.audit.chain import Chain, PendingRecord
from tonle.audit.document import document, file_name
from tonle.audit.facts import facts_of
from tonle.audit.record import Record
from tonle.audit.recover import recover
from tonle.audit.redaction import Redactor
from tonle.audit.seal import encode_fields, fields_of
from tonle.audit.signing_keys import PUBLIC_NAME, load_or_create_key

CHAT = "/v1/chat/completions"
BODY = {
    "model": "river",
    "messages": [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "សួស្តី, I am at dara@example.org"},
    ],
    "temperature": 0,
    "seed": 7,
    "max_tokens": 16,
    "tools": [],
}
USAGE = {"prompt_tokens": 11, "completion_tokens": 5, "total_tokens": 16}


@contextlib.contextmanager
def running(directory: Path, **options: Any) -> Iterator[AuditTrail]:
    with_defaults = {"linger_s": 0.0, "fsync": "never", "min_free_bytes": 0} | options
    disk, on_alarm = with_defaults.pop("disk", None), with_defaults.pop("on_alarm", None)
    trail = AuditTrail(AuditOptions(directory=directory, **with_defaults), disk=disk, on_alarm=on_alarm)
    trail.start()
    try:
        yield trail
    finally:
        trail.close(timeout_s=60)


def ask(trail: AuditTrail, *, body: Any = BODY, output: str = "Hello, Dara.", **close: Any) -> Record:
    """One request from beginning to end."""
    record = trail.open(CHAT, client="127.0.0.1", body=json.dumps(body).encode())
    record.key_id = "key-1"
    record.close(**({"status": "ok", "http_status": 200, "output": output, "usage": USAGE} | close))
    return record


def make_chain(directory: Path) -> Chain:
    directory.mkdir(exist_ok=True)
    chain = Chain(directory, load_or_create_key(directory / KEY_NAME, directory))
    recover(chain)
    return chain


def pending_record(day: str, *, body: Any = BODY, output: str = "Hello, Dara.") -> PendingRecord:
    record = Record(lambda closed: None, CHAT, body=body)
    record.close("ok", http_status=200, output=output, usage=USAGE)
    facts = facts_of(record)
    return PendingRecord(day, file_name(facts), encode_fields(document(facts, Redactor(()))))


def write_days(directory: Path, days: dict[str, int]) -> Chain:
    """A trail with so many records on each day."""
    chain = make_chain(directory)
    for day, num_records in days.items():
        chain.append([pending_record(day, output=f"answer {number}") for number in range(num_records)])
        chain.sign()
    return chain


def files(directory: Path, day: str | None = None) -> list[Path]:
    """Records in the order of the chain."""
    found = (path for path in directory.glob(f"{day or '*-*-*'}/*_*.json") if not path.name.startswith("."))
    return sorted(found, key=lambda path: (path.parent.name, json.loads(path.read_text())["chain"]["seq"]))


def records(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in files(directory)]


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def each_and_all(thread: Any, process: Any, cases: Iterable[Any]) -> list[Any]:
    """Parameters (start, cases): each case on a thread, and all of them together in a process, which takes long to start."""
    found = list(cases)
    return [pytest.param(thread, [case], id=f"{case}") for case in found] + [pytest.param(process, found, id="process")]


def in_time(work: Callable[[], Any]) -> Any:
    """What `work` returns. It must end: a reader that waits for a FIFO never does."""
    done: list[Any] = []

    def run() -> None:
        try:
            done.append((work(), None))
        except BaseException as error:
            done.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert done, "it hangs"
    result, error = done[0]
    if error is not None:
        raise error
    return result


def forge(directory: Path, *, edit: Callable[[bytes], bytes], replace_secret: bool = False) -> None:
    """Edit every record, link and sign everything again with a key of one's own, and leave its public half."""
    scratch = Path(tempfile.mkdtemp())
    forged = make_chain(scratch)
    for path in files(directory):
        record = PendingRecord(path.parent.name, path.name, fields_of(edit(path.read_bytes())))
        forged.append([record])
        forged.sign()
    for day in directory.glob("*-*-*"):
        shutil.rmtree(day)
    for path in scratch.iterdir():
        if path.name not in (KEY_NAME, ".lock") or (replace_secret and path.name == KEY_NAME):
            target = directory / path.name
            (shutil.copytree if path.is_dir() else shutil.copy)(path, target)
    assert (directory / PUBLIC_NAME).read_bytes() == (scratch / PUBLIC_NAME).read_bytes()
    shutil.rmtree(scratch)


ODD_FILES = (
    "fifo",
    "folder",
    "link to itself",
    "link to a device",
    "link to a file",
    "sparse",
    "deep",
    "binary",
    "nothing",
)


def put_odd(path: Path, kind: str) -> None:
    """Something else in place of a file."""
    other = path.read_bytes() if path.is_file() else b"{}"
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "link to itself":
            path.symlink_to(path.name)
        case "link to a device":
            path.symlink_to("/dev/zero")
        case "link to a file":
            elsewhere = path.parent.parent / f"elsewhere-{path.name}"
            elsewhere.write_bytes(other)
            path.symlink_to(elsewhere)
        case "sparse":
            with path.open("wb") as file:
                file.truncate(1 << 40)
        case "deep":
            path.write_bytes(b'{"chain":' + b"[" * 200_000 + b"]" * 200_000 + b"}\n")
        case "binary":
            path.write_bytes(b"\xff\xfe\x00\x1b[2J\n" * 50)
        case "nothing":
            path.write_bytes(b"")
