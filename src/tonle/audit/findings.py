"""What a verification says: findings, one for each thing that is wrong, and the report they stand in.

Does: collect, with bounds: a directory with a million foreign files must not fill the memory. Does not: look for anything.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

import msgspec

from tonle.audit.regular_file import printable

# edited: a file has other content · deleted: it is gone · swapped: it holds another record of the day · reordered: the
# ledger's lines do not follow each other · truncated: the end is missing · signature: a head is not signed by the key
# foreign: no ledger line names it · day: a whole day is missing or does not follow the one before · unreadable: the name is
# taken by something that is not a regular file of a reasonable size · key: the directory holds another key than the one
# trusted · rollback: the chain lacks a line that was noted outside the directory
Problem = Literal[
    "edited", "deleted", "swapped", "reordered", "truncated", "signature", "foreign", "day", "unreadable", "key", "rollback"
]  # fmt: skip

MAX_OF_A_KIND = 1000  # findings of one problem that are listed; all are counted
MAX_NOTES = 1000
MAX_DETAIL_CHARS = 500


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    problem: Problem
    file: str  # relative to the trail's directory
    detail: str

    def __str__(self) -> str:
        return f"{self.problem}: {self.file}: {self.detail}"


class Findings:
    """A list that keeps the first of each kind and counts the rest."""

    def __init__(self) -> None:
        self.listed: list[Finding] = []
        self.counts: Counter[Problem] = Counter()

    def add(self, problem: Problem, file: str, detail: str) -> None:
        self.counts[problem] += 1
        if self.counts[problem] <= MAX_OF_A_KIND:
            text = printable(detail[:MAX_DETAIL_CHARS])
            self.listed.append(Finding(problem=problem, file=printable(file[:MAX_DETAIL_CHARS]), detail=text))

    @property
    def num_unlisted(self) -> int:
        return self.counts.total() - len(self.listed)


class Report(msgspec.Struct, kw_only=True):
    findings: list[Finding]
    num_unlisted: int  # findings of which there were too many to list
    days: list[str]
    num_records: int
    num_redacted: int
    notes: list[str]  # repairs, removals and gaps that the chain itself tells of
    key: str  # fingerprint
    key_from: str  # where that key was found, in words
    first_use: bool  # the key comes from the directory itself and is not known from anywhere else
    anchors: list[str]  # places outside the directory whose heads were found in the chain
    last: str | None  # link at the end of the chain
    num_media: int = 0  # files that records refer to

    @property
    def ok(self) -> bool:
        return not self.findings and not self.num_unlisted
