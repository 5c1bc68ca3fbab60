"""Kernels are compiled once, however many engines start together."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tonle.models.cpu import warm


def test_engines_that_start_together_compile_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    both = threading.Event()

    def compile_for(types: str) -> None:
        calls.append(types)
        if len(calls) == 2:
            both.set()
        both.wait(0.3)  # time enough for another to begin as well, if nothing holds it back
        (tmp_path / f"{types}.ready").touch()

    monkeypatch.setattr(warm, "compile_for", compile_for)
    monkeypatch.setattr(warm, "_marker", lambda types: tmp_path / f"{types}.ready")
    threads = [threading.Thread(target=warm.compile_once, args=("a",)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert calls == ["a"]
    warm.compile_once("b")
    assert calls == ["a", "b"]
