"""What a gateway's audit trail says after a fault: which requests are on record, how often, and whether it verifies.

Does: read files, run `tonle audit verify`. Does not: use the code of the trail: only its files and its command.
"""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from pathlib import Path

from tests.chaos.client import Outcome
from tests.chaos.load import wait_until
from tests.chaos.programs import TONLE

SETTLE_S = 120.0  # for records that wait to be written
SURELY_READ_S = 2.0  # a request sent this long before a kill has been read, also on a busy machine


class Trail:
    """Reads each file once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen: set[Path] = set()
        self._num_counted = 0  # requests that are only counted, at the last `mark`
        self._statuses: dict[str, list[str]] = defaultdict(list)  # request id → status of each of its records

    def refresh(self) -> None:
        for path in self.folder.glob("*/[!.]*_*.json"):  # a file that is still being written has a name with a dot
            if path not in self._seen:
                try:
                    record = json.loads(path.read_bytes())
                    self._statuses[record["request_id"]].append(record["status"])
                except (ValueError, KeyError, OSError):  # removed meanwhile, or not a record: `verify` will say so
                    continue
                self._seen.add(path)

    def statuses(self, request_id: str) -> list[str]:
        return self._statuses.get(request_id, [])

    def settle(self, ids: list[str], timeout_s: float = SETTLE_S) -> int:
        """Wait until all of these are on record or counted, or time is up. Returns how many were counted since `mark`:
        requests without a key beyond a rate have no record each, but a line in the chain says how many there were."""

        def complete() -> bool:
            self.refresh()
            missing = sum(not self.statuses(each) for each in ids)
            return missing <= self._counted() - self._num_counted

        wait_until(complete, timeout_s)
        return self._counted() - self._num_counted

    def mark(self) -> None:
        """What is counted from now on is told by `settle`."""
        self._num_counted = self._counted()

    def _counted(self) -> int:
        total = 0
        for ledger in self.folder.glob("*/chain.jsonl"):
            lines = [json.loads(text) for text in ledger.read_bytes().split(b"\n")[:-1] if b'"unrecorded"' in text]
            total += sum(row["requests"] for line in lines for row in line["facts"]["unrecorded"])
        return total

    def verify(self) -> str:
        """`in order`, or the first finding and how many there are."""
        done = subprocess.run(
            [*TONLE, "audit", "verify", str(self.folder)], capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            return "in order"
        lines = done.stdout.splitlines() or done.stderr.splitlines()[-1:] or ["?"]
        return f"{len(lines)} findings: {lines[0][:160]}"

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())


def must_be_recorded(outcome: Outcome, killed_s: float = 0.0) -> bool:
    """Whether exactly one record is owed. A request that may not have been read before a kill may have none."""
    if outcome.kind in ("answered", "refused"):
        return True
    if outcome.kind == "cut":
        return outcome.began or outcome.sent_s < killed_s - SURELY_READ_S
    return outcome.kind == "left" and outcome.began
