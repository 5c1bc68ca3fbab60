"""From a name to files."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tonle.child.frames import write_frame
from tonle.child.spawn import read_settings
from tonle.config.cache_dir import cache_dir
from tonle.config.engine import EngineConfig
from tonle.engine.process import EngineSettings
from tonle.errors import ModelError
from tonle.models import default_model
from tonle.models.source import ModelSource, cached_models, resolve


@pytest.fixture(autouse=True)
def own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TONLE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def make_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def test_a_folder(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "my-model")
    assert resolve(folder) == resolve(str(folder)) == ModelSource("folder", folder, "my-model")


def test_a_relative_folder_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path / "my-model")
    monkeypatch.chdir(folder)
    assert resolve(".") == ModelSource("folder", folder, "my-model")


def test_a_local_folder_that_looks_like_a_hub_name_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name") == ModelSource("folder", folder, "name")


def test_a_gguf_file_and_a_folder_with_one(tmp_path: Path) -> None:
    file = tmp_path / "tiny.Q8_0.gguf"
    file.write_bytes(b"GGUF")
    assert resolve(file) == resolve(tmp_path) == ModelSource("gguf", file, "tiny.Q8_0")


def test_a_folder_with_several_gguf_files_must_be_narrowed(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelError, match=r"name one: a\.gguf, b\.gguf"):
        resolve(tmp_path)


def test_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither a config\.json nor a \.gguf"):
        resolve(tmp_path)
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ModelError, match=r"neither a folder nor a \.gguf file"):
        resolve(tmp_path / "weights.bin")
    with pytest.raises(ModelError, match="no such file or folder"):
        resolve(tmp_path / "nowhere")


@pytest.mark.parametrize("path", ["./nowhere", "../nowhere", "./org/name", "/nowhere", "~/nowhere"])
def test_a_path_that_does_not_exist_is_no_hub_name(path: str) -> None:
    with pytest.raises(ModelError, match="there is no such file or folder"):
        resolve(path)


def test_a_hub_name_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="'org/name' is neither a path on this machine nor could it be fetched"):
        resolve("org/name", progress=False)


@pytest.mark.parametrize(("chosen", "place"), [(True, "cache/hub"), (False, "hub")])
def test_a_hub_name_that_is_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, chosen: bool, place: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for variable in ("HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    if not chosen:  # a cache directory: the hub's own is used, which other programs share
        monkeypatch.delenv("TONLE_CACHE_DIR")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    repo = tmp_path / place / "models--org--name"
    folder = make_folder(repo / "snapshots" / ("0" * 40))
    (folder / "model.safetensors").touch()
    (repo / "refs").mkdir()
    (repo / "refs/main").write_text("0" * 40)
    assert resolve("org/name", progress=False) == ModelSource("folder", folder, "org/name")
    assert cached_models() == [ModelSource("folder", folder, "org/name")]


def test_cached_models(tmp_path: Path) -> None:
    assert cached_models() == []
    default = default_model.path(cache_dir())
    other = default.parent / "other.gguf"
    default.parent.mkdir(parents=True)
    for path in (default, other):
        path.write_bytes(b"GGUF")
    assert cached_models() == [
        ModelSource("gguf", default, "SmolLM2-135M-Instruct"),
        ModelSource("gguf", other, "other"),
    ]


def test_cached_models_in_several_files(tmp_path: Path) -> None:
    folder = default_model.path(cache_dir()).parent
    folder.mkdir(parents=True)
    for name in ("big-00001-of-00002", "big-00002-of-00002", "half-00002-of-00002", "none-00000-of-00000"):
        (folder / f"{name}.gguf").write_bytes(b"GGUF")
    assert cached_models() == [
        ModelSource("gguf", folder / "big-00001-of-00002.gguf", "big"),
        ModelSource("gguf", folder / "none-00000-of-00000.gguf", "none-00000-of-00000"),
    ]


def test_needs_no_torch() -> None:
    modules = "tonle.models.source, tonle.models.default_model, tonle.models.gguf_file, tonle.models.read_spec"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_template_of_the_users_own_travels_with_the_source(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    source = resolve(tmp_path, chat_template=tmp_path / "chat.jinja")
    assert source.chat_template == tmp_path / "chat.jinja"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        write_frame(ours, msgspec.msgpack.encode(EngineSettings(source, EngineConfig(), "INFO", False), enc_hook=str))
        assert read_settings(theirs, EngineSettings).source == source, "to a process of its own, too"
