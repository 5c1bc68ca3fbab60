"""One model, one gateway and one browser for all tests of this folder.

Of the package and not of the session: Playwright has an event loop run in this thread until it is stopped, and tests of other
folders have loops of their own.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.browser import chromium
from tests.browser.house import House, running
from tonle.models.source import ModelSource

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    if importlib.util.find_spec("playwright") is None or chromium.find() is None:
        pytest.skip(chromium.MISSING)
    with chromium.running() as found:
        yield found


@pytest.fixture(scope="package")
def house(browser: Browser, default_model: ModelSource, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with running(tmp_path_factory.mktemp("house")) as found:
        yield found
