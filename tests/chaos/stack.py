"""`Stack`: what the faults happen to. Callers → `tonle gateway` with keys, limits and audit → two servers of one model.

One server is `tonle serve`, the other `tonle serve --frontends 2`; a third backend is scripted (`scripted_backend.py`)
and answers to models of its own. Does: start them, open a gateway of the kind a fault needs, warm it up. Does not: harm.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from tests.chaos import clock, disks
from tests.chaos.client import KEY
from tests.chaos.load import Load
from tests.chaos.programs import TONLE, Program, Skip
from tests.chaos.trail import Trail
from tests.fakes.stores import Store, postgres_server, postgres_store, redis_store

GatewayKind = Literal[
    "file", "disk", "clock", "redis", "postgres"
]  # where keys are kept; disk, clock: ones we can bend
INJECTED = Path(__file__).parent / "inject"
WARM_UP_S = 240.0


@dataclass(frozen=True, slots=True)
class Options:
    folder: Path
    model: Path
    frontends: int = 2  # of the second server
    seconds: float = 3.0  # of load before and after each fault
    warm_up: int = 400  # requests, for memory that is reached once and kept
    judges_memory: bool = True


@dataclass(frozen=True, slots=True)
class Memory:
    """MB of the gateway with its writer, and of both servers with their engines."""

    gateway: float
    servers: float


class Stack(contextlib.ExitStack):
    """Enter it, `use` a gateway, leave it."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options = options
        self.raise_file = options.folder / "raise-in-steps"
        self.first = self._server("server-1", CHAOS_RAISE_FILE=str(self.raise_file))
        self.second = self._server("server-2", "--frontends", str(options.frontends))
        script = [sys.executable, "-m", "tests.chaos.scripted_backend"]
        self.scripted = Program("scripted", script, options.folder, ready="/v1/models")
        self.store: Store | None = None
        self.disk: disks.Disk | None = None
        self.clock: clock.Clock | None = None
        self._gateway: Program | None = None
        self._trail: Trail | None = None
        self._kind: GatewayKind | None = None
        self._num_gateways = 0
        self._of_gateway = contextlib.ExitStack()
        self.warm: Memory | None = None
        self.is_suspect = False  # the last row was red: what is broken must not spoil the next

    def _server(self, name: str, *flags: str, **env: str) -> Program:
        command = [*TONLE, "serve", str(self.options.model), "--served-model-name", "m", "--kv-cache-memory", "96MiB",
                   "--trust-salt", "--device", "cpu", "--log-level", "WARNING", *flags]  # fmt: skip
        path = os.pathsep.join(filter(None, (str(INJECTED), os.environ.get("PYTHONPATH"))))
        return Program(name, command, self.options.folder, PYTHONPATH=path, **env)

    def __enter__(self) -> Stack:
        for program in (self.first, self.second, self.scripted):
            program.launch()
            self.callback(program.stop)
        for program in (self.first, self.second, self.scripted):
            program.wait_ready()
        self.push(self._of_gateway)
        return self

    @property
    def gateway(self) -> Program:
        assert self._gateway is not None, "use one first"
        return self._gateway

    @property
    def trail(self) -> Trail:
        assert self._trail is not None
        return self._trail

    def use(self, kind: GatewayKind) -> None:
        """The gateway that runs, if it is of this kind and sound; else a new one. Raises `Skip`."""
        for program in (self.first, self.second, self.scripted):
            if not program.is_running:
                program.start()
        if self._kind != kind or self.is_suspect or not self.gateway.is_running:
            self._renew(kind)
        self.is_suspect = False

    def _renew(self, kind: GatewayKind) -> None:
        """A new gateway with an empty trail, warmed up."""
        self._of_gateway.close()
        self._kind, self.warm = None, None
        self._num_gateways += 1
        folder = self.options.folder / f"gateway-{self._num_gateways}-{kind}"
        folder.mkdir()
        place, env = str(folder / "state.db"), {}
        if kind == "disk":
            self.disk = self._of_gateway.enter_context(disks.small_disk(folder / "disk"))
        elif kind == "clock":
            self.clock = self._of_gateway.enter_context(clock.shifted_clock(folder))
            env = self.clock.env
        elif kind in ("redis", "postgres"):
            self.store = self._of_gateway.enter_context(_store(kind, folder))
            place = self.store.url
        audit = folder / "disk" / "audit" if kind == "disk" else folder / "audit"
        settings = folder / "tonle.yaml"
        settings.write_text(self._settings(place, audit, cache=place if kind == "redis" else "memory"))
        self._gateway = Program(f"gateway-{self._num_gateways}", [*TONLE, "gateway", "--config", str(settings)],
                                self.options.folder, **env)  # fmt: skip
        self._of_gateway.callback(self._gateway.stop)
        self._gateway.start()
        self._trail = Trail(audit)
        self._kind = kind
        self._warm_up()

    def _settings(self, place: str, audit: Path, *, cache: str) -> str:
        return (
            f"api_key: [{KEY}]\nrequests_per_minute: 100000000\nstate_db: {place}\ncache: {cache}\n"
            f"audit_dir: {audit}\naudit_min_free: 1MiB\nwrite_timeout: 5s\nlog_level: WARNING\n"
            "backends:\n"
            f"  - {{name: server-1, url: '{self.first.url}'}}\n"
            f"  - {{name: server-2, url: '{self.second.url}'}}\n"
            f"  - {{name: scripted, url: '{self.scripted.url}', kind: openai}}\n"
        )

    def _warm_up(self) -> None:
        """Engine and gateway grow with their first requests, and stay there."""
        count = self.options.warm_up if self._num_gateways == 1 else self.options.warm_up // 4
        if count:
            load = Load(self.gateway.port, f"warm-{self._num_gateways}", num_callers=16, max_tokens=2)
            load.start()
            load.wait_answered(count, WARM_UP_S)
            load.stop()
        self.warm = self.memory()

    def memory(self) -> Memory:
        return Memory(self.gateway.memory_mb(), self.first.memory_mb() + self.second.memory_mb())


@contextlib.contextmanager
def _store(kind: str, folder: Path) -> Iterator[Store]:
    try:
        with contextlib.ExitStack() as stack:
            if kind == "redis":
                yield stack.enter_context(redis_store(folder / "redis"))
            else:
                yield stack.enter_context(postgres_store(*stack.enter_context(postgres_server())))
    except pytest.skip.Exception as skipped:
        raise Skip(str(skipped)) from None
