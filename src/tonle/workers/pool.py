"""`WorkerPool`: jobs in, results out; the model runs in processes of its own (`worker.py`)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from tonle.workers.kind import Job, Result
from tonle.workers.pool_config import PoolConfig
from tonle.workers.pool_metrics import PoolMetrics


class WorkerPool:
    def __init__(self, config: PoolConfig, *, metrics: PoolMetrics | None = None) -> None:
        """Raises `ConfigError`. `metrics`: those of the server, shared by its pools."""
        config.validate()
        self.config = config
        self.name = config.pool_name  # for logs and metrics
        self.model = config.model_name  # the name under which it is served
        self.facts: dict[str, Any] = {}  # Kind.describe() of its workers; empty until one was ready

    async def start(self) -> None:
        """Begin to start `min_instances` workers. Returns at once; jobs that come before one is ready wait."""
        raise NotImplementedError

    async def wait_ready(self) -> None:
        """Until `min_instances` workers are ready; raises what kept the first from starting."""
        raise NotImplementedError

    async def stop(self) -> None:
        raise NotImplementedError

    async def run(self, job: Job, *, timeout_s: float | None = None) -> Result:
        """Raises `TonleError`."""
        raise NotImplementedError

    async def run_all(self, jobs: Sequence[Job], *, timeout_s: float | None = None) -> list[Result]:
        """The jobs of one request, in order. Raises the first `TonleError`; the others are cancelled then."""
        raise NotImplementedError

    async def stream(self, job: Job, *, timeout_s: float | None = None) -> AsyncGenerator[Result, None]:
        """The pieces of one job as they are made. `aclose()` cancels it in the worker (contextlib.aclosing)."""
        raise NotImplementedError
        yield
