"""`ExperimentRecords`: what the audit trail says about experiments, followed as it grows.

Does: read new records of the trail, add them up by experiment and arm. Does not: keep a record, or run on the event loop.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from tonle.audit import day_ledger
from tonle.audit.ledger_reader import texts_of
from tonle.audit.record_file import read_record
from tonle.audit.regular_file import OddFileError
from tonle.gateway.comparison import ArmResult, add_record

MAX_AT_ONCE = 20_000  # records read in one go; the rest is read the next time


class ExperimentRecords:
    """For one thread at a time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[str, int] = {}  # bytes of each day's ledger that were read
        self.arms: dict[str, dict[str, ArmResult]] = {}  # by experiment
        self.is_complete = False  # everything that is in the trail was read

    def update(self) -> None:
        days = day_ledger.days_in(self._directory)
        if not self._read.keys() <= set(days):  # a day was removed: what is left counts
            self._read, self.arms = {}, {}
        left = MAX_AT_ONCE
        for day in days:
            left -= self._follow(day, left)
            if left <= 0:
                break
        self.is_complete = left > 0

    def _follow(self, day: str, most: int) -> int:
        """Returns how many records were read. What cannot be read is passed over: `tonle audit verify` reports it."""
        num_read, end = 0, self._read.get(day, 0)
        with contextlib.suppress(FileNotFoundError, OddFileError):
            ledger = self._directory / day / day_ledger.LEDGER_NAME
            for text in texts_of(ledger, start=end, with_unfinished=False):
                if num_read >= most:
                    break
                end += len(text) + 1
                with contextlib.suppress(ValueError, OSError, RecursionError):
                    line = day_ledger.decode_line(text)
                    if line.kind == "record" and day_ledger.is_file_name(line.file):
                        num_read += 1
                        self._add(self._directory / day / str(line.file))
        self._read[day] = end
        return num_read

    def _add(self, path: Path) -> None:
        record = read_record(path)
        part = record.get("experiment")
        if isinstance(part, dict) and isinstance(part.get("name"), str) and isinstance(part.get("arm"), str):
            add_record(self.arms.setdefault(part["name"], {}), record)
