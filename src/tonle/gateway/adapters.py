"""Loading and removing LoRA adapters through this server: on every backend of the model, or on none.

Does: find the backends, ask them all, take back what some did if others cannot, have the names listed again at once. Does
not: read adapters (engines do), check the caller's key (`routes.py`).

The engine of `tonle serve` is one backend here, and its own words are the reply.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

import msgspec

from tonle.edge.buffered_reply import BufferedReply
from tonle.edge.client import UpstreamError
from tonle.edge.exchange import Exchange
from tonle.errors import CallerError, InvalidRequest, TonleError, UnknownModel
from tonle.gateway import field_warnings
from tonle.gateway.backends.backend import Backend
from tonle.gateway.backends.backend_pool import BackendPool
from tonle.gateway.outgoing import STRICT_HEADER
from tonle.gateway.refusals import Forbidden, NoBackend, UpstreamFailed
from tonle.gateway.under_way import UnderWay
from tonle.protocol.adapters import (
    ADAPTER_HEADER,
    LOAD_PATH,
    PLAIN_TEXT,
    UNLOAD_PATH,
    LoadAdapterRequest,
    UnloadAdapterRequest,
    check_name,
    digest_in,
    header_value,
    loaded_text,
    unknown_adapter,
    unloaded_text,
)
from tonle.protocol.openai import FieldWarning
from tonle.protocol.parse import parse, strict_refusal
from tonle.protocol.replies import ModelEntry, body_message

log = logging.getLogger("tonle.gateway")

NO_ROUTE = "Not Found"  # of servers that do not have the path
NO_KEYS_TO_LOAD = (
    "this server has no keys, so any caller could load and remove adapters: to allow that, start it with --enable-lora; "
    "otherwise give it a key with --admin-key KEY"
)
_NOT_ALLOWED = (401, 403)
_OF_THIS_MOMENT = (408, 425, 429)  # not the caller's mistake


class Told(msgspec.Struct, frozen=True):
    """What one backend replied."""

    backend: Backend
    status: int = 0  # 0: it did not
    body: bytes = b""
    content_type: str = "application/json"
    digest: str | None = None  # of what it loaded, if it tells
    retry_after: str | None = None

    @property
    def ok(self) -> bool:
        return self.status == 200

    @property
    def message(self) -> str:
        said = body_message(self.body)
        if not self.status:
            return said
        if self.status == 404 and said == NO_ROUTE:
            return f"it has no {LOAD_PATH}; start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora"
        if self.status in _NOT_ALLOWED and said != NO_KEYS_TO_LOAD:
            return f"{said}; if it has keys, the backend's api_key here must be one with scope admin there"
        return said


class Outcome(msgspec.Struct, frozen=True):
    """The reply to the caller."""

    body: bytes
    status: int = 200
    content_type: str = PLAIN_TEXT
    digest: str | None = None
    retry_after: str | None = None


class AdapterAdmin:
    """One change at a time. A change that has begun is completed, also if its caller hangs up."""

    def __init__(self, pool: BackendPool, under_way: UnderWay, aliases: Mapping[str, str], *, strict: bool) -> None:
        self._pool = pool
        self._under_way = under_way
        self._aliases = aliases  # public name -> model
        self._strict = strict  # True: a field that has no effect is an error
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[Outcome]] = set()

    async def load(self, exchange: Exchange) -> None:
        """POST /v1/load_lora_adapter. Replies when requests can use it."""
        asked, warnings = parse(exchange.body, LoadAdapterRequest)
        self._check_strict(exchange, warnings)
        await self._complete(exchange, asked, warnings, self._load(asked))

    async def unload(self, exchange: Exchange) -> None:
        """POST /v1/unload_lora_adapter. Requests that were let in before are answered."""
        asked, warnings = parse(exchange.body, UnloadAdapterRequest)
        self._check_strict(exchange, warnings)
        await self._complete(exchange, asked, warnings, self._unload(asked))

    def _check_strict(self, exchange: Exchange, warnings: list[FieldWarning]) -> None:
        if warnings and (self._strict or exchange.header(STRICT_HEADER).lower() in ("1", "true")):
            raise strict_refusal(warnings)

    async def _complete(
        self, exchange: Exchange, asked: UnloadAdapterRequest, warnings: list[FieldWarning],
        change: Coroutine[Any, Any, Outcome],
    ) -> None:  # fmt: skip
        async def alone() -> Outcome:
            async with self._turn:
                return await change

        task = asyncio.create_task(alone())
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        try:
            outcome = await asyncio.shield(task)
        except TonleError as error:
            exchange.problem = _problem(asked, error.message)
            raise
        if outcome.status != 200:
            exchange.problem = _problem(asked, body_message(outcome.body))
        headers = [(ADAPTER_HEADER, header_value(asked.lora_name, outcome.digest))] if outcome.digest else []
        if warnings:
            headers.append((field_warnings.HEADER, field_warnings.header(warnings, "")))
        if outcome.retry_after is not None:
            headers.append(("retry-after", outcome.retry_after))
        exchange.reply(outcome.body, status=outcome.status, content_type=outcome.content_type, headers=headers)

    def _forget(self, task: asyncio.Task[Outcome]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, TonleError):
            log.error("changing a LoRA adapter failed", exc_info=error)

    # -- load

    async def _load(self, asked: LoadAdapterRequest) -> Outcome:
        if (local := self._local) is not None:
            return _as_told(await self._ask(local, LOAD_PATH, msgspec.to_builtins(asked)))
        name = asked.lora_name
        check_name(name)
        backends, skipped = self._serving(asked.base_model)
        body = {"lora_name": name, "lora_path": asked.lora_path, "load_inplace": asked.load_inplace}
        self._check_free(name, backends)
        before = {backend.name: backend.models.get(name) for backend in backends}
        told = await self._ask_all(backends, LOAD_PATH, body)
        refused = [each for each in told if not each.ok]
        digests = {each.digest for each in told if each.digest is not None}
        if refused or len(digests) > 1:
            touched = [each for each in told if each.ok or not each.status]
            undone = await self._undo_load(name, asked.lora_path, touched, before)
            await self._pool.refresh(backends)
            raise _failure(refused, undone) if refused else _differs(told, undone)
        await self._list_again(name, told)
        log.info("LoRA adapter %s is loaded from %s on %s", name, asked.lora_path, _names(backends))
        digest = digests.pop() if digests else None
        text = loaded_text(name, replaced=any(before.values()))
        return Outcome((text + _without(skipped)).encode(), digest=digest)

    def _check_free(self, name: str, backends: list[Backend]) -> None:
        """Raises `InvalidRequest` if the name means something else here."""
        if name in self._aliases:
            raise InvalidRequest(f"lora_name {name} is an alias of {self._aliases[name]} here", param="lora_name")
        for backend in self._pool.backends:
            entry = backend.models.get(name)
            if entry is not None and (backend not in backends or not entry.parent):
                what = f"an adapter of {entry.parent}" if entry.parent else "a model"
                raise InvalidRequest(f"lora_name {name} is {what} on {backend.name}; choose another", param="lora_name")

    async def _undo_load(
        self, name: str, path: str, touched: Iterable[Told], before: Mapping[str, ModelEntry | None]
    ) -> list[str]:
        """What became of it on each backend that has, or may have, loaded it."""
        done = []
        for told in touched:
            backend, old = told.backend, before[told.backend.name]
            if old is None:
                back = await self._ask(backend, UNLOAD_PATH, {"lora_name": name})
                if back.ok or not told.ok:
                    done.append(f"removed again from {backend.name}" if back.ok else f"not known of {backend.name}")
                else:
                    done.append(f"not removed from {backend.name} ({back.message})")
                continue
            old_path = _folder(old)
            if old_path is None or old_path == path:
                done.append(f"replaced on {backend.name}, whose former content cannot be restored")
                continue
            body = {"lora_name": name, "lora_path": old_path, "load_inplace": True}
            back = await self._ask(backend, LOAD_PATH, body)
            done.append(
                f"restored on {backend.name}" if back.ok else f"not restored on {backend.name} ({back.message})"
            )
        return done

    async def _list_again(self, name: str, told: list[Told]) -> None:
        """Requests for it are routed from now on, whatever a backend's list says in this moment."""
        await self._pool.refresh([each.backend for each in told])
        for each in told:
            models = each.backend.models
            if name not in models:
                parent = next(iter(_bases(each.backend)), name)
                each.backend.models = {**models, name: ModelEntry(id=name, parent=parent, digest=each.digest)}

    # -- unload

    async def _unload(self, asked: UnloadAdapterRequest) -> Outcome:
        name, local = asked.lora_name, self._local
        if local is not None and not ((entry := local.models.get(name)) and entry.parent):  # its model stays in use
            return _as_told(await self._ask(local, UNLOAD_PATH, msgspec.to_builtins(asked)))
        backends, skipped = ([local], []) if local is not None else self._having(name, asked.base_model)
        self._pool.withdrawn.add(name)
        try:
            await self._under_way.reach_engines(name)
            if local is not None:
                return _as_told(await self._ask(local, UNLOAD_PATH, msgspec.to_builtins(asked)))
            told = await self._ask_all(backends, UNLOAD_PATH, {"lora_name": name})
            refused = [each for each in told if not each.ok and not _is_gone(each, name)]
            if refused:
                undone = [await self._restore(name, each.backend) for each in told if each.ok]
                await self._pool.refresh(backends)
                raise _failure(refused, undone)
            await self._pool.refresh(backends)
            for backend in backends:  # whatever its list says in this moment
                backend.models = {known: entry for known, entry in backend.models.items() if known != name}
        finally:
            self._pool.withdrawn.discard(name)
        log.info("LoRA adapter %s is removed from %s", name, _names(backends))
        return Outcome((unloaded_text(name) + _without(skipped)).encode())

    async def _restore(self, name: str, backend: Backend) -> str:
        entry = backend.models.get(name)
        path = None if entry is None else _folder(entry)
        if path is None:
            return f"not restored on {backend.name}, whose folder of it is not known"
        back = await self._ask(backend, LOAD_PATH, {"lora_name": name, "lora_path": path})
        return f"restored on {backend.name}" if back.ok else f"not restored on {backend.name} ({back.message})"

    # -- backends

    @property
    def _local(self) -> Backend | None:
        """The engine of this process, where that is the only backend."""
        return next((backend for backend in self._pool.backends if backend.local), None)

    @property
    def _staying(self) -> list[Backend]:
        return [backend for backend in self._pool.backends if not backend.leaving]

    def _serving(self, base_model: str | None) -> tuple[list[Backend], list[Backend]]:
        """Backends of the model that can be asked, and those that are not healthy. Raises `CallerError`, `NoBackend`."""
        bases = {backend.name: _bases(backend) for backend in self._staying}
        if base_model is not None:
            model = self._aliases.get(base_model, base_model)
            found = [backend for backend in self._staying if model in bases[backend.name]]
            if not found:
                raise UnknownModel(f"no backend has a model {base_model!r} that an adapter could be for",
                                   param="base_model")  # fmt: skip
        else:
            found = [backend for backend in self._staying if bases[backend.name]]
            shared = set.intersection(*(set(bases[backend.name]) for backend in found)) if found else set()
            if found and (not shared or any(len(set(bases[backend.name].values())) > 1 for backend in found)):
                raise InvalidRequest("base_model is missing, and there are several models: say which one the adapter is for",
                                     param="base_model")  # fmt: skip
        return _split(found, "no backend has listed its models yet")

    def _having(self, name: str, base_model: str | None) -> tuple[list[Backend], list[Backend]]:
        model = None if base_model is None else self._aliases.get(base_model, base_model)
        found = []
        for backend in self._staying:
            if (entry := backend.models.get(name)) is None:
                continue
            if not entry.parent:
                raise InvalidRequest(f"lora_name {name} is a model, not an adapter", param="lora_name")
            if model is None or entry.parent == model or model in _bases(backend):
                found.append(backend)
        if not found:
            raise unknown_adapter(name)
        return _split(found, "")

    async def _ask_all(self, backends: list[Backend], path: str, body: dict[str, Any]) -> list[Told]:
        return list(await asyncio.gather(*(self._ask(backend, path, body) for backend in backends)))

    async def _ask(self, backend: Backend, path: str, body: dict[str, Any]) -> Told:
        """Never raises: what went wrong is in the result."""
        reply = BufferedReply()
        try:
            await backend.send("POST", path, msgspec.json.encode(body), {}, reply, first_s=backend.timeout_s)
        except UpstreamError as error:
            return Told(backend, body=f"no answer: {error}".encode())
        digest = digest_in(reply.headers.get(ADAPTER_HEADER))
        content_type, retry_after = reply.content_type or PLAIN_TEXT, reply.headers.get("retry-after")
        return Told(backend, reply.status, reply.body, content_type, digest, retry_after)


def _bases(backend: Backend) -> dict[str, str]:
    """Names of its models that adapters can be for, and the model behind each."""
    return {name: entry.root or name for name, entry in backend.models.items() if not entry.parent}


def _split(backends: list[Backend], problem: str) -> tuple[list[Backend], list[Backend]]:
    healthy = [backend for backend in backends if backend.unhealthy_reason is None]
    if not healthy:
        reasons = "; ".join(f"{backend.name} is unhealthy ({backend.unhealthy_reason})" for backend in backends)
        raise NoBackend(reasons or problem, retry_after_s=5)
    return healthy, [backend for backend in backends if backend not in healthy]


def _folder(entry: ModelEntry) -> str | None:
    """Where an adapter came from, if the backend tells."""
    return entry.root if entry.root and entry.root != entry.parent else None


def _is_gone(told: Told, name: str) -> bool:
    """It did not have the adapter any more."""
    return told.status == 404 and name in told.message


def _failure(refused: list[Told], undone: list[str]) -> TonleError:
    """What several backends say alike is said once."""
    by_message: dict[str, list[Backend]] = {}
    for each in refused:
        by_message.setdefault(each.message, []).append(each.backend)
    said = "; ".join(f"{_names(backends)}: {message.rstrip('.')}" for message, backends in by_message.items())
    message = f"{said}. {_as_sentence(undone)}".rstrip()
    statuses = {each.status for each in refused}
    make: Callable[..., TonleError] = UpstreamFailed
    if statuses.issubset(_NOT_ALLOWED):
        make = Forbidden
    elif all(400 <= status < 500 and status not in _OF_THIS_MOMENT for status in statuses):
        make = InvalidRequest
    return make(message)


def _differs(told: list[Told], undone: list[str]) -> CallerError:
    found = ", ".join(f"{each.backend.name} sha256:{each.digest}" for each in told if each.digest is not None)
    return InvalidRequest(
        f"the folder does not hold the same adapter for every backend: {found}. {_as_sentence(undone)}".rstrip(),
        param="lora_path",
    )


def _as_sentence(undone: list[str]) -> str:
    return f"The adapter is {', '.join(undone)}." if undone else ""


def _problem(asked: UnloadAdapterRequest, why: str) -> str:
    """For the log, which does not show the body."""
    return f"LoRA adapter {asked.lora_name}{f' from {asked.lora_path}' if asked.lora_path else ''}: {why}"


def _as_told(told: Told) -> Outcome:
    return Outcome(told.body, told.status, told.content_type, told.digest, told.retry_after)


def _without(skipped: list[Backend]) -> str:
    said = ", ".join(f"{backend.name} ({backend.unhealthy_reason})" for backend in skipped)
    return f" Not asked, because unhealthy: {said}." if skipped else ""


def _names(backends: list[Backend]) -> str:
    return ", ".join(backend.name for backend in backends)
