"""The step log: a file with one line of JSON per step, which says where the time of an engine goes.

Does: write lines a few hundred at a time; read them back. Does not: run steps (`logged_loop.py` is the loop that writes it) or
import torch.

The first line describes the engine (`LoggedEngine`). Then there is one line per step (`LoggedStep`) and one per request when its
first token is there (`LoggedRequest`). Moments are `time.monotonic()` seconds, which all processes of one machine share.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

import msgspec

from tonle.engine.schedule.step_facts import StepWork
from tonle.errors import ConfigError

log = logging.getLogger("tonle.engine")

_LINES_AT_ONCE = 256


class LoggedEngine(msgspec.Struct, tag="engine", tag_field="line", frozen=True, kw_only=True):
    """What computes the steps of this log."""

    model: str
    device: str  # "cpu" | "cuda"
    device_name: str
    dtype: str
    block_size: int
    num_blocks: int
    context_length: int
    vocab_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_tokens: int
    lag: int  # of the runner
    sizes: dict[str, list[int]] = {}  # that steps are padded to: "decode" rows, "mixed" tokens, "head" samples
    settings: dict[str, Any] = {}  # of the engine, those that differ from the defaults


class LoggedStep(msgspec.Struct, tag="step", tag_field="line", frozen=True):
    planned_s: float  # planning begins
    launching_s: float  # the plan is made
    launched_s: float  # the runner has it; on a CPU, where a launch computes, the step is over
    waited_s: float  # the loop begins to wait for the result
    collected_s: float  # the result is there
    published_s: float  # the front has been sent it
    rows: int  # this and the next five: `StepWork`
    prompts: int
    tokens: int
    decode_reads: int
    prompt_reads: int
    samples: int
    running: int  # requests after it
    waiting: int

    @property
    def work(self) -> StepWork:
        return StepWork(self.rows, self.prompts, self.tokens, self.decode_reads, self.prompt_reads, self.samples)


class LoggedRequest(msgspec.Struct, tag="request", tag_field="line", frozen=True):
    prompt_tokens: int
    arrived_s: float  # at the front, tokenized
    taken_s: float  # by the loop
    first_s: float  # the step with its first token is there: that one's `collected_s`


Line = LoggedEngine | LoggedStep | LoggedRequest


class StepLog:
    """Writes one file, a few hundred lines at a time."""

    def __init__(self, path: Path, engine: LoggedEngine) -> None:
        """Raises `ConfigError` if the file cannot be written."""
        try:
            self._file = path.open("wb")
        except OSError as error:
            raise ConfigError(f"step_log: cannot write {path}: {error.strerror}", param="step_log") from None
        self._path = path
        self._broken = False
        self._lines: list[Line] = []
        self._encode = msgspec.json.Encoder().encode_lines
        self.write(engine)
        self.flush()

    def write(self, line: Line) -> None:
        self._lines.append(line)
        if len(self._lines) >= _LINES_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """A file that can no longer be written ends the log, not the engine."""
        if not self._lines:
            return
        data = self._encode(self._lines)
        self._lines.clear()
        if not self._broken:
            try:
                self._file.write(data)
                self._file.flush()
            except OSError as error:
                self._broken = True
                log.warning("the step log %s ends here: %s", self._path, error.strerror)

    def close(self) -> None:
        self.flush()
        with contextlib.suppress(OSError):  # it is in the log already
            self._file.close()


class StepLogFile(msgspec.Struct, frozen=True):
    """What a step log says."""

    engine: LoggedEngine
    steps: list[LoggedStep]
    requests: list[LoggedRequest]


def read_step_log(path: Path) -> StepLogFile:
    """Raises `ConfigError`. A last line that is not whole (the engine was killed) is left out."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the step log {path}: {error.strerror}") from None
    decode = msgspec.json.Decoder(Line).decode
    try:
        lines = [decode(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is not a step log: {error}") from None
    if not lines or not isinstance(lines[0], LoggedEngine):
        raise ConfigError(f"{path} is not a step log: its first line does not describe an engine")
    steps = [line for line in lines if isinstance(line, LoggedStep)]
    return StepLogFile(lines[0], steps, [line for line in lines if isinstance(line, LoggedRequest)])
