"""`Launcher`: where replicas run. `scaleout/ray_launcher.py` starts them on a Ray cluster."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What is known of one replica's process."""

    version: str | None = None  # of the settings it was started with; None: it has not said yet
    url: str | None = None  # None: it has no node yet
    ended: str | None = None  # why its process is gone; None: it is not


class Launcher(Protocol):
    async def start(self, id: str) -> None:
        """Ask for one more. Returns before it runs: it may have to wait for a GPU."""
        ...

    async def reports(self, answering: Collection[str]) -> dict[str, Report]:
        """Every replica of this service, by id, also those that an earlier controller started.

        Those in `answering` are known to be alive: what was reported of them before is enough.
        """
        ...

    async def stop(self, id: str) -> None:
        """End it and give back what it held. Returns at once; the reports have it until it is gone. Twice is once."""
        ...
