"""What keeps a rank from starting reaches whoever started the engine, with whose fault it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fakes.checkpoints import save_folder
from tests.fakes.rank_threads import parallel
from tonle.engine.messages import ReleaseMemory
from tonle.engine.ranks import rank_process
from tonle.engine.request import GenerationConfig
from tonle.errors import InternalError, ModelError
from tonle.models.inputs import KVCache
from tonle.models.source import resolve


@pytest.mark.parametrize(
    ("step", "error", "kind", "said"),
    [
        ("load_own_part", ModelError("tensor x is missing"), ModelError, "rank 1: tensor x is missing"),
        ("load_own_part", RuntimeError("out of memory"), InternalError, "rank 1: RuntimeError: out of memory"),
        ("KVCache", RuntimeError("out of memory"), InternalError, "rank 1: RuntimeError: out of memory"),
    ],
)
def test_a_rank_that_cannot_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: Exception, kind: type[Exception], said: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    save_folder("llama", tmp_path / "model")
    monkeypatch.setattr(rank_process, step, fail)
    with pytest.raises(kind, match=said), parallel(resolve(tmp_path / "model"), 2):
        pass


def test_an_engine_that_sleeps_gives_the_memory_of_every_rank_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[KVCache] = []

    def make(**shape: Any) -> KVCache:
        made.append(KVCache(**shape))
        return made[-1]

    save_folder("llama", tmp_path / "model")
    monkeypatch.setattr(rank_process, "KVCache", make)
    greedy = GenerationConfig(max_length=4, do_sample=False, early_stopping=False)
    with parallel(resolve(tmp_path / "model"), 2) as driver:
        first = driver.generate([[5, 6, 7]], greedy)
        made[0].k.fill_(1)
        driver.mailbox.put(ReleaseMemory())
        assert driver.generate([[5, 6, 7]], greedy) == first  # its steps come after it
        middle = made[0].num_blocks // 2  # of whole pages
        assert not made[0].k[-1, middle].any()
