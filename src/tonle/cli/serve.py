"""`tonle serve`: one model behind HTTP. The engine runs in a process of its own; this one never loads torch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from tonle.cli import screen
from tonle.cli.banner import ServerInfo, banner, warn_if_open
from tonle.cli.device import check_device
from tonle.cli.flags import SERVE_FLAGS, ConfigOption, ModelArgument, with_flags
from tonle.config.adapter_names import check_not_models
from tonle.config.load_settings import load
from tonle.config.serve import ServeConfig
from tonle.errors import TonleError

if TYPE_CHECKING:
    from tonle.engine.messages import ModelCard
    from tonle.engine.text import Text
    from tonle.models.source import ModelSource

log = logging.getLogger("tonle.cli")


@with_flags(*SERVE_FLAGS)
def serve(model: ModelArgument = None, config: ConfigOption = None, *, flags: dict[str, Any]) -> None:
    """Serve a model over an OpenAI-compatible HTTP API.

    Every option can also be set in a file or in the environment: [bold]--max-num-seqs 64[/bold] is [bold]max_num_seqs: 64[/bold]
    in the file given with --config, and [bold]TONLE_MAX_NUM_SEQS=64[/bold] in the environment. Flags override the
    environment, which overrides the file.

    [dim]Example:[/dim]  tonle serve Qwen/Qwen2.5-0.5B-Instruct --port 9000
    """
    from tonle.child.heap import return_large_blocks
    from tonle.child.open_files import raise_limit
    from tonle.edge.interpreter import shorten_thread_switches
    from tonle.edge.listening import run
    from tonle.models.source import resolve
    from tonle.replica.frontends import bind_all
    from tonle.telemetry import logs

    raise_limit()
    return_large_blocks()
    settings = load(flags | ({"model": model} if model else {}), file=config)
    logs.configure(settings.log_level, json=settings.log_json)
    check_device(settings.device)
    with ExitStack() as stack:
        # before a model is fetched in vain
        listeners = [
            stack.enter_context(listener) for listener in bind_all(settings.host, settings.port, settings.frontends)
        ]
        warn_if_open(ServerInfo.of(listeners[0], settings), frontends=settings.frontends)
        source = resolve(settings.model, chat_template=settings.chat_template)
        shorten_thread_switches()
        run(_serve(settings, source, listeners))


async def _serve(settings: ServeConfig, source: ModelSource, listeners: list[socket.socket]) -> None:
    """Listen at once, tell when the model is ready; end with the server, or with what kept the engine from starting."""
    from tonle.engine.text import load_text
    from tonle.replica.chat_style import chat_style

    began = time.monotonic()
    name = settings.served_model_name[0] if settings.served_model_name else source.name
    check_not_models(dict(settings.lora), name)
    text = load_text(source, special_tokens_in_content=settings.special_tokens_in_content)
    chat_style(
        text, settings.tool_call_parser, settings.reasoning_parser
    )  # a wrong name is told before the engine starts
    server = ServerInfo.of(listeners[0], settings)

    def announce(card: ModelCard) -> None:
        took_s = time.monotonic() - began
        _announce(name, card, server, took_s, chats=text.chat_template is not None)

    log.info("loading %s; %s answers 503 until it is ready", source.name, server.url)
    if len(listeners) > 1:
        from tonle.cli.serve_many import serve_many

        await serve_many(settings, source, listeners, name, announce)
    else:
        await _serve_alone(settings, source, listeners[0], name, text, announce)


async def _serve_alone(
    settings: ServeConfig, source: ModelSource, listener: socket.socket, name: str, text: Text,
    announce: Callable[[ModelCard], None],
) -> None:  # fmt: skip
    """HTTP in this process."""
    from tonle.engine.front import Front
    from tonle.engine.process import EngineProcess
    from tonle.engine.sleep import SleepingProcess
    from tonle.replica.serve import serve as serve_http
    from tonle.telemetry.shutdown_messages import say_stopped

    served = None
    if settings.workers:
        from tonle.workers.serve import ServedPools

        served = ServedPools(settings.workers)
    engine = EngineProcess(source, settings.engine())
    front = Front(text, name, engine.send, hold_clusters=settings.hold_clusters)
    stop = asyncio.Event()

    async def await_model() -> None:
        try:
            await engine.wait_ready()
            if served is not None:
                await served.wait_ready()
        except TonleError:
            stop.set()
            raise
        assert front.card is not None
        announce(front.card)

    num_cut = 0
    await engine.start(front)
    model = asyncio.create_task(await_model())
    try:
        async with contextlib.nullcontext() if served is None else served.running():
            num_cut = await serve_http(
                front, settings, listener=listener, stop=stop, sleeper=SleepingProcess(engine, front),
                workers=None if served is None else served.local,
            )  # fmt: skip
        if model.done():
            model.result()  # raises what kept the engine, or a pool, from starting
    finally:
        model.cancel()
        await engine.stop()
    say_stopped(num_cut)


def _announce(name: str, card: ModelCard, server: ServerInfo, took_s: float, *, chats: bool) -> None:
    from tonle.telemetry import logs

    if logs.is_json():
        log.info("%s is ready at %s after %.1f s", name, server.url, took_s)
    else:
        screen.stdout().print(banner(name, card, server, took_s, chats=chats))
