"""`Discovery`: keeps watching the sources of backends, and passes on what each of them wants.

Does: begin a source again when it fails, after a growing pause, and remember what is wrong with it. Does not: forget the backends
of a source that cannot be read: it may be the only one that does not see them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Sequence

from tonle.config.routing import BackendConfig
from tonle.gateway.discovery.source import Source, SourceLost

log = logging.getLogger("tonle.gateway")

FIRST_S = 5.0  # that a gateway waits for the first set of its sources before it starts without
PAUSE_S, MAX_PAUSE_S = 0.5, 30.0  # before a source that failed is begun again

Reconcile = Callable[[str, Sequence[BackendConfig]], None]


class Discovery:
    def __init__(self, sources: Sequence[Source], reconcile: Reconcile) -> None:
        self.sources = list(sources)
        self.problems: dict[str, str] = {}  # by source; absent: it can be read
        self._reconcile = reconcile
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Returns when each source has told its backends, or after a while: it goes on trying."""
        told = [asyncio.Event() for _ in self.sources]
        self._tasks = [
            asyncio.create_task(self._follow(source, event)) for source, event in zip(self.sources, told, strict=True)
        ]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_S):
                await asyncio.gather(*(event.wait() for event in told))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def _follow(self, source: Source, told: asyncio.Event) -> None:
        pause_s = PAUSE_S
        while True:
            problem = "it ended"
            try:
                async with contextlib.aclosing(source.watch()) as sets:  # type: ignore[type-var]
                    async for wanted in sets:
                        self._note(source, None)
                        self._reconcile(source.name, wanted)
                        told.set()
                        pause_s = PAUSE_S
            except SourceLost as error:
                problem = str(error)
            except Exception as error:
                log.exception("the source of backends %s failed", source.name)
                problem = f"{type(error).__name__}: {error}"
            self._note(source, problem)
            await asyncio.sleep(pause_s * random.uniform(0.75, 1.25))  # gateways that lost it together return apart
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def _note(self, source: Source, problem: str | None) -> None:
        before = self.problems.get(source.name)
        if problem is None:
            self.problems.pop(source.name, None)
            if before is not None:
                log.info("the source of backends %s can be read again", source.name)
        elif problem != before:
            self.problems[source.name] = problem
            log.warning(
                "the source of backends %s cannot be read, its backends stay as they are: %s", source.name, problem
            )
