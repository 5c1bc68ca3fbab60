"""`tonle models` and `tonle pull`, on caches of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.cli.terminal import tonle


@pytest.fixture
def caches(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "tonle" / "models").mkdir(parents=True)
    (tmp_path / "hub").mkdir()
    return {"TONLE_CACHE_DIR": str(tmp_path / "tonle"), "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}


def test_nothing_here_yet(caches: dict[str, str]) -> None:
    done = tonle("models", **caches)
    assert (done.returncode, done.stdout) == (0, "")
    assert "tonle pull" in done.stderr
    assert json.loads(tonle("models", "--json", **caches).stdout) == []


def test_what_is_here(caches: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "tonle" / "models" / "mine.gguf"
    file.write_bytes(b"x" * 1500)
    (entry,) = json.loads(tonle("models", "--json", **caches).stdout)
    assert entry == {"name": "mine", "kind": "gguf", "bytes": 1500, "path": str(file)}
    header, row = tonle("models", **caches).stdout.splitlines()
    assert header.split() == ["Model", "Kind", "Size", "Path"]
    assert row.split() == ["mine", "gguf", "2", "kB", str(file)]


def test_the_size_of_a_model_in_several_files(caches: dict[str, str], tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / "tonle" / "models" / f"mine-0000{number}-of-00002.gguf").write_bytes(b"x" * 1500)
    (entry,) = json.loads(tonle("models", "--json", **caches).stdout)
    assert (entry["name"], entry["bytes"]) == ("mine", 3000)


def test_pull_says_where_a_model_is(caches: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "mine.gguf"
    file.write_bytes(b"x")
    for done in (tonle("pull", str(file), **caches), tonle("pull", TONLE_MODEL=str(file), **caches)):
        assert (done.returncode, done.stdout) == (0, f"mine is at {file}\n")


def test_pull_without_a_network_says_so(caches: dict[str, str]) -> None:
    done = tonle("pull", "nowhere/nothing", **caches)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: 'nowhere/nothing' is neither a path on this machine nor could it be fetched")
