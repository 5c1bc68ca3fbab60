"""What `ClientProcesses` and a client process say to each other.

First come the settings. Then, for each level, the parent sends a `LevelTask`, is told `Ready`, and sends `Go`; samples travel
back in batches, and `Done` ends the level. `Stop` ends it early.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from tonle.bench.measure import ClientUse, Sample
from tonle.bench.underway import UnderwayCounts


class ClientSettings(msgspec.Struct):
    """The first message to the child."""

    place: int
    count: int
    counter: str  # the file of the `SharedCounter`
    options: bytes  # `BenchOptions`, pickled


@dataclass(frozen=True, slots=True)
class Ready: ...


@dataclass(frozen=True, slots=True)
class Go:
    begin_s: float  # of the shared clock


@dataclass(frozen=True, slots=True)
class Stop: ...


@dataclass(frozen=True, slots=True)
class Samples:
    samples: list[Sample]
    underway: UnderwayCounts


@dataclass(frozen=True, slots=True)
class Done:
    use: ClientUse | None
    reconnects: int  # in this level


@dataclass(frozen=True, slots=True)
class Failed:
    reason: str
