"""`tonle worker`: one pool of workers behind HTTP, alone or as a backend of `tonle gateway`. This process never loads torch."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tonle.cli import screen
from tonle.cli.flags import ConfigOption, with_flags
from tonle.config.load_settings import load_worker
from tonle.config.workers import WORKER_SETTINGS, WorkerServerConfig
from tonle.errors import TonleError

if TYPE_CHECKING:
    from tonle.workers.serve import ServedPools

log = logging.getLogger("tonle.cli")

_ARGUMENTS = ("kind", "model")
_FLAGS = tuple(name for name in WORKER_SETTINGS if name not in _ARGUMENTS)


@with_flags(*_FLAGS, table=WORKER_SETTINGS)
def worker(
    kind: Annotated[
        str | None,
        typer.Argument(metavar="KIND", help=WORKER_SETTINGS["kind"].help, show_default=False),
    ] = None,
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help=WORKER_SETTINGS["model"].help, show_default=False),
    ] = None,
    config: ConfigOption = None,
    *,
    flags: dict[str, Any],
) -> None:
    """Serve one pool of workers: embeddings, rerank, speech, images, or a class of your own.

    It has the keys, limits and records of [bold]tonle serve[/bold]. Behind a gateway it is a backend like any other:
    [bold]tonle gateway --backend http://127.0.0.1:8000 --backend http://127.0.0.1:8001[/bold].

    [dim]Example:[/dim]  tonle worker embeddings --port 8001 --instances 2
    """
    from tonle.child.heap import return_large_blocks
    from tonle.child.open_files import raise_limit
    from tonle.edge.interpreter import shorten_thread_switches
    from tonle.edge.listening import bind, run
    from tonle.telemetry import logs
    from tonle.workers.serve import ServedPools

    raise_limit()
    return_large_blocks()
    given = {name: value for name, value in (("kind", kind), ("model", model)) if value}
    settings = load_worker(flags | given, file=config)
    logs.configure(settings.log_level, json=settings.log_json)
    served = ServedPools([settings.pool()])
    with bind(settings.host, settings.port) as listener:
        shorten_thread_switches()
        run(_serve(settings, served, listener))


async def _serve(settings: WorkerServerConfig, served: ServedPools, listener: socket.socket) -> None:
    """Listen at once, tell when the pool is ready; end with the server, or with what kept the pool from starting."""
    from tonle.edge.listening import local_url
    from tonle.telemetry.shutdown_messages import say_stopped
    from tonle.workers.serve import build_server

    began_s, stop = time.monotonic(), asyncio.Event()
    url = local_url(*listener.getsockname()[:2], tls=settings.ssl_certfile is not None)
    server = build_server(served, settings)

    async def await_pool() -> None:
        try:
            await served.wait_ready()
        except TonleError:
            stop.set()
            raise
        _announce(served, url, time.monotonic() - began_s, settings)

    log.info("starting %s; %s answers 503 until it is ready", settings.kind, url)
    num_cut = 0
    async with served.running():
        ready = asyncio.create_task(await_pool())
        try:
            num_cut = await server.serve(listener, stop=stop)
            if ready.done():
                ready.result()  # raises what kept the pool from starting
        finally:
            ready.cancel()
    say_stopped(num_cut)


def _announce(served: ServedPools, url: str, took_s: float, settings: WorkerServerConfig) -> None:
    (pool,) = served.pools
    if settings.log_json:
        log.info("%s is ready at %s after %.1f s", pool.model, url, took_s)
        return
    from rich.markup import escape

    has_keys = bool(settings.api_key or settings.admin_key)
    facts = {
        "Model": f"{pool.model} ({pool.config.kind})",
        "Workers": f"{len(pool.config.devices)} on {pool.config.device}",
        "API": ", ".join(f"{url}{path}" for path in served.local.by_path),
        "Keys": "required, as a bearer token" if has_keys else "none",
        "Audit": settings.audit_dir or "off",
    }
    lines = [f"\n[bold green]The worker pool is ready[/bold green] after {screen.duration(took_s)}\n"]
    lines += [f"  [dim]{label:<9}[/dim] {escape(fact)}" for label, fact in facts.items()]
    screen.stdout().print("\n".join([*lines, ""]))
