"""`tonle rollout`: replace the replicas behind a gateway one by one, with no failed request."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tonle.cli import screen
from tonle.config import values
from tonle.config.values import ValueType
from tonle.errors import ConfigError

if TYPE_CHECKING:
    from tonle.scaleout.rollout.replacement import ReplacePlan
    from tonle.scaleout.rollout.rollout import RestartPlan

ROLLED_BACK = 3  # exit status
_TERMINATED = 143  # 128 + SIGTERM, what shells report
_TIME, _SHARE = values.duration(), values.fraction()


def _checked(kind: ValueType) -> Any:
    """A wrong value is a usage error, shown with its flag."""

    def check(value: str | None) -> str | None:
        if value is not None:
            try:
                kind.read(value)
            except ValueError as error:
                raise typer.BadParameter(str(error)) from None
        return value

    return check


def _time(help: str) -> Any:
    return typer.Option(metavar="TIME", help=help, callback=_checked(_TIME))


def _share(help: str) -> Any:
    return typer.Option(metavar="SHARE", help=help, callback=_checked(_SHARE), rich_help_panel="Canary")


def rollout(
    gateway: Annotated[
        list[str], typer.Option(metavar="URL", help="The gateway. Repeat it for each gateway in front of the same replicas.")
    ] = ["http://127.0.0.1:8080"],  # noqa: B006
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", metavar="KEY", envvar="TONLE_ADMIN_KEY", show_default=False,
                     help="A key of the gateway with scope admin."),
    ] = None,
    restart: Annotated[
        str | None,
        typer.Option(metavar="COMMAND", show_default=False,
                     help="Restarts one replica; {name} and {url} are filled in. It must not end before the old server has."),
    ] = None,
    replace: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OLD=URL",
            show_default=False,
            help="Or: a new server, already started, takes the place of backend OLD. Repeat it for more.",
        ),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", show_default=False, help="This backend only. Repeat it for more.")
    ] = None,
    drain_timeout: Annotated[str, _time("How long the requests of a replica may take to end.")] = "10m",
    command_timeout: Annotated[str, _time("How long COMMAND may take.")] = "10m",
    ready_timeout: Annotated[str, _time("How long a replica may take until it is healthy.")] = "15m",
    canary: Annotated[
        str | None, _share("The first one gets this share of the requests, such as 10%, and is compared with the others.")
    ] = None,
    watch: Annotated[
        str, typer.Option(metavar="TIME", help="How long.", callback=_checked(_TIME), rich_help_panel="Canary")
    ] = "5m",
    warm_up: Annotated[
        str, typer.Option(metavar="TIME", help="Requests before this do not count: its caches are cold.",
                          callback=_checked(_TIME), rich_help_panel="Canary"),
    ] = "15s",
    max_failures: Annotated[str, _share("It may fail on this share of its requests more than the others.")] = "1%",
    max_slowdown: Annotated[str, _share("Its p95 of TTFT and ITL may be longer by this share.")] = "25%",
    min_requests: Annotated[
        int, typer.Option(metavar="N", min=5, help="With fewer requests it is not judged, and taken back in the end.",
                          rich_help_panel="Canary"),
    ] = 20,
    rollback: Annotated[
        str | None,
        typer.Option(metavar="COMMAND", show_default=False, rich_help_panel="Canary",
                     help="Brings back what ran before, if the canary is worse. Without it, the canary stays drained."),
    ] = None,
) -> None:  # fmt: skip
    """Replace the replicas behind a gateway one by one, with no failed request.

    Each is drained, restarted by your command (--restart) or exchanged for another (--replace), and gets requests once it is
    healthy. Exit status: 0 all are done, 1 an error, 3 the canary was worse and was taken back, 130 Ctrl-C; no replica stays
    drained but a canary that was worse.

    [dim]Example:[/dim]  tonle rollout --restart 'systemctl restart tonle@{name}' --canary 10% --watch 5m
    """
    from tonle.scaleout.rollout.canary import CanaryPlan
    from tonle.scaleout.rollout.judge import Tolerance
    from tonle.scaleout.rollout.replacement import ReplacePlan
    from tonle.scaleout.rollout.rollout import Limits, RestartPlan

    if (restart is None) == (not replace):
        raise ConfigError("give --restart COMMAND, or --replace OLD=URL", param="restart")
    if replace and (only or rollback):
        raise ConfigError(
            "--only and --rollback belong to --restart; --replace says itself what is replaced", param="only"
        )
    tolerance = Tolerance(
        failure_rate=_SHARE.read(max_failures), latency=_SHARE.read(max_slowdown), min_requests=min_requests
    )
    trial = None if canary is None else CanaryPlan(
        share=_SHARE.read(canary), watch_s=_TIME.read(watch), warm_up_s=_TIME.read(warm_up), tolerance=tolerance
    )  # fmt: skip
    limits = Limits(
        drain_s=_TIME.read(drain_timeout), command_s=_TIME.read(command_timeout), ready_s=_TIME.read(ready_timeout)
    )
    plan: RestartPlan | ReplacePlan
    if restart is not None:
        plan = RestartPlan(restart=restart, rollback=rollback, only=tuple(only or ()), canary=trial, limits=limits)
    else:
        plan = ReplacePlan(pairs=tuple(_pair(each) for each in replace or ()), canary=trial, limits=limits)
    try:
        asyncio.run(_roll(gateway, api_key, plan))
    except asyncio.CancelledError:
        raise typer.Exit(_TERMINATED) from None


def _pair(text: str) -> tuple[str, str]:
    old, equals, url = text.partition("=")
    if not (old and equals and url):
        raise ConfigError(f"--replace must be OLD=URL, such as a=http://10.0.0.7:8000, not {text!r}", param="replace")
    return old, url if "://" in url else f"http://{url}"


async def _roll(urls: list[str], api_key: str | None, plan: RestartPlan | ReplacePlan) -> None:
    from tonle.scaleout.rollout.gateway_admin import GatewayAdmin
    from tonle.scaleout.rollout.gateways import Gateways
    from tonle.scaleout.rollout.replacement import Replacement, ReplacePlan
    from tonle.scaleout.rollout.rollout import RolledBackError, Rollout

    def say(line: str) -> None:
        out.print(line, markup=False)

    out = screen.stdout()
    gateways = Gateways([GatewayAdmin(url, api_key=api_key) for url in urls])
    _end_as_by_ctrl_c()
    try:
        if isinstance(plan, ReplacePlan):
            names = await Replacement(gateways, plan, say).run()
        else:
            names = await Rollout(gateways, plan, say).run()
    except RolledBackError as error:
        screen.show_error(error)
        raise typer.Exit(ROLLED_BACK) from None
    finally:
        gateways.close()
    out.print(f"{screen.count(len(names), 'replica')} replaced")


def _end_as_by_ctrl_c() -> None:
    """SIGTERM takes back what is half done, too."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
