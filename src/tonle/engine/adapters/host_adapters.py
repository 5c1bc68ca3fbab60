"""`HostAdapters`: the content of each adapter, by its number, as far as it is in the host's memory.

Does: give numbers, keep the adapters used last, have the others read again when they are wanted, and check that their files still
hold the same. Does not: know names (`loaded_adapters.py`), or slots on the device.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from tonle.engine.adapters.reader_thread import Finished, ReaderThread
from tonle.models.adapters.adapter import HeldAdapter

log = logging.getLogger("tonle.engine")

GRACE_S = 30.0  # for requests that were on their way when their adapter was unloaded or replaced


@dataclass(slots=True)
class _Known:
    name: str
    path: str
    digest: str
    retired_s: float | None = None  # when it lost its name


class HostAdapters:
    """For the scheduler: `knows`, `want`, `unwant`. For the runner: `get`. All on the loop's thread."""

    def __init__(self, reader: ReaderThread, max_in_memory: int) -> None:
        self.is_used: Callable[[int], bool] = lambda adapter: False  # by requests; the scheduler knows
        self._reader = reader
        self._max_in_memory = max_in_memory
        self._known: dict[int, _Known] = {}
        self._in_memory: OrderedDict[int, HeldAdapter] = OrderedDict()  # used last comes last
        self._wanted: set[int] = set()  # on their way to the device: they stay
        self._reading: set[int] = set()
        self._retired: set[int] = set()
        self._last_id = 0

    @property
    def num_in_memory(self) -> int:
        return len(self._in_memory)

    def add(self, name: str, path: str, adapter: HeldAdapter) -> int:
        """Its number from now on."""
        self._last_id += 1
        self._known[self._last_id] = _Known(name, path, adapter.digest)
        self._keep(self._last_id, adapter)
        return self._last_id

    def move(self, number: int, path: str) -> None:
        """Its files are found there from now on."""
        self._known[number].path = path

    def retire(self, number: int, now: float) -> None:
        """It has lost its name. It is kept for the requests that use it, and for those on their way."""
        self._known[number].retired_s = now
        self._retired.add(number)

    def drop_retired(self, now: float) -> None:
        """Forget those that lost their names a while ago and that no request uses."""
        for number in list(self._retired):
            retired_s = self._known[number].retired_s or 0.0
            if now - retired_s >= GRACE_S and not self.is_used(number) and number not in self._wanted | self._reading:
                self._retired.remove(number)
                self._in_memory.pop(number, None)
                del self._known[number]

    @property
    def has_retired(self) -> bool:
        return bool(self._retired)

    def name(self, number: int) -> str:
        return self._known[number].name

    # -- for the scheduler

    def knows(self, adapter: int) -> bool:
        return adapter in self._known

    def want(self, adapter: int) -> bool:
        self._wanted.add(adapter)
        if adapter in self._in_memory:
            return True
        if adapter not in self._reading:
            self._reading.add(adapter)
            self._reader.begin(adapter, self._known[adapter].path)
        return False

    def unwant(self, adapter: int) -> None:
        self._wanted.discard(adapter)

    # -- for the runner

    def get(self, adapter: int) -> HeldAdapter:
        """To load it into a slot."""
        self._wanted.discard(adapter)
        self._in_memory.move_to_end(adapter)
        return self._in_memory[adapter]

    # -- from the reader

    def take_in(self, finished: Finished) -> bool:
        """One that was read again. False if it cannot be used: the log says why, with paths that callers need not see."""
        number = finished.wanted_by
        assert isinstance(number, int)
        self._reading.discard(number)
        known, adapter = self._known[number], finished.adapter
        if adapter is None:
            assert finished.error is not None
            log.error("adapter %s had to be read again, which failed: %s", known.name, finished.error.message)
            return False
        if adapter.digest != known.digest:
            log.error("adapter %s had to be read again, but the files in %s have changed since it was loaded: load it again",
                      known.name, known.path)  # fmt: skip
            return False
        self._keep(number, adapter)
        return True

    def _keep(self, number: int, adapter: HeldAdapter) -> None:
        self._in_memory[number] = adapter
        free = [n for n in self._in_memory if n not in self._wanted and n != number]  # unused for longest first
        unused = [n for n in free if not self.is_used(n)]
        # A retired one that requests use cannot be read again: its files may be another's by now.
        used = [n for n in free if n not in unused and n not in self._retired]
        for other in [*unused, *used][: max(0, len(self._in_memory) - self._max_in_memory)]:
            del self._in_memory[other]
