"""Real servers for tests: a Redis or a PostgreSQL of the test's own, on a loopback port, in a folder that goes with it.

Tests that need one are skipped where its program is not installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tonle.bench.server_process import free_port

TRIES, PAUSE_S = 600, 0.1  # a minute, for a machine that is busy


class Server:
    """One process that can be killed, stopped in its tracks, and started again at the same address."""

    def __init__(self, command: list[str], *, stop: signal.Signals = signal.SIGKILL, user: str | None = None) -> None:
        self._command = command
        self._stop = stop
        self._user = user
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                         user=self._user)  # fmt: skip

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.send_signal(self._stop)
            self._process.wait(60)
            self._process = None

    def signal_all(self, number: signal.Signals) -> None:
        """To it and its children: PostgreSQL has a process per connection."""
        import psutil

        assert self._process is not None
        parent = psutil.Process(self._process.pid)
        for process in [parent, *parent.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)


class Store:
    """What a test gets: `url` for settings, and the screws to turn. `start` returns when it answers."""

    def __init__(self, url: str, server: Server, ping: Callable[[str], Awaitable[Any]]) -> None:
        self.url = url
        self._server = server
        self._ping = ping

    async def start(self) -> None:
        self._server.launch()
        for _ in range(TRIES):
            try:
                await self._ping(self.url)
                return
            except Exception:
                await asyncio.sleep(PAUSE_S)
        raise AssertionError(f"{self.url} does not answer")

    def kill(self) -> None:
        self._server.kill()

    def freeze(self) -> None:
        """It keeps its connections and says nothing."""
        self._server.signal_all(signal.SIGSTOP)

    def thaw(self) -> None:
        self._server.signal_all(signal.SIGCONT)


# -- Redis


async def ping_redis(url: str) -> None:
    from redis.asyncio import Redis

    async with Redis.from_url(url) as client:
        await client.ping()


@contextlib.contextmanager
def redis_store(folder: Path) -> Iterator[Store]:
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed: apt-get install redis-server")
    pytest.importorskip("redis", reason="the package redis is not installed: pip install 'tonle[redis]'")
    folder.mkdir(exist_ok=True)
    port = free_port()
    server = Server([program, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", "",
                     "--appendonly", "yes", "--appendfsync", "always"])  # fmt: skip
    store = Store(f"redis://127.0.0.1:{port}/0", server, ping_redis)
    try:
        asyncio.run(store.start())
        yield store
    finally:
        server.kill()


# -- PostgreSQL


async def ping_postgres(url: str) -> None:
    import asyncpg

    connection = await asyncpg.connect(url, timeout=60)
    await connection.close()


async def run_sql(url: str, statement: str) -> list[Any]:
    import asyncpg

    connection = await asyncpg.connect(url, timeout=60)
    try:
        rows: list[Any] = await connection.fetch(statement)
        return rows
    finally:
        await connection.close()


def _postgres_program(name: str) -> str | None:
    """Debian keeps them out of the way."""
    places = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), reverse=True)
    return str(places[0]) if places else shutil.which(name)


def _postgres_user() -> str | None:
    """PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


@contextlib.contextmanager
def postgres_server() -> Iterator[tuple[str, Server]]:
    """An address without a database, and the server there."""
    initdb, postgres = _postgres_program("initdb"), _postgres_program("postgres")
    if initdb is None or postgres is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    pytest.importorskip("asyncpg", reason="the package asyncpg is not installed: pip install 'tonle[postgres]'")
    user = _postgres_user()
    with tempfile.TemporaryDirectory(prefix="tonle-postgres-") as folder:  # pytest's own is closed to other users
        if user is not None:
            shutil.chown(folder, user)
        data, port = f"{folder}/data", free_port()
        subprocess.run([initdb, "-D", data, "-U", "tonle", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"],
                       check=True, capture_output=True, user=user, timeout=240)  # fmt: skip
        settings = {"listen_addresses": "127.0.0.1", "port": port, "unix_socket_directories": "", "fsync": "off"}
        flags = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        server = Server([postgres, "-D", data, *flags], stop=signal.SIGQUIT, user=user)  # SIGQUIT: without goodbye
        try:
            yield f"postgresql://tonle@127.0.0.1:{port}", server
        finally:
            server.kill()


@contextlib.contextmanager
def postgres_store(address: str, server: Server) -> Iterator[Store]:
    """A schema of its own: quicker made, and removed, than a database."""
    name = f"test_{uuid.uuid4().hex[:8]}"
    if server._process is None:
        asyncio.run(Store(f"{address}/postgres", server, ping_postgres).start())
    asyncio.run(run_sql(f"{address}/postgres", f"CREATE SCHEMA {name}"))
    yield Store(f"{address}/postgres?search_path={name}", server, ping_postgres)


def wait_for(condition: Callable[[], object], what: str) -> None:
    for _ in range(TRIES):
        if condition():
            return
        time.sleep(PAUSE_S)
    raise AssertionError(what)
