"""These tests start Ray clusters and take minutes: they run when asked for, `make ray` or `pytest tests/ray -m ray`."""

from __future__ import annotations

import importlib.util

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_wanted = "ray" in config.getoption("markexpr", "").split()
    is_installed = importlib.util.find_spec("ray") is not None
    for item in items:
        if item.get_closest_marker("ray") is None:
            continue
        if not is_wanted:
            item.add_marker(pytest.mark.skip(reason="takes minutes; `make ray` runs it"))
        elif not is_installed:
            item.add_marker(pytest.mark.skip(reason="Ray is not installed: pip install 'tonle[ray]'"))
