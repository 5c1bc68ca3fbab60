"""`LoadedAdapters`: what each adapter's name stands for, in the engine.

Does: load, replace and unload as fronts ask, tell them what became of it, say which names are in use. Does not: read files
(`reader_thread.py`), keep contents (`host_adapters.py`), or decide what is on the device (`engine/schedule/adapter_slots.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from tonle.config.adapter_names import wrong_adapter_name
from tonle.engine.adapters.host_adapters import GRACE_S, HostAdapters
from tonle.engine.adapters.reader_thread import Finished, Read, ReaderThread
from tonle.engine.messages import AdapterInfo, AdapterReply, Adapters, LoadAdapter, ToFront, UnloadAdapter
from tonle.errors import CallerError
from tonle.models.adapters.adapter import HeldAdapter

log = logging.getLogger("tonle.engine")


class LoadedAdapters:
    """All on the loop's thread. `publish` hands a message to the fronts."""

    def __init__(self, read: Read, *, max_in_memory: int, publish: Callable[[ToFront], None]) -> None:
        self._reader = ReaderThread(read)
        self.host = HostAdapters(self._reader, max_in_memory)
        self._infos: dict[str, AdapterInfo] = {}
        self._publish = publish

    @property
    def message(self) -> Adapters:
        return Adapters(list(self._infos.values()))

    @property
    def is_reading(self) -> bool:
        return self._reader.is_busy

    @property
    def wake_s(self) -> float | None:
        """How long the loop may sleep before `take_read` can forget an adapter that lost its name; None: there is none."""
        return GRACE_S if self.host.has_retired else None

    def add(self, name: str, path: str, adapter: HeldAdapter) -> None:
        """`adapter` was read from `path`, which is absolute, and has this name from now on."""
        before = self._infos.get(name)
        if before is not None and before.digest == adapter.digest:
            self.host.move(before.id, path)
            self._infos[name] = AdapterInfo(name, before.id, adapter.digest, adapter.rank, path)
            return
        number = self.host.add(name, path, adapter)
        self._infos[name] = AdapterInfo(name, number, adapter.digest, adapter.rank, path)
        if before is not None:
            self.host.retire(before.id, time.monotonic())

    def handle(self, message: LoadAdapter | UnloadAdapter) -> None:
        """What a front asks for. A load is answered when the files have been read."""
        if isinstance(message, UnloadAdapter):
            self._unload(message)
        elif (wrong := wrong_adapter_name(message.name) or self._taken(message)) is not None:
            self._publish(AdapterReply(message.reply, wrong))
        else:
            self._reader.begin(message, message.path)

    def take_read(self) -> Iterable[int]:
        """Take in what has been read. Numbers of adapters that cannot be read again; the log has the reason."""
        while (finished := self._reader.take()) is not None:
            if isinstance(finished.wanted_by, LoadAdapter):
                self._load(finished.wanted_by, finished)
            elif not self.host.take_in(finished):
                assert isinstance(finished.wanted_by, int)
                yield finished.wanted_by
        if self.host.has_retired:
            self.host.drop_retired(time.monotonic())

    def names(self, numbers: Iterable[int]) -> list[str]:
        """Without repetition: of two that had one name, one after the other, both may be in use."""
        return sorted({self.host.name(number) for number in numbers})

    def close(self) -> None:
        self._reader.close()

    def _load(self, message: LoadAdapter, finished: Finished) -> None:
        error, adapter = finished.error, finished.adapter
        if adapter is None:
            assert error is not None
            words = f"adapter {message.name} cannot be loaded: {error.message}"
            self._publish(AdapterReply(message.reply, words, caller_fault=isinstance(error, CallerError)))
            return
        if (taken := self._taken(message)) is not None:  # since it was asked for
            self._publish(AdapterReply(message.reply, taken))
            return
        self.add(message.name, message.path, adapter)
        log.info("adapter %s: rank %d, %.1f MB, sha256:%s, from %s",
                 message.name, adapter.rank, adapter.num_bytes / 1e6, adapter.digest[:16], message.path)  # fmt: skip
        self._publish(self.message)
        self._publish(AdapterReply(message.reply))

    def _unload(self, message: UnloadAdapter) -> None:
        info = self._infos.pop(message.name, None)
        if info is None:
            self._publish(AdapterReply(message.reply, f"no adapter {message.name!r} is loaded"))
            return
        self.host.retire(info.id, time.monotonic())
        log.info("adapter %s is unloaded", message.name)
        self._publish(self.message)
        self._publish(AdapterReply(message.reply))

    def _taken(self, message: LoadAdapter) -> str | None:
        if message.name not in self._infos or message.replace:
            return None
        return f"adapter {message.name} is loaded already; unload it first, or replace it (replace=True; over HTTP load_inplace)"
