"""One folder for what is downloaded and compiled."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tonle.config.cache_dir import cache_dir, hub_dir, use_triton_dir

VARIABLES = (
    "TONLE_CACHE_DIR",
    "XDG_CACHE_HOME",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HUGGINGFACE_HUB_CACHE",
    "TRITON_CACHE_DIR",
)


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "")  # so that it is restored
        monkeypatch.delenv(variable)


def test_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_dir() == Path.home() / ".cache/tonle"
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_dir() == Path("/b/tonle")
    monkeypatch.setenv("TONLE_CACHE_DIR", "/a")
    assert cache_dir() == Path("/a")
    monkeypatch.setenv("TONLE_CACHE_DIR", "~/a")
    assert cache_dir() == Path.home() / "a"


def test_the_hub_keeps_its_own_cache_unless_one_was_chosen_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub_dir() is None
    monkeypatch.setenv("TONLE_CACHE_DIR", "/a")
    assert hub_dir() == Path("/a/hub")
    monkeypatch.setenv("HF_HOME", "/h")
    assert hub_dir() is None


def test_triton_uses_it_unless_it_was_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TONLE_CACHE_DIR", "/a")
    assert use_triton_dir() == Path("/a/triton") and os.environ["TRITON_CACHE_DIR"] == "/a/triton"
    monkeypatch.setenv("TRITON_CACHE_DIR", "/t")
    assert use_triton_dir() == Path("/t") and os.environ["TRITON_CACHE_DIR"] == "/t"
