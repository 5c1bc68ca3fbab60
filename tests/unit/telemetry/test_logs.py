"""Log lines for people and for collectors."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tonle.errors import ConfigError
from tonle.telemetry.logs import component, configure


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    logger = logging.getLogger("tonle")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)
    logger.propagate = propagate


def test_lines(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info")
    logging.getLogger("tonle.engine.loop").info("loaded in %.1f s", 1.25)
    logging.getLogger("tonle.engine.loop").debug("not this")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].split(None, 2)[2] == "INFO    engine   loaded in 1.2 s"


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    configure("DEBUG", json=True)
    try:
        raise ValueError("why")
    except ValueError:
        logging.getLogger("tonle.replica").exception("broke\nhere", extra={"fields": {"id": "x"}})
    (line,) = capsys.readouterr().err.splitlines()
    entry = json.loads(line)
    assert entry["level"] == "ERROR" and entry["component"] == "replica" and entry["message"] == "broke\nhere"
    assert entry["id"] == "x" and "ValueError: why" in entry["exception"] and entry["time"].endswith("Z")


def test_configuring_twice_does_not_double(capsys: pytest.CaptureFixture[str]) -> None:
    configure("INFO")
    configure("WARNING")
    logging.getLogger("tonle.replica").info("no")
    logging.getLogger("tonle.replica").warning("once")
    assert capsys.readouterr().err.count("once") == 1


def test_unknown_level() -> None:
    with pytest.raises(ConfigError, match="DEBUG, INFO, WARNING, ERROR"):
        configure("loud")


def test_rooms() -> None:
    assert (
        component("tonle.engine.loop") == "engine"
        and component("tonle") == "tonle"
        and component("other.error") == "other"
    )


_PROGRAM = """
import logging
from tonle.telemetry import logs

log = logging.getLogger("tonle.engine")
logs.follow("INFO")
log.info("as before: a program without logging shows warnings only")
logs.follow("DEBUG")
logs.follow("DEBUG")
log.debug("one")
logging.basicConfig(format="mine %(message)s")
log.debug("two")
logs.follow("INFO")
log.debug("three")
"""


def test_debug_lines_are_seen_in_a_program_that_has_set_up_no_logging() -> None:
    command = [sys.executable, "-c", _PROGRAM]
    one, two = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stderr.splitlines()
    assert one.endswith("DEBUG   engine   one") and two == "mine two", "the program's own logging takes over"
