"""One server for all tests of this folder; each test finds its front as new."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.fakes.front import FakeFront
from tests.http.serving import serving
from tonle.replica.replica import ReplicaOptions


@pytest.fixture(scope="session")
def _shared() -> Iterator[tuple[FakeFront, str]]:
    front = FakeFront()
    options = ReplicaOptions(max_choices=8, aliases=("nickname",))
    with serving(front, options, max_body_bytes=100_000) as url:
        yield front, url


@pytest.fixture
def front(_shared: tuple[FakeFront, str]) -> FakeFront:
    front = _shared[0]
    front.__init__()  # type: ignore[misc]
    return front


@pytest.fixture
def url(front: FakeFront, _shared: tuple[FakeFront, str]) -> str:
    return _shared[1]


@pytest.fixture(scope="session")
def _shared_client(_shared: tuple[FakeFront, str]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=_shared[1], timeout=60) as client:
        yield client


@pytest.fixture
def client(front: FakeFront, _shared_client: httpx.Client) -> httpx.Client:
    return _shared_client
