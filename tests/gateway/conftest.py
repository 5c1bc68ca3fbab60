"""Shared state for tests: each runs once with Redis and once with PostgreSQL, where they are installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.stores import Server, Store, postgres_server, postgres_store, redis_store


@pytest.fixture(scope="session")
def postgres() -> Iterator[tuple[str, Server]]:
    with postgres_server() as found:
        yield found


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Store]:
    with redis_store(tmp_path / "redis") as store:
        yield store


@pytest.fixture(params=["redis", "postgres"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    if request.param == "redis":
        yield request.getfixturevalue("redis")
        return
    with postgres_store(*request.getfixturevalue("postgres")) as found:
        yield found
