"""One server for the tests of a file that only ask it; on every event loop it may run on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.edge.running_server import LOOPS, RunningServer, running_server


@pytest.fixture(scope="module", params=sorted(LOOPS))
def place(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    with running_server(request.param) as found:
        yield found


@pytest.fixture(params=sorted(LOOPS))
def loop(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _forget(request: pytest.FixtureRequest) -> None:
    if "place" in request.fixturenames:
        found: RunningServer = request.getfixturevalue("place")
        found.handler.seen.clear()
        found.handler.cancelled.clear()
        found.handler.gate.clear()
