"""`FrontAdapters`: the adapters of an engine, as a front knows them. Torch-free, on the front's event loop.

Does: find an adapter by its name, ask the engine to load and unload, and load again what an engine had that died. Does not:
read files (the engine does).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

from tonle.config.adapter_names import wrong_adapter_name
from tonle.engine.messages import AdapterInfo, AdapterReply, Adapters, LoadAdapter, ModelCard, ToEngine, UnloadAdapter
from tonle.errors import CallerError, EngineDied, EngineRestarting, InvalidRequest, TonleError, UnknownModel

log = logging.getLogger("tonle.engine")


class FrontAdapters:
    def __init__(self, send: Callable[[ToEngine], None]) -> None:
        self.known: dict[str, AdapterInfo] = {}
        self._send = send
        self._last_reply = 0
        self._asked: dict[int, asyncio.Future[dict[str, AdapterInfo]]] = {}  # by the number of the reply
        self._engine_id: int | None = None
        self._before: dict[str, AdapterInfo] | None = None  # of the engine that was lost, until the next one is ready
        self._restoring: dict[str, AdapterInfo] = {}  # of those, what the next engine does not have yet

    @property
    def awaited(self) -> dict[str, AdapterInfo]:
        """Those that the engine had and will have again. It is replaced with each change, never changed."""
        return self._restoring if self._before is None else self._before

    # -- down

    def find(self, name: str) -> AdapterInfo:
        """Raises `InvalidRequest`, `UnknownModel`, or `EngineRestarting` if it is on its way back."""
        if not isinstance(name, str):
            raise InvalidRequest(f"adapter must be a name or None, not {name!r:.200}", param="adapter")
        if name in self.awaited:  # also if the engine was started with another of that name
            raise EngineRestarting(f"adapter {name} is being loaded again; try again shortly", retry_after_s=2)
        if (info := self.known.get(name)) is not None:
            return info
        there = f"loaded are {', '.join(sorted(self.known))}" if self.known else "none is loaded"
        raise UnknownModel(f"there is no adapter {name!r}; {there}", param="adapter")

    async def load(self, name: str, path: str | os.PathLike[str], *, replace: bool) -> AdapterInfo:
        """Raises `InvalidRequest`, or `ModelError` if its files will not do."""
        if not isinstance(name, str):
            raise InvalidRequest(f"the name of an adapter must be a string, not {name!r}", param="name")
        if (wrong := wrong_adapter_name(name)) is not None:
            raise InvalidRequest(wrong, param="name")
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise InvalidRequest(f"path must be the folder of an adapter, not {path!r}", param="path")
        if name in self.known and not replace:
            raise InvalidRequest(
                f"adapter {name} is loaded already; unload it first, or replace it with replace=True", param="name"
            )
        loaded = await self._ask(LoadAdapter(self._number(), name, _absolute(path), replace))
        return loaded[name]  # as it was with the reply: another front may have unloaded it since

    async def unload(self, name: str) -> None:
        """Raises `UnknownModel`."""
        self.find(name)
        try:
            await self._ask(UnloadAdapter(self._number(), name))
        except CallerError as error:  # another front was faster
            raise UnknownModel(error.message, param="adapter") from None

    def _number(self) -> int:
        self._last_reply += 1
        return self._last_reply

    def _ask(self, message: LoadAdapter | UnloadAdapter) -> asyncio.Future[dict[str, AdapterInfo]]:
        """What is known with the reply."""
        asked: asyncio.Future[dict[str, AdapterInfo]] = asyncio.get_running_loop().create_future()
        self._asked[message.reply] = asked
        self._send(message)
        return asked

    # -- up

    def deliver(self, message: Adapters | AdapterReply) -> None:
        if isinstance(message, Adapters):
            self.known = {info.name: info for info in message.adapters}
            self._restoring = self._missing(self._restoring)
            return
        asked = self._asked.pop(message.reply, None)
        if asked is None or asked.done():  # the caller has left
            return
        if (error := message.exception) is None:
            asked.set_result(self.known)
        else:
            asked.set_exception(error)

    def lose(self, error: TonleError) -> None:
        """The engine is gone, or the connection to it."""
        if self._before is None:
            self._before = self.known | self._restoring
        self.known = {}
        asked, self._asked = self._asked, {}
        for future in asked.values():
            if not future.done():
                future.set_exception(EngineDied(f"the engine stopped while it worked on this adapter: {error.message}"))

    def welcome(self, card: ModelCard) -> None:
        """An engine is ready, and `known` is what it has. If it is another one than before, it gets what that one had."""
        before, self._before = self._before, None
        has_followed = self._engine_id is not None and card.engine_id != self._engine_id
        self._engine_id = card.engine_id
        self._restoring = {}
        if before is None or not has_followed or not card.max_loras:
            return
        for name in self.known.keys() - before.keys():  # it was unloaded since the first engine was started
            self._restore(UnloadAdapter(self._number(), name))
        self._restoring = self._missing(before)
        for name, info in self._restoring.items():
            self._restore(LoadAdapter(self._number(), name, info.path, replace=name in self.known))

    def _restore(self, message: LoadAdapter | UnloadAdapter) -> None:
        def restored(asked: asyncio.Future[dict[str, AdapterInfo]]) -> None:
            error = asked.exception()
            is_missing = message.name in self._restoring
            if is_missing and not isinstance(error, EngineDied):  # else the next engine gets it
                self._restoring = {name: info for name, info in self._restoring.items() if name != message.name}
            is_left = isinstance(message, UnloadAdapter) and message.name in self.known
            if error is not None and (is_missing or is_left):  # else another front was faster
                log.error("after the engine came back: %s", error)

        self._ask(message).add_done_callback(restored)

    def _missing(self, infos: dict[str, AdapterInfo]) -> dict[str, AdapterInfo]:
        """Those that the engine does not have, or has from another folder."""
        return {
            name: info for name, info in infos.items() if name not in self.known or self.known[name].path != info.path
        }


def _absolute(path: str | os.PathLike[str]) -> str:
    """The engine reads it, perhaps again later, in a process of its own."""
    return str(Path(os.path.expanduser(path)).absolute())  # noqa: PTH111 (pathlib's raises for an unknown user)
