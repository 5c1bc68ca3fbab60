"""`EngineSleep`: the part of `InferenceEngine` that puts it to sleep."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

from tonle.engine.front import Front
from tonle.engine.machine import give_back
from tonle.engine.mailbox import ThreadMailbox
from tonle.engine.sleep import Nap, check_level
from tonle.errors import ConfigError


class EngineSleep:
    _front: Front | None
    _mailbox: ThreadMailbox | None
    _status: str
    _nap: Nap | None = None
    start: Callable[[], Any]
    stop: Callable[[float], None]
    _call: Callable[[Coroutine[Any, Any, Any]], Future[Any]]

    @property
    def is_sleeping(self) -> bool:
        return self._nap is not None or self._status == "sleeping"

    def sleep(self, level: int = 1) -> None:
        """Give memory back until `wake_up`: that of keys and values (1, on a CPU), or of weights, too (2). Requests under way end
        with an error, and so do those that come. A live model that you passed in stays yours, and in memory."""
        if self.is_sleeping:
            return
        if self._status != "running" or self._front is None or self._front.card is None:
            raise ConfigError("only a running engine can sleep; start() it first")
        check_level(level, self._front.card.device)
        if level == 2:
            self.stop(0.0)
            self._status = "sleeping"
            return
        self._nap = self._call(self._begin_nap()).result()
        give_back()

    def wake_up(self) -> None:
        """Returns when it takes requests again."""
        if self._nap is not None:
            nap, self._nap = self._nap, None
            self._call(_end(nap)).result()
        elif self._status == "sleeping":
            self._status = "stopped"
            self.start()

    async def _begin_nap(self) -> Nap:
        assert self._front is not None and self._mailbox is not None
        return Nap(self._front, self._mailbox.put)


async def _end(nap: Nap) -> None:
    nap.end()
