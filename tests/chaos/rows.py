"""The table: one row per fault, what is wrong with it, and the whole as Markdown.

Does: hold numbers and print them. Does not: measure.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.client import Outcome

HEADING = "## The table"
COLUMNS = ("fault", "sent", "answered", "refused, with a reason", "cut", "lost", "records", "verify", "recovery",
           "memory, MB: gateway; servers")  # fmt: skip


@dataclass(slots=True)
class Row:
    fault: str
    outcomes: list[Outcome] = field(default_factory=list)
    num_records: int = 0
    num_owed: int = 0  # requests that must be on record
    num_counted: int = 0  # of these, requests without a key that a line of the chain counts together
    verify: str = "–"
    recovery_s: float | None = None
    memory: str = "–"
    note: str = ""
    took_s: float = 0.0
    red: list[str] = field(default_factory=list)  # what is wrong
    skipped: str = ""  # why it was not run

    def count(self, *kinds: str) -> int:
        return sum(outcome.kind in kinds for outcome in self.outcomes)

    @property
    def num_sent(self) -> int:
        return len(self.outcomes) - self.count("unreached", "stale")

    def reasons(self, kind: str) -> str:
        """`12 × 503 no_backend, 3 × 429 queue_full`."""
        counted = Counter(outcome.detail for outcome in self.outcomes if outcome.kind == kind)
        return ", ".join(f"{number} × {detail}" for detail, number in counted.most_common(4))

    def line(self) -> str:
        """For progress."""
        if self.skipped:
            return f"  skipped: {self.skipped}"
        facts = [f"sent {self.num_sent}", f"answered {self.count('answered')}", f"refused {self.count('refused')}"]
        facts += [f"{kind} {self.count(kind)}" for kind in ("cut", "left", "lost") if self.count(kind)]
        facts += [
            f"records {self._records}",
            f"verify {self.verify}",
            f"recovery {self._recovery}",
        ]
        facts += [f"memory {self.memory}", f"{self.took_s:.0f} s"]
        lines = ["  " + ", ".join(facts)]
        lines += [f"  {kind}: {self.reasons(kind)}" for kind in ("refused", "lost") if self.count(kind)]
        lines += [f"  {self.note}"] if self.note else []
        lines += [f"  RED: {reason}" for reason in self.red]
        return "\n".join(lines)

    @property
    def _recovery(self) -> str:
        return "–" if self.recovery_s is None else f"{self.recovery_s:.1f} s"

    @property
    def _records(self) -> str:
        counted = f" + {self.num_counted} counted" if self.num_counted else ""
        owed = "" if self.num_records + self.num_counted >= self.num_owed else f" of {self.num_owed}"
        return f"{self.num_records}{counted}{owed}"

    def cells(self) -> list[str]:
        if self.skipped:
            return [self.fault, *["–"] * 8, f"skipped: {self.skipped}"]
        cut = self.count("cut", "left")
        return [
            ("**" + self.fault + "**") if self.red else self.fault, str(self.num_sent), str(self.count("answered")),
            str(self.count("refused")), str(cut), str(self.count("lost")), self._records, self.verify, self._recovery,
            self.memory,
        ]  # fmt: skip


def markdown(rows: list[Row]) -> str:
    """The table, then what more there is to say about a row."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(cell.replace("|", "/") for cell in row.cells()) + " |" for row in rows]
    notes = [f"- {row.fault}: {row.note}" for row in rows if row.note]
    reds = [f"- **{row.fault}**: {'; '.join(row.red)}" for row in rows if row.red]
    parts = ["\n".join(lines)]
    parts += ["\n".join(notes)] if notes else []
    parts += ["Red rows:\n\n" + "\n".join(reds)] if reds else []
    return "\n\n".join(parts)


def write_table(page: Path, text: str) -> None:
    """Into a file of its own, or in place of the last section of a page that has one of this name."""
    before = page.read_text().partition(HEADING)[0] if page.exists() else ""
    page.write_text(f"{before}{HEADING}\n\n{text}\n")
