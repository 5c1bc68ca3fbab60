"""`BackendPool`: all backends, asked every few seconds for their health and their models.

Does: probe, find by name and model. Does not: choose.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

import msgspec

from tonle.edge.buffered_reply import BufferedReply
from tonle.edge.client import UpstreamError
from tonle.errors import NotFound
from tonle.gateway.backends.backend import Backend
from tonle.gateway.backends.transport import TRUST_SALT_HEADER
from tonle.protocol.replies import ModelEntry, read_models

log = logging.getLogger("tonle.gateway")

PROBE_TIMEOUT_S = 5.0
MAX_LIST_BYTES = 4 * 1024**2  # of a backend's list of models


class BackendPool:
    def __init__(self, backends: Iterable[Backend], *, probe_interval_s: float) -> None:
        self.backends = list(backends)
        self._interval_s = probe_interval_s
        self._prober: asyncio.Task[None] | None = None
        self._refreshing: dict[str, asyncio.Task[None]] = {}  # by backend
        self.withdrawn: set[str] = set()  # adapters that are being removed: new requests do not find them

    def named(self, name: str) -> Backend:
        """Raises `NotFound`."""
        for backend in self.backends:
            if backend.name == name:
                return backend
        names = ", ".join(backend.name for backend in self.backends)
        raise NotFound(f"there is no backend {name!r}; there are: {names}")

    def models(self) -> dict[str, ModelEntry]:
        """Every model that some backend has, healthy or not."""
        found: dict[str, ModelEntry] = {}
        for backend in self.backends:
            for name, entry in backend.models.items():
                found.setdefault(name, entry)
        for name in self.withdrawn:
            found.pop(name, None)
        return found

    def entry(self, model: str) -> ModelEntry | None:
        """Of the first backend that has it, healthy or not."""
        if model in self.withdrawn:
            return None
        for backend in self.backends:
            if (entry := backend.models.get(model)) is not None:
                return entry
        return None

    async def start(self) -> None:
        """Probes every backend once before it returns. With an interval of 0 none is ever probed."""
        if self._interval_s:
            await self.probe()
            self._prober = asyncio.create_task(self._probe_often())

    async def stop(self) -> None:
        for task in (self._prober, *self._refreshing.values()):
            if task is not None:
                task.cancel()
        for backend in self.backends:
            backend.transport.close()

    async def probe(self) -> None:
        await self.refresh(self.backends)

    async def refresh(self, backends: Iterable[Backend]) -> None:
        """Have these list their models now."""
        await asyncio.gather(*(self._ask(backend) for backend in backends))

    def refresh_soon(self, name: str) -> None:
        """Its list of models is out of date: it said something else in an answer."""
        backend = self.named(name)
        if name not in self._refreshing and not backend.local:
            task = self._refreshing[name] = asyncio.create_task(self._ask(backend))
            task.add_done_callback(lambda _: self._refreshing.pop(name, None))

    async def _probe_often(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self.probe()

    async def _ask(self, backend: Backend) -> None:
        """Every such server answers /v1/models, and one that loads or drains answers it with 503."""
        before = backend.unhealthy_reason
        backend.num_probes += 1
        number = backend.num_probes
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                answer = BufferedReply(max_bytes=MAX_LIST_BYTES)
                await backend.send("GET", "/v1/models", b"", {}, answer, first_s=PROBE_TIMEOUT_S)
            if number < backend.last_probe:
                return  # a probe that began later has ended: this one may not know what changed in between
            backend.unhealthy_reason = self._read(backend, answer)
            backend.last_probe = number
        except (UpstreamError, TimeoutError) as error:
            backend.unhealthy_reason = str(error) or "no answer in time"
        except Exception as error:
            log.exception("probing %s failed", backend.name)
            backend.unhealthy_reason = str(error)
        if backend.unhealthy_reason != before:
            if backend.unhealthy_reason is None:
                log.info("backend %s is healthy; it has %s", backend.name, ", ".join(backend.models) or "no models")
            else:
                log.warning("backend %s is unhealthy: %s", backend.name, backend.unhealthy_reason)

    def _read(self, backend: Backend, answer: BufferedReply) -> str | None:
        if answer.status != 200:
            wants_key = (
                "; it needs a key: set the backend's api_key or api_key_env" if answer.status in (401, 403) else ""
            )
            return f"/v1/models answers {answer.status}{wants_key}"
        try:
            entries = read_models(answer.body)
        except msgspec.MsgspecError as error:
            return f"/v1/models cannot be read: {error}"
        wanted = backend.row.models
        models = {name: ModelEntry(id=name) for name in wanted}
        for entry in entries:  # with its models, a backend serves the adapters of these
            if not wanted or entry.id in wanted or entry.parent in wanted:
                models[entry.id] = entry
        backend.models = models
        if backend.row.kind == "auto":
            _set_kind(backend, entries)
        _warn(backend, trusts_salt=TRUST_SALT_HEADER in answer.headers)
        return None


def _set_kind(backend: Backend, entries: list[ModelEntry]) -> None:
    """Once known, it stays: an odd answer must not take the salts away."""
    if entries and entries[0].owned_by in ("tonle", "vllm"):
        backend.kind = "tonle" if entries[0].owned_by == "tonle" else "vllm"


def _warn(backend: Backend, *, trusts_salt: bool) -> None:
    """Of a backend whose prefix cache tenants share, unless its operator has said that this is known."""
    before, backend.warning = backend.warning, None
    if backend.kind == "auto":
        backend.warning = (
            "its kind is unknown, so it is treated as a plain OpenAI server and gets no salts: tenants share its "
            "prefix cache; set its kind to tonle or vllm if it is one of these, or to openai to confirm"
        )
    elif backend.kind == "tonle" and not trusts_salt:
        backend.warning = (
            "it was started without --trust-salt, so it ignores the salts it is sent: tenants share its prefix cache; "
            "start it with --trust-salt, or set its kind to openai to confirm"
        )
    if backend.warning is not None and backend.warning != before:
        log.warning("backend %s: %s", backend.name, backend.warning)
