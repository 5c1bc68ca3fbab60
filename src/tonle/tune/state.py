"""`TuneDir`: what a tuning knows so far, in a folder, so that it can be stopped at any moment and go on.

    state.json              what is tuned, seconds spent, simulated trials, what failed
    profile.json            step times, if they were measured here
    measurements/NNN-….json one `BenchReport` each, written the moment it is there: `tonle bench report` and `compare` read them
    logs/…                  output of the servers
    best.yaml, gateway.yaml, result.json, summary.md, report.html     at the end, and at Ctrl-C

Does: read and write these. Does not: decide anything.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import msgspec

from tonle.bench.measure import LevelReport
from tonle.bench.report import BenchReport, load_report, save_report
from tonle.errors import ConfigError
from tonle.tune.correction import Correction
from tonle.tune.objective import Outcome
from tonle.tune.space import Settings, describe, key_of

SCHEMA = "tonle.tune/1"
PROFILE = "profile.json"
Stage = Literal["pilot", "search", "confirm", "safe"]


class Inputs(msgspec.Struct, frozen=True, kw_only=True):
    """What is tuned, and for what. A folder belongs to one of these."""

    model: str | None
    server: str
    command: str | None
    workload: dict[str, Any]  # settings of the benchmark that say what is sent
    load: str
    slo: str
    maximize: str
    allow: list[str]
    values: dict[str, list[Any]]
    config: dict[str, Any]
    profile: str | None
    seed: int


class Trial(msgspec.Struct, frozen=True):
    """Settings, and what the simulator says of them."""

    settings: dict[str, Any]
    outcome: Outcome


class Tag(msgspec.Struct, frozen=True, kw_only=True):
    """What a measurement was for. Not part of the report: there, it would make two runs of one workload look different."""

    server: dict[str, Any]
    stage: Stage
    round: int
    startup_s: float  # 0: the server was running already


class State(msgspec.Struct, kw_only=True):
    schema: str = SCHEMA
    inputs: Inputs
    started_at: str
    spent_s: float = 0.0
    startup_s: float | None = None  # of a server, the longest so far
    requests: int | None = None  # per measurement
    trials: list[Trial] = []
    reranked: list[Trial] = []  # simulated again, with corrected times
    correction: Correction | None = None
    failed: dict[str, str] = {}  # settings with which a server did not start, and why
    files: dict[str, Tag] = {}  # what each measurement was for, by file name
    notes: list[str] = []
    finished: bool = False


class Measurement(msgspec.Struct, frozen=True):
    tag: Tag
    report: BenchReport
    path: Path | None = None

    @property
    def level(self) -> LevelReport:
        return self.report.levels[0]


class TuneDir:
    """Owns the folder."""

    def __init__(self, path: Path, state: State, measurements: list[Measurement]) -> None:
        self.path = path
        self.state = state
        self.measurements = measurements

    @classmethod
    def open(cls, path: Path, inputs: Inputs, started_at: str) -> TuneDir:
        """Begin, or go on where an earlier run of the same command stopped. Raises `ConfigError`."""
        file = path / "state.json"
        if not file.exists():
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise ConfigError(f"{path} exists and is no folder of `tonle tune`; give another --out", param="out")
            try:
                (path / "measurements").mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"cannot make the folder {path}: {error.strerror}", param="out") from None
            made = cls(path, State(inputs=inputs, started_at=started_at), [])
            made.save()
            return made
        try:
            state = msgspec.json.decode(file.read_bytes(), type=State)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"cannot read {file}: {error}; give another --out", param="out") from None
        if state.inputs != inputs and not state.files:  # nothing was measured: nothing is lost
            (path / PROFILE).unlink(missing_ok=True)
            state = State(inputs=inputs, started_at=started_at)
        if state.inputs != inputs:
            raise ConfigError(
                f"{path} holds a tuning of something else ({_difference(state.inputs, inputs)}); give another --out to "
                "begin anew, or the same options to go on",
                param="out",
            )
        return cls(path, state, _read_measurements(path / "measurements", state.files))

    def save(self) -> None:
        save_report(self.state, self.path / "state.json")

    def add(self, tag: Tag, report: BenchReport) -> Measurement:
        """Save a measurement, now."""
        name = _file_name(describe(tag.server).replace(" ", "="))
        folder = self.path / "measurements"
        folder.mkdir(parents=True, exist_ok=True)
        number = 1 + max((int(each.name[:3]) for each in _files(folder)), default=0)
        path = folder / f"{number:03}-{tag.stage}-{tag.round}-{name}.json"
        save_report(report, path)
        self.state.files[path.name] = tag
        self.save()
        measurement = Measurement(tag, report, path)
        self.measurements.append(measurement)
        return measurement

    def of(self, settings: Settings, *stages: Stage) -> list[Measurement]:
        """Those of these settings, in order."""
        wanted = key_of(settings)
        return [each for each in self.measurements if each.tag.stage in stages and key_of(each.tag.server) == wanted]

    def log(self, name: str) -> Path:
        folder = self.path / "logs"
        folder.mkdir(exist_ok=True)
        return folder / f"{1 + sum(1 for _ in folder.iterdir()):03}-{_file_name(name)}.log"


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.=-]+", "_", text)[:80]


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("[0-9][0-9][0-9]-*.json"))


def _read_measurements(folder: Path, tags: dict[str, Tag]) -> list[Measurement]:
    """A report without a tag was written the moment the program was killed: it is left alone."""
    return [Measurement(tags[path.name], load_report(path), path) for path in _files(folder) if path.name in tags]


def _difference(before: Inputs, now: Inputs) -> str:
    """`load: concurrency 8, now concurrency 16`."""
    for name in before.__struct_fields__:
        if getattr(before, name) != getattr(now, name):
            return f"{name}: {_short(getattr(before, name))}, now {_short(getattr(now, name))}"
    return "other options"


def _short(value: Any) -> str:
    text = "none" if value in (None, "", [], {}) else str(value)
    return text if len(text) <= 60 else text[:57] + "…"
