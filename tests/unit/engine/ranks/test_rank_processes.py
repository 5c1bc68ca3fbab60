"""Ranks as processes, in a program of the user's own: they end with the engine, and the engine with any of them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.fakes.checkpoints import save_folder
from tonle.config.engine import EngineConfig
from tonle.engine.inference_engine import InferenceEngine
from tonle.engine.ranks import leading_decoder, ranks
from tonle.engine.request import GenerationConfig
from tonle.errors import ConfigError, InternalError

real_poll = select.poll
LONG = GenerationConfig(max_length=8000, do_sample=False, early_stopping=False)
SHORT = GenerationConfig(max_length=4, do_sample=False, early_stopping=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    save_folder("llama", path, max_position_embeddings=16384)
    return path


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(
        device="cpu", max_sequence_length=16384, memory_pool_size=64 * 2**20, **{"tensor_parallel_size": 2, **settings}
    )


def rank_pids() -> list[int]:
    """Those of this process that have not ended."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "tonle.engine.ranks.rank_process" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child.pid)
    return found


def wait_for(condition: Callable[[], bool], what: str) -> None:
    for _ in range(1200):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError(what)


def lose_rank(engine: InferenceEngine) -> None:
    """Kill the other rank under a request, which ends with an error, and so does the engine."""
    running = engine.submit_request([5, 6, 7], LONG)
    (pid,) = rank_pids()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(InternalError):
        engine.result(running, timeout=120)
    wait_for(lambda: not engine.is_running, "the engine does not know that it has ended")


@pytest.fixture
def no_ranks_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No processes, and no folders that they met in."""
    assert rank_pids() == []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert rank_pids() == []
    assert list(tmp_path.glob("tonle-ranks-*")) == []


def test_a_rank_that_is_killed_ends_requests_at_once_and_the_engine_can_start_again(
    folder: Path, no_ranks_left: None
) -> None:
    engine = InferenceEngine(folder, config=config())
    with engine:
        first = engine.submit_request([5, 6, 7], SHORT)
        assert len(engine.result(first, timeout=60).output_ids[0]) == 4
        lose_rank(engine)
        assert rank_pids() == []
        with pytest.raises(InternalError, match="ended with an error"):
            engine.submit_request([5], SHORT)
    with engine:
        again = engine.submit_request([5, 6, 7], SHORT)
        assert len(engine.result(again, timeout=60).output_ids[0]) == 4


class _LatePoll:
    """Sees what hangs up half a second late, and if something else did so in the meantime, that alone: as if a rank's sums broke
    well before its socket."""

    def __init__(self) -> None:
        self._poll = real_poll()
        self.register = self._poll.register

    def poll(self) -> list[tuple[int, int]]:
        (first, *_) = self._poll.poll()
        time.sleep(0.5)
        others = [each for each in self._poll.poll(0) if each != first]
        return others or [first]


def test_a_rank_whose_sums_break_before_its_socket_is_named(
    folder: Path, no_ranks_left: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(select, "poll", _LatePoll)
    with InferenceEngine(folder, config=config()) as engine:
        lose_rank(engine)
    assert "rank 1 of the model is gone (signal SIGKILL)" in caplog.text


def test_a_rank_that_hangs_is_noticed_and_ended(
    folder: Path, no_ranks_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leading_decoder, "STEP_TIMEOUT_S", 5.0)
    with InferenceEngine(folder, config=config()) as engine:
        (pid,) = rank_pids()
        os.kill(pid, signal.SIGSTOP)
        running = engine.submit_request([5, 6, 7], LONG)
        with pytest.raises(InternalError):
            engine.result(running, timeout=60)
        wait_for(lambda: rank_pids() == [], "it is left over")


def test_a_rank_that_cannot_start_is_reported(
    folder: Path, no_ranks_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ranks.spawn
    monkeypatch.setattr(
        ranks, "spawn", lambda _, settings, **how: real("tonle.errors", settings, **how)
    )  # ends at once
    with pytest.raises(InternalError, match=r"rank 1 ended before it was ready \(exit code 0\)"):
        InferenceEngine(folder, config=config()).start()


@pytest.mark.parametrize(
    ("size", "why"), [(3, "4 attention heads are no multiple of 3"), (8, "4 attention heads are no multiple of 8")]
)
def test_a_size_that_does_not_divide_is_refused_before_anything_starts(
    folder: Path, no_ranks_left: None, size: int, why: str
) -> None:
    with pytest.raises(ConfigError, match=f"{why}.*can be 1, 2, 4"):
        InferenceEngine(folder, config=config(tensor_parallel_size=size)).start()


@pytest.mark.parametrize("settings", [{"role": "decode"}, {"kv_offload_memory": 2**30}])
def test_what_moves_blocks_elsewhere_would_move_a_part_of_each(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="each rank has a part of every block"):
        config(**settings).validate()


def test_a_live_model_is_refused() -> None:
    from tests.fakes.checkpoints import tiny_model

    with pytest.raises(ConfigError, match="needs a model in files"):
        InferenceEngine(tiny_model("llama"), config=config()).start()
