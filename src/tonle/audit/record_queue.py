"""`RecordQueue`: closed records on their way to the writer, bounded in number and in bytes.

Does: hand out batches, and say how full it is. Does not: decide what happens to a record for which there is no room
(`trail.py`).
"""

from __future__ import annotations

import queue
import threading

from tonle.audit.record import Record

MAX_BATCH = 512  # records
MAX_BATCH_BYTES = 16 * 1024**2  # of a batch of more than one; the writer holds it several times over
LINGER_BELOW = 64  # with as many waiting, a batch is worth its lock and signature already
EMPTY_BYTES = 1024  # about what a record holds besides texts


class RecordQueue:
    """`put` is for any thread, `take` and `settle` are for the writer's."""

    def __init__(self, max_records: int, max_bytes: int) -> None:
        self.max_records = max_records
        self.max_bytes = max_bytes
        self.num_bytes = 0  # of records that wait or are being written
        self._queue: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
        self._lock = threading.Lock()

    @property
    def num_records(self) -> int:
        return self._queue.qsize()

    @property
    def is_empty(self) -> bool:
        return self._queue.empty()

    def is_full(self, times: float = 1.0) -> bool:
        """Whether that many times of what may wait does, in records; in bytes, all of it or, below 1, that part."""
        return self._queue.qsize() >= self.max_records * times or self.num_bytes >= self.max_bytes * min(times, 1.0)

    @property
    def fill(self) -> str:
        """In words."""
        if self.num_bytes >= self.max_bytes:
            return f"{self.num_bytes} bytes of records are waiting to be written"
        return f"{self.num_records} records are waiting to be written"

    def put(self, record: Record) -> None:
        packed = record.packed
        record.size_bytes = size_of(record) if packed is None else len(packed) + EMPTY_BYTES
        record.size_bytes += sum(map(len, record.media_data.values()))
        with self._lock:
            self.num_bytes += record.size_bytes
        self._queue.put(record)

    def end(self) -> None:
        """No more will come."""
        self._queue.put(None)

    def settle(self, records: list[Record]) -> None:
        """These are written or given up: they no longer count."""
        num_bytes = sum(record.size_bytes for record in records)
        for record in records:
            record.size_bytes = 0
        with self._lock:
            self.num_bytes -= num_bytes

    def take(self, wait_s: float, linger_s: float, stopping: threading.Event) -> tuple[list[Record], bool]:
        """The next batch, and whether it is the last. Empty if nothing comes within `wait_s`."""
        try:
            first = self._queue.get(timeout=wait_s)
        except queue.Empty:
            return [], False
        if first is not None and not stopping.is_set() and self._queue.qsize() < LINGER_BELOW:
            stopping.wait(linger_s)
        batch = [] if first is None else [first]
        num_bytes = 0 if first is None else first.size_bytes
        is_last = first is None
        while len(batch) < MAX_BATCH and num_bytes < MAX_BATCH_BYTES and not self._queue.empty():
            record = self._queue.get()
            if record is None:
                is_last = True
            else:
                batch.append(record)
                num_bytes += record.size_bytes
        if is_last and not self._queue.empty():
            self._queue.put(None)
            is_last = False
        return batch, is_last


def size_of(record: Record) -> int:
    """About how much memory a closed record holds that is not packed."""
    size = EMPTY_BYTES
    for text in (record.body, record.output):
        if isinstance(text, bytes | str):
            size += len(text)
    if (answer := record.answer) is not None:
        size += len(answer.raw) if isinstance(answer.raw, str) else 0
        for choice in answer.choices.values():
            size += sum(map(len, choice.all_pieces()))
    return size
