"""`BenchReport`: everything one benchmark found, as data; saving it; the remarks a careful reader would make.

Does: hold, judge and save. Does not: print (`tables.py`) or measure.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

import tonle
from tonle.bench.kinds.metrics import METRICS, KindMetrics, RequestKind
from tonle.bench.measure import LevelReport
from tonle.bench.options import BenchOptions, Pause, Span
from tonle.bench.self_check import client_remarks
from tonle.bench.slo import Slo
from tonle.bench.sweep import Saturation
from tonle.errors import ConfigError

ReportT = TypeVar("ReportT")
Kind = Literal["measured", "simulated"]

SCHEMA = "tonle.bench/1"
FEW_CHUNKS = 0.8  # of the output tokens: fewer are told
CACHE_SLACK_TOKENS = 32  # per request: blocks and templates cause hits that are not part of the workload


class Environment(msgspec.Struct, frozen=True):
    """The machine and software of the client, not of the server."""

    tonle: str
    python: str
    platform: str
    cpus: int
    event_loop: str


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """One benchmark: one level after the other against one server."""

    schema: str = SCHEMA
    started_at: str  # ISO 8601, UTC
    url: str
    model: str | None  # None: stopped before it was known
    prompt_kind: str | None  # ids, words or file
    settings: dict[str, Any]
    environment: Environment
    levels: list[LevelReport]
    notes: list[str]
    interrupted: bool
    kind: Kind = "measured"  # simulated: virtual moments, no server was asked
    saturation: Saturation | None = None  # of a sweep: where it ended
    request_kind: RequestKind = "chat"  # what was asked for

    @property
    def ok(self) -> bool:
        """Every request of every level was answered in full."""
        return bool(self.levels) and not self.interrupted and not any(level.failed for level in self.levels)

    @property
    def metrics(self) -> KindMetrics:
        """The numbers that this kind of requests has."""
        return METRICS[self.request_kind]

    @property
    def slo_held(self) -> bool:
        """No level missed a bound of the SLO. True where there is no SLO."""
        return all(result.holds for level in self.levels for result in level.slo)


class Run(msgspec.Struct, frozen=True):
    """A report and what it is called: its file's name."""

    name: str
    report: BenchReport

    def level(self, label: str) -> LevelReport | None:
        return next((level for level in self.report.levels if level.label == label), None)


def describe_environment(event_loop: str) -> Environment:
    return Environment(
        tonle=tonle.__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        cpus=os.cpu_count() or 1,
        event_loop=event_loop,
    )


def describe_settings(options: BenchOptions) -> dict[str, Any]:
    """Options as plain data, without the key."""
    settings: dict[str, Any] = {}
    for option in fields(options):
        value = getattr(options, option.name)
        if isinstance(value, Span | Pause | Path | Slo):
            value = str(value)
        elif isinstance(value, tuple):
            value = list(value)
        if option.name != "api_key":
            settings[option.name] = value
    return settings


def remark(levels: list[LevelReport], options: BenchOptions) -> list[str]:
    """What the reader of these numbers should know about them. What is true of several levels is said once, of the first."""
    labels: dict[str, list[str]] = {}  # by remark, without its numbers
    texts: dict[str, str] = {}
    for level in levels:
        for text in _remarks(level, options):
            key = re.sub(r"[\d.]+", "#", text)
            texts.setdefault(key, text)
            labels.setdefault(key, []).append(level.label)
    return [f"{labels[key][0]}: {text}{_also(labels[key][1:])}" for key, text in texts.items()]


def _also(labels: list[str]) -> str:
    if not labels:
        return ""
    return f" (and so at {', '.join(labels)})" if len(labels) <= 4 else f" (and so at {len(labels)} other levels)"


def _remarks(level: LevelReport, options: BenchOptions) -> Iterable[str]:
    if level.succeeded and level.counted_by != ["usage"]:
        how = "token ids" if level.counted_by == ["token_ids"] else "chunks, perhaps of several tokens each"
        yield f"the server reports no usage: output tokens are a count of {how}"
    if level.succeeded:
        yield from _unknown(level, options)
        yield from _few_chunks(level, options)
    planned = level.succeeded * (options.shared_prefix_tokens + CACHE_SLACK_TOKENS)
    repeats = options.repeats_prompts or options.turns is not None  # as it should
    if not repeats and level.cached_tokens is not None and level.cached_tokens > planned:
        yield (
            f"{level.cached_tokens} prompt tokens came from the server's prefix cache, more than the shared prefix: "
            "it has seen these prompts before; use another --seed"
        )
    if options.replay is not None and level.max_send_delay_ms is not None:
        yield f"requests were sent within {level.max_send_delay_ms:.1f} ms of their recorded times"
    yield from client_remarks(level)
    if level.reconnects:
        yield f"{level.reconnects} requests were sent again because the server had closed their idle connection"
    if any(group.example.startswith("wrong token count") for group in level.failures):
        yield "a server that does not know ignore_eos ends answers early; --no-ignore-eos accepts that"


def _unknown(level: LevelReport, options: BenchOptions) -> Iterable[str]:
    """What the server did not say."""
    if options.kind in ("chat", "embeddings", "rerank") and level.prompt_tokens is None:
        what = "total tok/s is output tok/s" if options.kind == "chat" else "the server reports no usage"
        yield f"prompt tokens are unknown: {what}"
    if options.kind == "tts" and (level.rtfx is None or level.rtfx.count < level.succeeded):
        yield (
            "some sounds are of unknown length, and in no RTFx: the server sends no x-tonle-audio-seconds, "
            "and a length is read from WAV and PCM only"
        )


def _few_chunks(level: LevelReport, options: BenchOptions) -> Iterable[str]:
    """Several tokens in the first chunk took no time that TPOT counts."""
    if options.kind != "chat" or level.ttft_ms is None:
        return
    chunks = level.ttft_ms.count + (0 if level.itl_ms is None else level.itl_ms.count)
    if chunks < FEW_CHUNKS * level.output_tokens:
        yield (
            f"{level.output_tokens} output tokens came in {chunks} chunks, as when a server guesses tokens ahead or holds text "
            "back until a letter is whole. Held back text makes TTFT longer and TPOT shorter than the server's; "
            "--extra-body '{\"return_token_ids\": true}' times tokens, where the server sends their ids"
        )


def one_kind(runs: Sequence[Run], verb: str) -> RequestKind:
    """Of all runs. Raises `ConfigError` if they differ: their numbers are not the same."""
    kinds = {run.report.request_kind: run.name for run in runs}
    if len(kinds) > 1:
        named = " and ".join(f"{kind} in {name}" for kind, name in kinds.items())
        raise ConfigError(f"runs of different kinds of requests ({named}) cannot be {verb}", param="runs")
    return next(iter(kinds))


def check_writable(path: Path) -> None:
    """Refuse a place where no report can be written, before an hour of measuring rather than after."""
    if path.is_dir():
        raise ConfigError(f"cannot save the report: {path} is a folder", param="json")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot save the report: {path.parent} is not a writable folder", param="json")


def save_report(report: msgspec.Struct, path: Path) -> None:
    """Write a report, of levels or of scenarios, as indented JSON, whole or not at all."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that readers find the old content or the new, never a part."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def load_report(path: Path) -> BenchReport:
    """Read what `save_report` wrote."""
    return read_report(path, BenchReport, "tonle bench")


def read_report(path: Path, kind: type[ReportT], command: str) -> ReportT:
    """A saved report of `command`. Raises `ConfigError`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", param="report") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is no report of `{command}`: {error}", param="report") from None
