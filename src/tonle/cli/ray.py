"""`tonle ray`: replicas on a Ray cluster: up, status, down. Never loads torch."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from tonle.cli import screen
from tonle.cli.flags import with_flags
from tonle.config.load_settings import load_ray
from tonle.config.ray import RAY_SETTINGS
from tonle.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from tonle.scaleout.ray_service import RayService

_POLL_S = 1.0

ray = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False, no_args_is_help=True)

_NAME, _ADDRESS = RAY_SETTINGS["name"], RAY_SETTINGS["address"]
NameOption = Annotated[str, typer.Option("--name", metavar="NAME", help="Which service, as `tonle ray up` named it.")]
AddressOption = Annotated[str, typer.Option("--address", metavar="ADDRESS", help=_ADDRESS.help)]


@ray.callback()
def about() -> None:
    """Run replicas of `tonle serve` on a Ray cluster: as many as the load needs."""


@ray.command("up")
@with_flags(*RAY_SETTINGS, table=RAY_SETTINGS)
def up(
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", show_default=False,
                     help="Settings of `tonle serve`, and a section `ray:` with those below. Without one: the default model."),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", metavar="", help="Wait until all replicas have these settings and are ready.")
    ] = True,
    wait_timeout: Annotated[float, typer.Option(metavar="S", min=1, help="How long to wait, in seconds.")] = 1800,
    *,
    flags: dict[str, Any],
) -> None:  # fmt: skip
    """Start replicas, or give those that run new settings, one after the other.

    [dim]Example:[/dim]  tonle ray up --config tonle.yaml --max-replicas 8
    """
    serve, settings, content = load_ray(flags, file=config)
    out = _own_output()
    with _service(settings.name, settings.address) as service:
        from tonle.scaleout.ray_plan import plan_of

        url = service.up(plan_of(serve, settings, content, cluster_gpus=service.num_gpus))
        out.print(f"Gateways find the replicas of {settings.name} with [bold]--discovery {escape(url)}[/bold]")
        if wait:
            _wait(service, wait_timeout)


@ray.command("status")
def status(
    name: NameOption = _NAME.default,
    address: AddressOption = _ADDRESS.default,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print JSON.")] = False,
) -> None:
    """Show the replicas of a service.

    [dim]Example:[/dim]  tonle ray status --json
    """
    with _service(name, address) as service:
        facts = service.status()
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    out = screen.stdout()
    out.print(
        f"{escape(name)}: {facts['wanted'] or 'some'} replicas are wanted; list for gateways: {escape(facts['list_url'])}"
    )
    if facts["problem"] is not None:
        out.print(f"[red]{escape(facts['problem'])}[/red]")
    table = Table("replica", "state", "for", "address", "running", "waiting", "KV use", box=None)
    for each in facts["replicas"]:
        state = each["state"] + ("" if each["settings"] == "new" else f", {each['settings']} settings")
        figures = [_shown(each["running"]), _shown(each["waiting"]), _shown(each["kv_use"])]
        table.add_row(each["id"], state, f"{each['for_s']:.0f} s", each["url"] or "waits for a node", *figures)
    out.print(table)


@ray.command("down")
def down(
    name: NameOption = _NAME.default,
    address: AddressOption = _ADDRESS.default,
    now: Annotated[bool, typer.Option("--now", metavar="", help="Do not wait for running requests: end them.")] = False,
    timeout: Annotated[
        float, typer.Option(metavar="S", min=1, help="How long running requests may take, in seconds.")
    ] = 660,
) -> None:
    """Drain and stop all replicas of a service, and its controller.

    [dim]Example:[/dim]  tonle ray down
    """
    with _service(name, address) as service:
        if not now:
            _drain(service, timeout)
        service.remove()
    screen.stdout().print(f"{escape(name)} is down")


def _drain(service: RayService, timeout_s: float) -> None:
    """Until no replica is left, or time is up."""
    facts = service.status()
    service.close()
    ends_s = time.monotonic() + timeout_s
    while facts["replicas"] and time.monotonic() < ends_s:
        time.sleep(_POLL_S)
        facts = service.status()


@contextlib.contextmanager
def _service(name: str, address: str) -> Iterator[RayService]:
    """Connected. Meanwhile what is printed goes to standard error: Ray tells there what it notices, such as a node that died."""
    try:
        from tonle.scaleout.ray_service import RayService
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise ConfigError("Ray is not installed on this machine: pip install 'tonle[ray]'") from None
    with contextlib.redirect_stdout(sys.stderr):
        service = RayService(name, address)
        try:
            yield service
        finally:
            service.disconnect()


def _own_output() -> Console:
    """Standard output, though it may be redirected later."""
    out = screen.stdout()
    out.file = sys.stdout
    return out


def _wait(service: RayService, timeout_s: float) -> None:
    """Raises `CapacityError`. Ctrl-C ends the waiting, nothing else."""
    out, told = screen.stderr(), ""
    ends_s = time.monotonic() + timeout_s
    while time.monotonic() < ends_s:
        facts = service.status()
        wanted = facts["wanted"]  # None: it has not looked yet
        new = [each for each in facts["replicas"] if each["settings"] == "new"]
        ready = sum(each["state"] == "ready" for each in new)
        if wanted is not None and ready >= wanted and len(new) == len(facts["replicas"]):
            out.print(f"{ready} of {wanted} replicas are ready")
            return
        line = f"{ready} of {wanted or '?'} replicas are ready; {_rest(facts['replicas'])}"
        if facts["problem"] is not None:
            line += f"; {facts['problem']}"
        if line != told:
            told = line
            out.print(escape(line))
        time.sleep(_POLL_S)
    raise CapacityError(
        f"not all replicas were ready after {timeout_s:g} s; the controller goes on: see `tonle ray status`"
    )


def _rest(replicas: list[dict[str, Any]]) -> str:
    places = sum(each["url"] is None for each in replicas)
    old = sum(each["settings"] == "old" for each in replicas)
    return f"{places} wait for a node, {old} have old settings"


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
