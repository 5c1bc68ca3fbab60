"""`Scraper`: asks backends how they are, for the sampler: /metrics of those elsewhere, the GPU of the engine in this process.

Does: ask backends of kind tonle and vllm, with the key each is set up with, every few seconds. Does not: judge their health
(`backend_pool.py` does), or read more than `BackendState` holds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from tonle.edge.buffered_reply import BufferedReply
from tonle.edge.client import UpstreamError
from tonle.gateway.backends.backend import Backend
from tonle.observe.backend_state import BackendState, read_metrics
from tonle.observe.sampler import SCRAPE_S, Sampler
from tonle.telemetry.metrics import Metrics

log = logging.getLogger("tonle.gateway")

MAX_BYTES = 4 * 1024**2  # of a reply
TIMEOUT_S = 4.0
GPU_S = 1.0
_SCRAPED = ("tonle", "vllm")


class Scraper:
    def __init__(self, backends: Sequence[Backend], sampler: Sampler, local: Metrics | None) -> None:
        """`local`: of the engine in this process, where there is one in place of backends."""
        self._backends = backends  # they come and go
        self._sampler = sampler
        self._local = local
        self._silent: dict[str, str] = {}  # backend -> why it does not tell, as the log knows it
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        if self._local is None:
            self._tasks.append(asyncio.create_task(self._scrape_often()))
        else:
            self._tasks.append(asyncio.create_task(_read_gpu_often(self._local)))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def _scrape_often(self) -> None:
        while True:
            began_s = time.monotonic()
            await self.scrape()
            await asyncio.sleep(max(0.0, SCRAPE_S - (time.monotonic() - began_s)))

    async def scrape(self) -> None:
        """Each backend once."""
        for name in self._silent.keys() - {backend.name for backend in self._backends}:
            del self._silent[name]
        await asyncio.gather(*(self._ask(backend) for backend in self._backends))

    async def _ask(self, backend: Backend) -> None:
        if backend.local or backend.kind not in _SCRAPED:
            return
        try:
            state = await _state(backend)
        except (UpstreamError, TimeoutError, ValueError) as error:
            self._note_silent(backend, str(error) or "no answer in time")
        except Exception as error:
            log.exception("reading the metrics of %s failed", backend.name)
            self._note_silent(backend, str(error))
        else:
            self._silent.pop(backend.name, None)
            self._sampler.told(state)

    def _note_silent(self, backend: Backend, why: str) -> None:
        self._sampler.lost(backend.name)
        if backend.is_up and self._silent.get(backend.name) != why:  # else the pool has said what is wrong
            self._silent[backend.name] = why
            log.info("backend %s does not tell its load: %s", backend.name, why)


async def _state(backend: Backend) -> BackendState:
    """Raises `UpstreamError`, `TimeoutError`, `ValueError`."""
    if not backend.is_up:
        raise ValueError("it is unhealthy")
    answer = BufferedReply(max_bytes=MAX_BYTES)
    async with asyncio.timeout(TIMEOUT_S):
        await backend.send("GET", "/metrics", b"", {}, answer, first_s=TIMEOUT_S)
    if answer.status != 200:
        wants_scope = "; its key needs the scope metrics" if answer.status in (401, 403) else ""
        raise ValueError(f"/metrics answers {answer.status}{wants_scope}")
    return await asyncio.to_thread(read_metrics, backend.name, answer.body, time.time())


def local_state(name: str, metrics: Metrics) -> BackendState:
    """Of the engine in this process, as it told with its last step; of its GPU, as it was read last."""
    stats, card = metrics.engine.stats, metrics.engine.card
    use = None if card is None else metrics.gpus.known(card.gpu)
    return BackendState(
        name=name,
        running=stats.num_running,
        waiting=stats.num_waiting,
        kv_usage=stats.kv_usage,
        prefix_hits=stats.prefix_hits,
        prefix_queries=stats.prefix_queries,
        prefix_missed=dict(stats.prefix_missed),
        generation_tokens=stats.generation_tokens,
        prompt_tokens=stats.prompt_tokens
        + stats.prefix_hits,  # the engine counts what it computed and what it found apart
        draft_tokens=stats.draft_tokens,
        accepted_tokens=stats.accepted_tokens,
        gpu_utilization=None if use is None else use.utilization,
        gpu_memory_used=None if use is None else use.memory_used,
        gpu_memory_total=None if use is None else use.memory_total,
        at=time.time(),
    )


async def _read_gpu_often(metrics: Metrics) -> None:
    """The driver may take its time: it is asked on a thread, once a second."""
    while True:
        card = metrics.engine.card
        if card is not None and card.gpu:
            await asyncio.to_thread(metrics.gpus.read, card.gpu)
        await asyncio.sleep(GPU_S)
