"""Log lines: one format, one place to set it up.

Does: configure the logger `tonle` to write to stderr, as lines for people or as JSON for collectors.
Does not: touch the root logger; a program that embeds Tonle keeps its own.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from typing import Any

import msgspec

from tonle.errors import ConfigError

MAX_LINE_CHARS = 400  # of a text from outside the process
# Characters that end a line in some viewer, move the cursor, change the writing direction, or cannot be encoded.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def one_line(text: str) -> str:
    """`text` made safe as part of one log line: no text can make it look like two."""
    cut = text if len(text) <= MAX_LINE_CHARS else f"{text[:MAX_LINE_CHARS]}…"
    return _UNSAFE.sub(lambda found: found.group().encode("unicode_escape").decode(), cut)


def configure(level: str | int, *, json: bool = False) -> None:
    """Set up logging of a Tonle process. Calling it again replaces what it did before."""
    number = level if isinstance(level, int) else logging.getLevelName(level.upper())
    if not isinstance(number, int):
        raise ConfigError(f"log level {level!r} is none of DEBUG, INFO, WARNING, ERROR", param="log_level")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if json else Lines())
    logger = logging.getLogger("tonle")
    logger.handlers[:] = [handler]
    logger.setLevel(number)
    logger.propagate = False


def follow(level: str) -> None:
    """The level of an engine inside another program, whose logging stays as it is. DEBUG lines are written to stderr if the
    program has set up no logging: they were asked for, and would be lost."""
    logger = logging.getLogger("tonle")
    logger.setLevel(level.upper())
    if logger.isEnabledFor(logging.DEBUG) and not logger.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(Lines())
        handler.addFilter(lambda _: not logging.getLogger().handlers)  # none once the program has set up logging
        logger.addHandler(handler)


def component(logger_name: str) -> str:
    """`tonle.engine.loop` -> `engine`; `asyncio` -> `asyncio`."""
    parts = logger_name.split(".")
    return parts[1] if parts[0] == "tonle" and len(parts) > 1 else parts[0]


class Lines(logging.Formatter):
    """`2025-01-31 09:30:00.123 INFO    replica  message`, local time."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        line = (
            f"{moment}.{int(record.msecs):03d} {record.levelname:<7} {component(record.name):<8} {record.getMessage()}"
        )
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonLines(logging.Formatter):
    """One JSON object per line; times are UTC. What a caller passes as `extra={"fields": {...}}` is added."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "component": component(record.name),
            "message": record.getMessage(),
        }
        entry.update(getattr(record, "fields", {}))
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry).decode()


def level() -> str:
    """What this process logs at, for child processes to do the same."""
    return logging.getLevelName(logging.getLogger("tonle").getEffectiveLevel())


def is_json() -> bool:
    """Whether this process logs JSON, for child processes to do the same."""
    return any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger("tonle").handlers)
