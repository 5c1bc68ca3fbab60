"""`AuditTrail`: from closed records to files, on a thread of its own.

Does: open records, queue them, have them written in batches (`writer.py`), retry while the disk refuses, and follow
the policy for what cannot be kept. Nothing is lost in silence: a record that is given up is counted, raises the alarm,
and stands in the chain as a gap as soon as there is a disk again. Does not: format or chain (`document.py`,
`chain.py`).
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from tonle.audit import day_ledger
from tonle.audit.anchor_keeper import AnchorKeeper
from tonle.audit.audit_options import AuditOptions
from tonle.audit.audit_stats import Alarm, AuditStats
from tonle.audit.body_summary import BodySummary
from tonle.audit.chain import Chain
from tonle.audit.disk import Disk
from tonle.audit.gaps import Gaps
from tonle.audit.intents import FOLDER_NAME, Intents
from tonle.audit.media_store import write_media_of
from tonle.audit.record import Record
from tonle.audit.record_queue import RecordQueue
from tonle.audit.recover import recover
from tonle.audit.redaction import Redactor
from tonle.audit.refusal_cap import RefusalCap
from tonle.audit.retention import prune_days
from tonle.audit.seal import SEALED
from tonle.audit.shorten import shorten_body
from tonle.audit.signing_keys import load_or_create_key
from tonle.audit.writer import ChainWriter, UnsafeError, Writer, WriterDiedError
from tonle.errors import CapacityError, ConfigError, InternalError

log = logging.getLogger("tonle.audit")

RETRY_S = 1.0  # between two tries of a disk that refuses
CHECK_S = 1.0  # between two looks at the free space
MAX_DEATHS = 3  # of writer processes over the same records, before these are taken for the reason
RETRY_AFTER_S = 10.0  # what refused callers are told


class AuditTrail:
    """One per process and directory. `open`, `admit` and `Record.close` are for the server's thread."""

    def __init__(
        self,
        options: AuditOptions,
        *,
        own_process: bool = False,
        on_alarm: Callable[[Alarm], None] | None = None,
        disk: Disk | None = None,
    ) -> None:
        """`own_process`: records are formatted and written by another process, so that the server's threads need not
        wait for each other. `on_alarm` is called on the trail's thread, once for any number of losses in a row."""
        assert disk is None or not own_process, "another process has a disk of its own"
        self.options = options
        self._own_process = own_process
        self.stats = AuditStats()
        self._on_alarm = on_alarm
        self._disk = disk or Disk()
        self._redactor = Redactor(options.redact)
        for name in options.omit:
            if name not in SEALED:
                raise ConfigError(f"omit: there is no field {name!r}; there are {', '.join(SEALED)}", param="omit")
        self._queue = RecordQueue(options.max_queue, options.max_memory_bytes)
        self._cap = RefusalCap(options.refused_per_address, options.refused_per_second)
        self._gaps = Gaps(self.stats, self._cap, self._redactor, options.omit)
        self._open: dict[str, Record] = {}
        self._num_alarmed = 0  # losses the alarm was raised for
        self._chain: Chain | None = None
        self._writer: Writer | None = None
        self._intents: Intents | None = None
        self._anchors: AnchorKeeper | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._checked_s = 0.0
        self._day = ""

    # -- for the server

    def start(self) -> None:
        """Repair what a crash left and begin. Raises `ConfigError`, or `InternalError` if the directory cannot be used."""
        options = self.options
        try:
            options.directory.mkdir(parents=True, exist_ok=True)
            key = load_or_create_key(options.signing_key, options.directory)
            if not key.can_sign:
                raise ConfigError(
                    f"{options.signing_key} is a public key; signing needs the secret one", param="key_file"
                )
            self._anchors = AnchorKeeper(options, key)
            self._chain = Chain(options.directory, key, disk=self._disk, durable=options.fsync == "always")
            recover(self._chain, self._redactor, options.omit)
            self._intents = Intents(options.directory, key, redactor=self._redactor, omit=options.omit)
            self._writer = self._make_writer(self._chain, self._intents)
        except OSError as error:
            raise InternalError(f"the audit directory {options.directory} cannot be used: {error}") from error
        self._thread = threading.Thread(target=self._run, name="tonle-audit", daemon=True)
        self._thread.start()
        self._anchors.start()

    def _make_writer(self, chain: Chain, intents: Intents) -> Writer:
        if not self._own_process:
            return ChainWriter(chain, self._redactor, self.options.omit, flush_every_s=self.options.flush_every_s)
        # Not at the top: `python -m tonle.audit.writer_process` imports this file before it runs that module.
        from tonle.audit.writer_client import WriterClient

        client = WriterClient(chain, self.options, lambda: intents.owner)
        client.start()
        return client

    def admit(self) -> None:
        """Call before work begins. Raises `CapacityError` while records cannot be kept and the policy is `refuse`."""
        if self.options.on_full != "refuse":
            return
        reason = self.stats.failing
        if reason is None and self._queue.is_full():
            reason = self._queue.fill
        if reason is not None:
            self.stats.refused += 1
            raise CapacityError(
                f"this server keeps a record of every request and cannot at the moment ({reason})",
                retry_after_s=RETRY_AFTER_S,
            )

    def open(
        self,
        endpoint: str,
        *,
        request_id: str | None = None,
        client: str | None = None,
        body: bytes | Mapping[str, Any] | None = None,
        unread: BodySummary | None = None,
    ) -> Record:
        """A record for a request that has come. Never fails and never waits."""
        record = Record(self._close, endpoint, request_id=request_id, client=client, body=body, unread=unread)
        self._open[record.id] = record
        self.stats.opened += 1
        if self._intents is not None:
            self._intents.add(record)
        return record

    @property
    def num_open(self) -> int:
        """Requests whose record is not closed."""
        return len(self._open)

    @property
    def crowded(self) -> bool:
        """Records come faster than they are written. A server that can wait a moment before it serves should."""
        return self.stats.failing is None and self._queue.is_full(0.5)

    @property
    def num_queued(self) -> int:
        return self._queue.num_records

    @property
    def num_queued_bytes(self) -> int:
        """Of records that wait or are being written."""
        return self._queue.num_bytes

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until everything closed so far is written. For tests and orderly ends; False if time ran out."""
        deadline = time.monotonic() + timeout_s
        goal = self.stats.opened - len(self._open)
        while self.stats.written + self.stats.lost + self.stats.unrecorded < goal:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return True

    def close(self, timeout_s: float = 30.0) -> None:
        """Write everything, records still open as "interrupted"; then stop. What cannot be written is counted as lost."""
        for record in list(self._open.values()):
            record.close("interrupted", error={"message": "the server stopped before this request ended"})
        if self._thread is not None:
            self._stopping.set()
            self._queue.end()
            self._thread.join(timeout_s)
            self._thread = None
        if self._anchors is not None:
            self._anchors.close()

    def _close(self, record: Record) -> None:
        self._open.pop(record.id, None)
        if record.status == "refused":
            if record.unauthenticated and not self._cap.may_record(record.client):
                self._count_only(record)
                return
            shorten_body(record)
        if self._queue.is_full() and self._is_surplus(record):
            self._lose([record], self._queue.fill)
            return
        if self._writer is not None:
            self._writer.pack(record)
        self._queue.put(record)

    def _is_surplus(self, record: Record) -> bool:
        """Who is refused costs nothing but a record, and may come again at once: without end, they would fill the memory."""
        return self.options.on_full == "serve" or (record.status == "refused" and self._queue.is_full(2))

    def _count_only(self, record: Record) -> None:
        place = self._cap.count(record)
        if place is not None and self._intents is not None:
            self._intents.void([place])
        self.stats.unrecorded += 1

    # -- on the trail's thread

    def _run(self) -> None:
        while True:
            batch, is_last = self._queue.take(CHECK_S, self.options.linger_s, self._stopping)
            try:
                self._look_at_disk()
                if batch or self._gaps.is_due(at_once=self._stopping.is_set()):
                    self._write_each(batch)
                self._housekeep()
            except Exception:  # a bug of ours must not end all recording
                log.exception("the audit writer failed")
            self._queue.settle(batch)
            del batch  # prompts and answers, which would stay until the next request
            self._tell_losses()
            if is_last and self._queue.is_empty:
                break
        if self._intents is not None and not self.stats.failing:
            self._intents.close()
        if self._writer is not None:
            self._writer.close()

    def _write_each(self, batch: list[Record], *, again: bool = False) -> None:
        """Together; if that fails for a reason that is not the disk's, one by one: only the bad one is lost."""
        try:
            self._write(batch, again=again)
        except Exception:
            log.exception("the audit writer failed over %d records", len(batch))
            if len(batch) < 2:
                self._lose(batch, "the writer failed; the log has the details")
                return
            for record in batch:
                self._write_each([record], again=True)

    def _write(self, batch: list[Record], *, again: bool = False) -> None:
        """Until it succeeds, or has to be given up."""
        num_deaths = 0
        while True:
            try:
                if again and self._intents is not None:
                    self._intents.restore()
                write_media_of(batch, self._disk, self.options)
                self._append(batch, again=again)
                write_media_of(batch, self._disk, self.options)  # until a record referred to it, it could be removed
                break
            except OSError as error:
                num_deaths = num_deaths + 1 if isinstance(error, WriterDiedError) else 0
                again = True
                if (
                    num_deaths == 1 and error.errno == errno.EPIPE
                ):  # the disk may be fine, and another writer is ready soon
                    log.warning("%s: %s", self.options.directory, error.strerror)
                    continue
                self._fail_for(error)
                if isinstance(error, UnsafeError):
                    break
            self._tell_losses()
            if self._stopping.is_set():
                self._lose(batch, f"the server stops and the disk refuses ({self.stats.failing})")
                return
            if num_deaths == MAX_DEATHS and batch:
                self._suspect(batch)
            self._stopping.wait(RETRY_S)
        for record in batch:
            self._forget(record)
            record.media_data = {}
        self.stats.written += len(batch)

    def _suspect(self, batch: list[Record]) -> None:
        """Writers die over these records. Of several, find the one; of one, keep what can always be written."""
        if len(batch) > 1:
            raise InternalError(f"{MAX_DEATHS} processes that write records died over the same {len(batch)} records")
        assert self._writer is not None
        self._writer.strip(batch[0])

    def _append(self, batch: list[Record], *, again: bool = False) -> None:
        assert self._writer is not None
        try:
            self._writer.write(batch, self._gaps.facts(at_once=self._stopping.is_set()), again=again)
        except UnsafeError:
            self._note_told()
            raise
        self._note_told()
        if self.stats.failing is not None and not self._is_full():
            self.stats.failing = None
            self._alarm(Alarm("recovered", "audit records are written again"))

    def _note_told(self) -> None:
        places = self._gaps.note_told()
        if self._intents is not None:
            self._intents.void(places)

    def _housekeep(self) -> None:
        assert self._chain is not None
        try:
            if self.options.retention_days is not None and self._day != day_ledger.today():
                self._day = day_ledger.today()
                prune_days(self._chain, self.options.retention_days)
            if self._intents is not None:
                self._intents.sweep()
                if self._intents.restore():
                    reason = f"files were removed from {self.options.directory / FOLDER_NAME}"
                    self._alarm(Alarm("failing", f"{reason}: a crash would have left no trace of open requests"))
                    self._alarm(Alarm("recovered", "the files of open requests were made anew"))
        except OSError as error:
            self._fail_for(error)

    def _look_at_disk(self) -> None:
        now = time.monotonic()
        if now - self._checked_s < CHECK_S and self.stats.failing is None:
            return
        self._checked_s = now
        try:
            if self._is_full():
                self._fail(f"less than {self.options.min_free_bytes} bytes are free in {self.options.directory}")
            elif self.stats.failing is not None and self._queue.is_empty:
                self._append([])  # the disk may take it again, and without a try that would go unnoticed
        except OSError as error:
            self._fail_for(error)

    def _is_full(self) -> bool:
        return self._disk.free_bytes(self.options.directory) < self.options.min_free_bytes

    def _fail_for(self, error: OSError) -> None:
        self._fail(f"{self.options.directory}: {error.strerror or error}")

    def _fail(self, reason: str) -> None:
        is_new, self.stats.failing = self.stats.failing is None, reason
        if is_new:
            policy = "requests are refused" if self.options.on_full == "refuse" else "requests are served, records wait"
            self._alarm(Alarm("failing", f"audit records cannot be written: {reason}; {policy}"))

    def _lose(self, records: list[Record], reason: str) -> None:
        for record in records:
            self._forget(record)
        self._gaps.lose(records, reason)

    def _tell_losses(self) -> None:
        num_lost = self.stats.lost - self._num_alarmed
        if num_lost > 0:
            self._num_alarmed += num_lost
            self._alarm(Alarm("lost", f"{num_lost} audit records are lost: {self._gaps.why_lost}", num_lost))

    def _forget(self, record: Record) -> None:
        if self._intents is not None:
            self._intents.forget(record)

    def _alarm(self, alarm: Alarm) -> None:
        log.log(logging.WARNING if alarm.kind == "recovered" else logging.ERROR, "%s", alarm.message)
        if self._on_alarm is not None:
            try:
                self._on_alarm(alarm)
            except Exception:
                log.exception("the audit alarm's handler failed")
