"""`BackendPool`: all backends, asked every few seconds for their health and their models.

Does: probe, find by name and model, take in new ones, let those that are removed finish. Does not: choose, or know which there
should be (`discovery/`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

import msgspec

from tonle.edge.buffered_reply import BufferedReply
from tonle.edge.client import UpstreamError
from tonle.errors import NotFound
from tonle.gateway.backends.backend import Backend
from tonle.gateway.backends.transport import TRUST_SALT_HEADER
from tonle.gateway.hops import GATEWAY_HEADER
from tonle.protocol.replies import ModelEntry, read_models

log = logging.getLogger("tonle.gateway")

PROBE_TIMEOUT_S = 5.0
MAX_LIST_BYTES = 4 * 1024**2  # of a backend's list of models
LOOK_S = 0.05  # how often a backend that leaves is looked at
REMEMBERED_S = 600.0  # a model whose last backend left is missing (503) for so long, then unknown (404)


class BackendPool:
    def __init__(self, backends: Iterable[Backend], *, probe_interval_s: float) -> None:
        # This very list is what metrics, figures and alerts look at: it is changed in place. Those that leave stay until they are
        # gone, unless another comes under the same name.
        self.backends = list(backends)
        self._by_name = {backend.name: backend for backend in self.backends}
        self._interval_s = probe_interval_s
        self._departing: dict[asyncio.Task[None], Backend] = {}
        self._departed: dict[
            str, tuple[ModelEntry, float]
        ] = {}  # models of backends that left, and until when they are known
        self._prober: asyncio.Task[None] | None = None
        self._refreshing: dict[Backend, asyncio.Task[None]] = {}
        self.probe_headers: dict[str, str] = {}
        self.withdrawn: set[str] = set()  # adapters that are being removed: new requests do not find them

    def named(self, name: str) -> Backend:
        """Raises `NotFound`."""
        if (backend := self.find(name)) is not None:
            return backend
        names = ", ".join(backend.name for backend in self.backends)
        raise NotFound(f"there is no backend {name!r}; there are: {names or 'none'}")

    def find(self, name: str) -> Backend | None:
        return self._by_name.get(name)

    # -- coming and going

    def add(self, backend: Backend) -> None:
        """It gets requests as soon as it has answered a probe. One of the same name must be leaving, and is forgotten."""
        old = self.find(backend.name)
        if old is not None:
            assert old.leaving, f"there are two backends {backend.name}"
            self.backends.remove(old)
        self.backends.append(backend)
        self._by_name[backend.name] = backend
        if self._interval_s:
            self._ask_soon(backend)

    async def settle(self) -> None:
        """Until those that were added have answered their first probe, or not."""
        await asyncio.gather(*self._refreshing.values())

    def remove(self, backend: Backend, *, grace_s: float) -> None:
        """Requests that run there may finish within `grace_s`; those that wait for it choose again. Then it is gone."""
        if backend.leaving:
            return
        backend.leave()
        now_s = time.monotonic()
        remembered = {name: found for name, found in self._departed.items() if found[1] > now_s}
        self._departed = remembered | {name: (entry, now_s + REMEMBERED_S) for name, entry in backend.models.items()}
        task = asyncio.create_task(self._let_finish(backend, grace_s))
        self._departing[task] = backend
        task.add_done_callback(lambda done: self._departing.pop(done, None))

    async def _let_finish(self, backend: Backend, grace_s: float) -> None:
        until_s = time.monotonic() + grace_s
        try:
            while not backend.is_idle and time.monotonic() < until_s:  # noqa: ASYNC110 - it is bounded, and rare
                await asyncio.sleep(LOOK_S)
        finally:
            if not backend.is_idle:
                log.warning("backend %s is removed with requests under way: %g s have passed", backend.name, grace_s)
            backend.end()
            if self._by_name.get(backend.name) is backend:
                del self._by_name[backend.name]
                self.backends.remove(backend)
            log.info("backend %s is gone", backend.name)

    # -- models

    def models(self, wanted: Callable[[Backend], bool] = lambda backend: True) -> dict[str, ModelEntry]:
        """Every model that some backend has, healthy or not; of those backends that are `wanted`."""
        found: dict[str, ModelEntry] = {}
        for backend in filter(wanted, self.backends):
            for name, entry in backend.models.items():
                found.setdefault(name, entry)
        for name in self.withdrawn:
            found.pop(name, None)
        return found

    def entry(self, model: str) -> ModelEntry | None:
        """Of the first backend that has it, healthy or not; or that had it, if the last of them left a short while ago."""
        if model in self.withdrawn:
            return None
        for backend in self.backends:
            if (entry := backend.models.get(model)) is not None:
                return entry
        entry, until_s = self._departed.get(model, (None, 0.0))
        return entry if until_s > time.monotonic() else None

    async def start(self) -> None:
        """Probes every backend once before it returns. With an interval of 0 none is ever probed."""
        if self._interval_s:
            await self.probe()
            self._prober = asyncio.create_task(self._probe_often())

    async def stop(self) -> None:
        tasks = [task for task in (self._prober, *self._refreshing.values(), *self._departing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for backend in self.backends:
            backend.transport.close()

    async def probe(self) -> None:
        await self.refresh(self.backends)

    async def refresh(self, backends: Iterable[Backend]) -> None:
        """Have these list their models now."""
        await asyncio.gather(*(self._ask(backend) for backend in backends))

    def refresh_soon(self, name: str) -> None:
        """Its list of models is out of date: it said something else in an answer."""
        backend = self.find(name)
        if backend is not None and backend not in self._refreshing and not backend.local:
            self._ask_soon(backend)

    def _ask_soon(self, backend: Backend) -> None:
        task = self._refreshing[backend] = asyncio.create_task(self._ask(backend))
        task.add_done_callback(lambda _: self._refreshing.pop(backend, None))

    async def _probe_often(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self.probe()

    async def _ask(self, backend: Backend) -> None:
        """Every such server answers /v1/models, and one that loads or drains answers it with 503."""
        if backend.leaving:
            return
        before = backend.unhealthy_reason
        backend.num_probes += 1
        number = backend.num_probes
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                answer = BufferedReply(max_bytes=MAX_LIST_BYTES)
                await backend.send("GET", "/v1/models", b"", self.probe_headers, answer, first_s=PROBE_TIMEOUT_S)
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
        backend.gateway_id = answer.headers.get(GATEWAY_HEADER)
        if backend.row.kind == "auto":
            _set_kind(backend, entries)
        _warn(backend, trusts_salt=TRUST_SALT_HEADER in answer.headers)
        return None


def _set_kind(backend: Backend, entries: list[ModelEntry]) -> None:
    """Once known, it stays: an odd answer must not take the salts away."""
    if backend.gateway_id is not None:  # it lists the models of servers of any kind, and is none of those
        backend.kind = "tonle"
    elif entries and entries[0].owned_by in ("tonle", "vllm"):
        backend.kind = "tonle" if entries[0].owned_by == "tonle" else "vllm"


def _remedy(backend: Backend) -> str:
    if backend.gateway_id is None:
        return "it was started without --trust-salt; start it with --trust-salt"
    return "the key that this gateway has there lacks the scope gateway; create one with it"


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
            f"it ignores the salts it is sent, so tenants share its prefix cache: {_remedy(backend)}, or set its kind to openai "
            "to confirm"
        )
    if backend.warning is not None and backend.warning != before:
        log.warning("backend %s: %s", backend.name, backend.warning)
