"""How an engine in a program ends: with `stop`, with an exception, with the program."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.checkpoints import save_folder
from tonle.engine import EngineConfig, GenerationConfig, InferenceEngine
from tonle.errors import ConfigError, EngineDied

LONG = GenerationConfig(max_length=900, do_sample=False, early_stopping=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("model") / "m"
    save_folder("llama", path)
    return path


@pytest.fixture
def engine(folder: Path) -> Iterator[InferenceEngine]:
    with InferenceEngine(folder) as made:
        yield made


def test_what_runs_is_finished(engine: InferenceEngine) -> None:
    called = threading.Event()
    request_id = engine.submit_request("Hello", LONG, callback=lambda _: called.set())
    engine.stop()
    assert len(engine.result(request_id, timeout=0).output_ids[0]) == 900
    assert called.wait(120)
    assert engine.get_stats()["engine_status"] == "stopped"


def test_what_takes_too_long_is_cancelled(engine: InferenceEngine) -> None:
    request_id = engine.submit_request("Hello", LONG)
    engine.stop(drain_s=0.0)
    with pytest.raises(EngineDied, match=r"stop\(\) was called"):
        engine.result(request_id, timeout=120)


def test_an_exception_waits_for_nothing(folder: Path) -> None:
    request_id = ""
    with pytest.raises(ZeroDivisionError), InferenceEngine(folder) as engine:
        request_id = engine.submit_request("Hello", LONG)
        raise ZeroDivisionError
    with pytest.raises(EngineDied):
        engine.result(request_id, timeout=120)


def test_no_request_is_taken_while_it_stops(engine: InferenceEngine) -> None:
    request_id = engine.submit_request("Hello", LONG)
    stopping = threading.Thread(target=engine.stop)
    stopping.start()
    while engine.get_stats()["engine_status"] == "running":
        pass  # ends with the thread at the latest
    with pytest.raises(ConfigError, match="not running"):
        engine.submit_request("Hello", LONG)
    stopping.join(60)
    assert engine.result(request_id, timeout=0).finish_reasons == ["length"]


def test_a_timeout_says_what_goes_on(engine: InferenceEngine) -> None:
    request_id = engine.submit_request("Hello", LONG)
    with pytest.raises(TimeoutError, match=f"request {request_id} has not ended after 0 s; it goes on"):
        engine.result(request_id, timeout=0)


PROGRAM = """
import sys
from tonle.engine import GenerationConfig, InferenceEngine
engine = InferenceEngine(sys.argv[1]).start()
config = GenerationConfig(max_length=900, early_stopping=False)
engine.submit_request("Hello", config, callback=lambda result: print(result.error))
{end}
"""


@pytest.mark.parametrize(("end", "status"), [("", 0), ("raise SystemExit(3)", 3), ("1 / 0", 1)])
def test_a_program_that_ends_while_a_request_runs_ends_as_it_should(folder: Path, end: str, status: int) -> None:
    """Threads of torch that are at work when the interpreter goes would abort it."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(end=end), str(folder)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == status, done.stderr
    assert "stop() was called" in done.stdout
    assert "terminate" not in done.stderr and "callback" not in done.stderr


def test_settings_are_the_engines_own(folder: Path) -> None:
    with pytest.raises(ConfigError, match="an object of class EngineConfig"):
        InferenceEngine(EngineConfig()).start()
