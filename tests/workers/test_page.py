"""docs/workers.md: its examples run, its tables are whole."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workers.pools import new_pool, run
from tests.workers.replies import ask
from tonle.workers.pool import WorkerPool
from tonle.workers.pool_config import PoolConfig
from tonle.workers.transport import WorkersTransport

PAGE = (Path(__file__).parents[2] / "docs" / "workers.md").read_text()
KIND, PROGRAM = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "shout.py").write_text(KIND)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    return tmp_path


def test_a_kind_of_your_own_answers_as_the_page_says(folder: Path) -> None:
    asked = re.search(r"curl localhost:8000(\S+) .* -d '(.*)'\n +(\{.*\})\n", PAGE)
    assert asked is not None and len(KIND.strip().splitlines()) <= 21

    async def steps() -> None:
        async with WorkerPool(PoolConfig(kind="shout:Shout")) as pool:
            transport = WorkersTransport([pool])
            reply = await ask(transport, "POST", asked[1], asked[2].encode())
            assert (reply.status, b"".join(reply.pieces).decode()) == (200, asked[3])
            reply = await ask(transport, "POST", asked[1], {"text": 3})
            assert reply.status == 400 and reply.json["error"]["param"] == "text"

    run(steps())


def test_the_program_prints_what_it_should(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.returncode) == ("HELLO!\n", 0), done.stderr


def test_the_metrics_are_those_of_the_page() -> None:
    listed = {name.removesuffix("_total") for name in re.findall(r"\| `(tonle_worker_\w+)`", PAGE)}
    assert listed == {family.name for family in new_pool().metrics.collect()}


def test_the_settings_are_those_of_the_page() -> None:
    names = re.findall(r"(?m)^\| `(\w+)` \|", PAGE.partition("## Settings")[2].partition("## When")[0])
    units = {"timeout": "timeout_s", "idle_unload": "idle_unload_s", "max_memory": "max_memory_mb"}
    assert {units.get(name, name) for name in names} == {*PoolConfig.__struct_fields__} - {
        "max_batch_units", "bucket_size", "load_timeout_s",
    }  # fmt: skip
