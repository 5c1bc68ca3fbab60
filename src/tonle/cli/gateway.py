"""`tonle gateway`: keys, limits, audit, cache and routing in front of servers that answer. Never loads torch."""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING, Any

from tonle.cli import screen
from tonle.cli.flags import ConfigOption, with_flags
from tonle.config.gateway import SETTINGS, GatewayConfig
from tonle.config.load_settings import load_gateway

if TYPE_CHECKING:
    from tonle.gateway.gateway import Gateway

log = logging.getLogger("tonle.cli")


@with_flags(*SETTINGS, table=SETTINGS)
def gateway(config: ConfigOption = None, *, flags: dict[str, Any]) -> None:
    """Put keys, limits, an audit trail and routing in front of OpenAI-compatible servers.

    Backends, experiments and the like are lists and stand best in a file: [bold]tonle gateway --config tonle.yaml[/bold].
    Every option can also be a variable: [bold]--audit-dir x[/bold] is [bold]TONLE_AUDIT_DIR=x[/bold].

    [dim]Example:[/dim]  tonle gateway --backend http://127.0.0.1:8000 --api-key secret --audit-dir audit
    """
    from tonle.edge.interpreter import shorten_thread_switches
    from tonle.edge.listening import bind, run
    from tonle.telemetry import logs

    settings = load_gateway(flags, file=config)
    logs.configure(settings.log_level, json=settings.log_json)
    with bind(settings.host, settings.port) as listener:
        shorten_thread_switches()
        run(_serve(settings, listener))


async def _serve(settings: GatewayConfig, listener: socket.socket) -> None:
    from tonle.edge.listening import local_url
    from tonle.gateway.gateway import Gateway
    from tonle.telemetry.goodbye import say_stopped

    door = Gateway(settings)
    url = local_url(*listener.getsockname()[:2], tls=settings.ssl_certfile is not None)
    say_stopped(await door.serve(listener, on_ready=lambda: _announce(door, url, as_log=settings.log_json)))


def _announce(door: Gateway, url: str, *, as_log: bool) -> None:
    if as_log:
        log.info("the gateway is ready at %s", url)
        return
    from rich.markup import escape

    backends = [
        f"{backend.name} ({backend.unhealthy_reason or ', '.join(backend.models)})" for backend in door.pool.backends
    ]
    facts = {
        "API": f"{url}/v1",
        "Backends": "; ".join(backends),
        "Keys": "none: this machine only" if door.ring.empty else "needed",
        "State": door.place,
        "Audit": door.config.audit_dir or "off",
    }
    lines = ["\n[bold green]The gateway is ready[/bold green]\n"]
    lines += [f"  [dim]{label:<9}[/dim] {escape(fact)}" for label, fact in facts.items()]
    screen.stdout().print("\n".join([*lines, ""]))
