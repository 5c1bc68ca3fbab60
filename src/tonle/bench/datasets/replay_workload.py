"""`ReplayWorkload`: recorded requests as jobs that are due when they arrived, divided by the speed.

Does: rebuild each request, made to stream where its path can; compare the answer with the recorded one where it must be the same;
count what is not sent and not compared, and why. Does not: find or read records (`audit_trail.py`), or wait (`drive.py`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

from tonle.audit.index import Row
from tonle.audit.replay_records import Recorded, is_deterministic, path_of, request_of
from tonle.bench.datasets.audit_trail import MODEL_PATHS, REPLAYED_PATHS, read_row, rows_of, seconds_of
from tonle.bench.options import BenchOptions
from tonle.bench.workload import Job, Phase, encode_body
from tonle.errors import ConfigError

if TYPE_CHECKING:
    from tonle.bench.measure import Sample
    from tonle.protocol.answers import Answer

AHEAD_JOBS = 256  # made before they are due, for requests that arrive close together
AHEAD_BYTES = 32 << 20
REFILL_JOBS = 4  # at once: making one takes a fraction of a millisecond, in which no answer is read
SLACK_S = 0.02  # less than this before a request is due, no other is made
MAX_NAMED = 20  # changed answers in the notes; the saved report has all
_ANSWERED = ("ok", "cached")


@dataclass(slots=True)
class ReplayCounts:
    """What became of the requests of a replay, besides the latencies."""

    num_sent: int = 0
    not_sent: Counter[str] = field(default_factory=Counter)  # by reason
    not_compared: Counter[str] = field(default_factory=Counter)
    num_compared: int = 0
    changed: list[str] = field(default_factory=list)  # the first of them: "ID: how"
    num_changed: int = 0


@dataclass(slots=True, kw_only=True)
class ReplayJob(Job):
    """One recorded request. `recorded` None: its answer need not be the same, for the reason `why_not_compared`."""

    record: str
    recorded: Recorded | None
    why_not_compared: str | None
    counts: ReplayCounts

    @property
    def reads_answer(self) -> bool:
        return self.counts_graphemes or self.recorded is not None

    def look_at(self, sample: Sample, answer: Answer | None) -> None:
        """Counted here, when it is over: of jobs that were taken, the last may come too late to be sent."""
        sample.record = self.record
        self.counts.num_sent += 1
        if self.why_not_compared is not None:
            self.counts.not_compared[self.why_not_compared] += 1
            return
        if self.recorded is None or answer is None or sample.failure is not None:
            self.counts.not_compared["the request failed"] += 1
            return
        self.counts.num_compared += 1
        result = self.recorded.compare(answer)
        if result.verdict == "different":
            sample.changed = f"at character {result.position}: {result.detail}"
            self.counts.num_changed += 1
            if len(self.counts.changed) < MAX_NAMED:
                self.counts.changed.append(f"{self.record} {sample.changed}")


class ReplayWorkload:
    """The requests of a trail. Opening it counts them, by the index alone."""

    kind = "replay"

    def __init__(self, options: BenchOptions) -> None:
        assert options.replay is not None, "made for a replay"
        self._options = options
        self._trail = options.replay
        self.counts = ReplayCounts()
        self.model: str | None = None
        self.num_records = 0
        self._num_requests = 0  # about: those of which the content is gone are found when they are read
        self._first = self._last = ""  # arrivals of requests that are sent
        self._end = ""  # of the newest record: what comes after it is the replay's own
        for row in rows_of(self._trail, options.since, options.until):
            self.num_records += 1
            self._end = row.time or self._end
            if _why_not_sent(row) is None and row.time:
                self._num_requests += 1
                self._first, self._last = self._first or row.time, row.time
                self.model = self.model or row.model
        if not self._num_requests:
            found = f"{self.num_records} records, none of which can be sent" if self.num_records else "no records"
            raise ConfigError(f"nothing to replay: {self._trail} has {found} {self._period}", param="replay")

    @property
    def _period(self) -> str:
        since, until = self._options.since, self._options.until
        words = [f"from {since}"] if since else []
        words += [f"before {until}"] if until else []
        return " ".join(words) or "in all"

    @property
    def recorded_s(self) -> float:
        """From the first arrival to the last."""
        return seconds_of(self._last) - seconds_of(self._first)

    def num_requests(self, level: int, num_jobs: int | None) -> int | None:
        return self._num_requests if num_jobs is None else min(num_jobs, self._num_requests)

    def jobs(self, level: int, phase: Phase) -> Iterator[Job]:
        """There is no warm-up: it would put prompts into the caches that were not there."""
        if phase != "run":
            return iter(())
        self.counts = ReplayCounts()
        return _Ahead(self._made())

    def _made(self) -> Iterator[ReplayJob]:
        counts, index = self.counts, 0
        for row in rows_of(self._trail, self._options.since, self._options.until):
            if (row.time or "") > self._end:
                return  # what this replay sends to a server with the same trail is not replayed in turn
            reason = _why_not_sent(row)
            job = self._job(index, row) if reason is None else None
            if job is None:
                counts.not_sent[
                    reason or "its request is not on record as it was (masked, redacted or unreadable)"
                ] += 1
            else:
                index += 1
                yield job

    def _job(self, index: int, row: Row) -> ReplayJob | None:
        record = read_row(self._trail, row, [])
        body = None if record is None else request_of(record)
        if record is None or body is None or row.time is None:
            return None
        path = path_of(record)
        if self._options.model is not None:
            body["model"] = self._options.model
        reason = _why_not_compared(record, path)
        return ReplayJob(
            index,
            path,
            encode_body(path, body, self._options.extra_body),
            None,
            due_s=(seconds_of(row.time) - seconds_of(self._first)) / self._options.speed,
            counts_graphemes=self._options.counts_graphemes,
            record=record["id"],
            recorded=Recorded.of(record) if reason is None else None,
            why_not_compared=reason,
            counts=self.counts,
        )

    def pass_over(self, num_jobs: int) -> None:
        """It has one level, which one process sends."""

    def notes(self) -> list[str]:
        counts = self.counts
        speed = self._options.speed
        pace = "as fast as they came" if speed == 1 else f"{speed:g} times as fast as they came"
        notes = [
            f"replay of {self._trail}: {counts.num_sent} of {self.num_records} recorded requests were sent, {pace}; "
            f"they had arrived within {self.recorded_s:.1f} s from {self._first} on"
        ]
        notes += [f"{count} not sent: {reason}" for reason, count in counts.not_sent.most_common()]
        notes += [f"{count} sent but not compared: {reason}" for reason, count in counts.not_compared.most_common()]
        if counts.num_compared:
            verdict = f"{counts.num_changed} changed" if counts.num_changed else "all are the same"
            notes.append(f"{counts.num_compared} answers were compared with the recorded ones: {verdict}")
        notes += [f"changed: {line}" for line in counts.changed]
        if (more := counts.num_changed - len(counts.changed)) > 0:
            notes.append(f"changed: {more} more; the saved report (--json) has all")
        return notes


class _Ahead:
    """Jobs in order. The first ones are made at once, others while there is time before the next one is due."""

    def __init__(self, made: Iterator[ReplayJob]) -> None:
        self._made = made
        self._ahead: deque[ReplayJob] = deque()
        self._num_bytes = 0
        self._begin_s: float | None = None
        self._make(AHEAD_JOBS)

    def __iter__(self) -> Iterator[Job]:
        return self

    def __next__(self) -> Job:
        now_s = perf_counter()
        if self._begin_s is None:
            self._begin_s = now_s  # the level begins
        if not self._ahead:
            self._make(1)
        if not self._ahead:
            raise StopIteration
        job = self._ahead.popleft()
        self._num_bytes -= len(job.body)
        if (job.due_s or 0.0) - (now_s - self._begin_s) > SLACK_S:
            self._make(REFILL_JOBS)
        return job

    def _make(self, count: int) -> None:
        for _ in range(min(count, AHEAD_JOBS - len(self._ahead))):
            job = next(self._made, None) if self._num_bytes < AHEAD_BYTES else None
            if job is None:
                return
            self._ahead.append(job)
            self._num_bytes += len(job.body)


def _why_not_sent(row: Row) -> str | None:
    if row.status == "refused":
        return "refused when it was recorded"
    if row.endpoint not in REPLAYED_PATHS:
        return f"{row.endpoint} is not replayed"
    return None


def _why_not_compared(record: dict[str, Any], path: str) -> str | None:
    if record.get("status") not in _ANSWERED:
        return f"{record.get('status')} when it was recorded"
    if path not in MODEL_PATHS or path in ("/api/chat", "/api/generate"):
        return f"answers of {path} are not compared"
    if not is_deterministic(record):
        return "sampled without a seed"
    return None
