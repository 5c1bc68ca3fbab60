"""A file of backends: what is read, what is refused, and that a wrong file changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path

import pytest
import yaml

from tonle.config.discovery import FileDiscovery
from tonle.config.routing import BackendConfig
from tonle.gateway.discovery import file_source
from tonle.gateway.discovery.file_source import FileSource, read_rows
from tonle.gateway.discovery.source import SourceLost


async def first(path: Path) -> list[str | None]:
    async with contextlib.aclosing(FileSource(FileDiscovery(path=str(path))).watch()) as sets:  # type: ignore[type-var]
        return [row.name for row in await anext(sets)]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("- {url: 'http://a:1', name: a}\n- {url: 'http://b:1', name: b}\n", ["a", "b"]),
        ('[{"url": "http://a:1", "name": "a", "role": "prefill"}]', ["a"]),
        ("[]", []),
    ],
)
def test_yaml_and_json(tmp_path: Path, text: str, names: list[str]) -> None:
    (tmp_path / "list").write_text(text)
    assert asyncio.run(first(tmp_path / "list")) == names


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "it is empty; for no backends, write"),
        (b"\xff\xfe", "not UTF-8"),
        (b"- {url: [", "must be YAML"),
        (b"name: a", "must be a list of backends"),
        (b"- {name: a}", r"entry 1 \(a\) lacks 'url'"),
        (b"- {url: 'http://a', wieght: 2}", "unknown field 'wieght'"),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, text: bytes, said: str) -> None:
    (tmp_path / "list").write_bytes(text)
    with pytest.raises(SourceLost, match=said):
        asyncio.run(first(tmp_path / "list"))


@pytest.mark.parametrize(
    "text",
    [
        "- {url: 'http://a', api_key: sk-secret\n",
        "backends:\n- {url: 'http://a', api_key: sk-secret}\n",
        "- {url: 'http://a', api_key: [sk-secret]}\n",
        "- {url: 'http://a', api_key: *sk-secret}\n",
        "sk-secret\n",
    ],
)
def test_what_cannot_be_read_is_said_without_the_keys_in_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "list").write_text(text)
    with pytest.raises(SourceLost) as said:
        asyncio.run(first(tmp_path / "list"))
    assert "sk-secret" not in str(said.value) and len(str(said.value)) < 300


def test_a_long_list_does_not_hold_up_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read on another thread, and JSON, which is what programs write, not as YAML: that takes seconds per megabyte."""
    threads = []

    def read(text: bytes) -> tuple[BackendConfig, ...]:
        threads.append(threading.current_thread())
        return read_rows(text)

    monkeypatch.setattr(file_source, "read_rows", read)
    monkeypatch.setattr(yaml, "safe_load", lambda text: pytest.fail("JSON was read as YAML"))
    (tmp_path / "list").write_text(' [{"url": "http://a:1", "name": "a"}]')
    assert asyncio.run(first(tmp_path / "list")) == ["a"]
    assert threads and threads[0] is not threading.main_thread()


def test_a_list_nested_beyond_reason_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("[" * 100_000)
    with pytest.raises(SourceLost, match="must be YAML"):
        asyncio.run(first(tmp_path / "list"))


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(SourceLost, match="No such file"):
        asyncio.run(first(tmp_path / "list"))
