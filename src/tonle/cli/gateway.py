"""`tonle gateway`: keys, limits, audit, cache and routing in front of other servers. Never loads torch."""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING, Any

from tonle.cli import screen
from tonle.cli.banner import dashboard_line
from tonle.cli.flags import ConfigOption, with_flags
from tonle.config.gateway import SETTINGS, GatewayConfig
from tonle.config.load_settings import load_gateway

if TYPE_CHECKING:
    from tonle.gateway.gateway import Gateway

log = logging.getLogger("tonle.cli")


@with_flags(*SETTINGS, table=SETTINGS)
def gateway(config: ConfigOption = None, *, flags: dict[str, Any]) -> None:
    """Put keys, limits, an audit trail and routing in front of OpenAI-compatible servers.

    Backends with their own settings, aliases and experiments belong in a file: [bold]tonle gateway --config tonle.yaml[/bold].
    Every option can also be set in the environment: [bold]--audit-dir x[/bold] is [bold]TONLE_AUDIT_DIR=x[/bold].

    [dim]Example:[/dim]  tonle gateway --backend http://127.0.0.1:8000 --api-key secret --audit-dir audit
    """
    from tonle.child.heap import return_large_blocks
    from tonle.child.open_files import raise_limit
    from tonle.edge.interpreter import shorten_thread_switches
    from tonle.edge.listening import bind, run
    from tonle.telemetry import logs

    raise_limit()
    return_large_blocks()
    settings = load_gateway(flags, file=config)
    logs.configure(settings.log_level, json=settings.log_json)
    with bind(settings.host, settings.port) as listener:
        shorten_thread_switches()
        run(_serve(settings, listener))


async def _serve(settings: GatewayConfig, listener: socket.socket) -> None:
    from tonle.edge.listening import local_url
    from tonle.gateway.gateway import Gateway
    from tonle.telemetry.shutdown_messages import say_stopped

    server = Gateway(settings)
    url = local_url(*listener.getsockname()[:2], tls=settings.ssl_certfile is not None)
    say_stopped(await server.serve(listener, on_ready=lambda: _announce(server, url, as_log=settings.log_json)))


def _announce(server: Gateway, url: str, *, as_log: bool) -> None:
    if as_log:
        log.info("the gateway is ready at %s", url)
        return
    from rich.markup import escape

    backends = [
        f"{backend.name} ({backend.unhealthy_reason or ', '.join(backend.models)})" for backend in server.pool.backends
    ]
    facts = {
        "API": f"{url}/v1",
        "Backends": "; ".join(backends) or "none yet",
        "Keys": "none: this machine only" if server.ring.empty else "required, as a bearer token",
        "State": server.place,
        "Audit": server.config.audit_dir or "off",
    }
    if server.config.dashboard:
        facts["Dashboard"] = dashboard_line(url, has_keys=not server.ring.empty, is_closed=False)
    lines = ["\n[bold green]The gateway is ready[/bold green]\n"]
    lines += [f"  [dim]{label:<9}[/dim] {escape(fact)}" for label, fact in facts.items()]
    screen.stdout().print("\n".join([*lines, ""]))
