"""`tonle serve --frontends N`: the parent of N front ends and one engine. It starts, watches and stops them; no more."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable
from contextlib import closing

from tonle.config.serve import ServeConfig
from tonle.engine.messages import ModelCard, ToFront
from tonle.engine.process import EngineProcess
from tonle.errors import TonleError
from tonle.models.source import ModelSource
from tonle.replica.frontend import FrontendSettings
from tonle.replica.frontends import Frontends, engine_listener, shared_folder
from tonle.telemetry import logs
from tonle.telemetry.shutdown_messages import AT_ONCE

log = logging.getLogger("tonle.cli")


class EngineWatch:
    """Hears from the engine only whether it is there; front ends have connections of their own."""

    def __init__(self) -> None:
        self.card: ModelCard | None = None

    def deliver(self, message: ToFront) -> None:
        if isinstance(message, ModelCard):
            self.card = message

    def lose(self, error: TonleError) -> None:
        self.card = None


async def serve_many(
    settings: ServeConfig, source: ModelSource, listeners: list[socket.socket], name: str,
    announce: Callable[[ModelCard], None],
) -> None:  # fmt: skip
    """Until SIGTERM or Ctrl-C and the drain after it; or until the engine or a front end cannot start."""
    with shared_folder() as folder:
        listener, address = engine_listener(folder)
        frontend_settings = FrontendSettings(
            source=source,
            name=name,
            created=int(time.time()),
            engine_address=address,
            settings=settings,
            metrics_dir=str(folder),
            started_s=time.monotonic(),
            log_level=logs.level(),
            log_json=logs.is_json(),
        )
        with closing(listener):
            engine = EngineProcess(source, settings.engine(), listener=listener)
            try:
                await _run(engine, Frontends(frontend_settings, listeners), announce)
            finally:
                await engine.stop()
    log.info("stopped")  # a front end that cut requests off has said so


async def _run(engine: EngineProcess, fronts: Frontends, announce: Callable[[ModelCard], None]) -> None:
    watch, loop = EngineWatch(), asyncio.get_running_loop()

    async def await_model() -> None:
        try:
            await engine.wait_ready()
        except TonleError:
            fronts.stop()
            raise
        if await fronts.wait_ready() and watch.card is not None:
            announce(watch.card)

    def on_signal() -> None:
        if not fronts.stopping:
            log.info("stopping; %s", AT_ONCE)
        fronts.stop()

    await engine.start(watch)
    await fronts.start()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    model = asyncio.create_task(await_model())
    try:
        await fronts.wait()
        if model.done():
            model.result()  # raises what kept the engine from starting
    finally:
        model.cancel()
        await asyncio.gather(model, return_exceptions=True)
