"""`tonle backends`: the backends of a running gateway, over its admin API."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from tonle.cli import screen
from tonle.errors import CallerError, ConfigError

if TYPE_CHECKING:
    from tonle.cli.remote_server import RemoteServer
    from tonle.edge.buffered_reply import BufferedReply

_TIMEOUT_S = 30.0
_TABLE_WIDTH = 160
_PATH = "/admin/backends"

backends = typer.Typer(
    name="backends",
    help="List, add, change, drain and remove the backends of a running gateway.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)


class RoleName(enum.StrEnum):
    any = "any"
    prefill = "prefill"
    decode = "decode"


class KindName(enum.StrEnum):
    auto = "auto"
    tonle = "tonle"
    vllm = "vllm"
    openai = "openai"


NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="Its name, as `tonle backends list` shows it.", show_default=False)
]
UrlOption = Annotated[str, typer.Option("--url", metavar="URL", help="The gateway.")]
KeyOption = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        metavar="KEY",
        help="A key of scope admin; to list, dashboard is enough.",
        envvar="OPENAI_API_KEY",
        show_default=False,
    ),
]
WeightOption = Annotated[
    float | None, typer.Option(metavar="N", help="Its share of the load, against other backends.", show_default=False)
]
RoleOption = Annotated[
    RoleName | None, typer.Option(metavar="NAME", help="any, prefill or decode.", show_default=False)
]
RegionOption = Annotated[str | None, typer.Option(metavar="NAME", help="Where it is.", show_default=False)]
ConcurrentOption = Annotated[
    int | None, typer.Option("--max-concurrent", metavar="N", min=1, help="Requests at once.", show_default=False)
]
_GATEWAY = "http://127.0.0.1:8080"


@backends.command("list")
def show_all(
    as_json: Annotated[
        bool, typer.Option("--json", metavar="", help="Print what the gateway replies.", show_default=False)
    ] = False,
    url: UrlOption = _GATEWAY,
    api_key: KeyOption = None,
) -> None:
    """List the backends: where they are, who wants them, what they do.

    [dim]Example:[/dim]  tonle backends list --url http://127.0.0.1:8080
    """
    import msgspec

    body = _ask(url, api_key, lambda server: server.get(_PATH, timeout_s=_TIMEOUT_S))
    if as_json:
        typer.echo(msgspec.json.format(body, indent=2).decode())
        return
    found = msgspec.json.decode(body)
    _show_table(found.get("backends") or [])
    for source in found.get("sources") or ():
        if source.get("problem"):
            screen.stderr().print(f"{source['name']} cannot be read: {source['problem']}", markup=False, style="yellow")


@backends.command("add")
def add(
    backend_url: Annotated[
        str, typer.Argument(metavar="URL", help="Where the server is: http://host:8000.", show_default=False)
    ],
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Its name. Default: host:port.", show_default=False)
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL", help="A model it answers for; repeatable. Default: all that it lists."),
    ] = None,
    kind: Annotated[
        KindName | None, typer.Option(metavar="NAME", help="auto, tonle, vllm or openai.", show_default=False)
    ] = None,
    role: RoleOption = None,
    weight: WeightOption = None,
    region: RegionOption = None,
    max_concurrent: ConcurrentOption = None,
    backend_key_env: Annotated[
        str | None,
        typer.Option(
            metavar="VARIABLE",
            help="The variable of the gateway's own environment that holds the key for this server.",
            show_default=False,
        ),
    ] = None,
    url: UrlOption = _GATEWAY,
    api_key: KeyOption = None,
) -> None:
    """Add a backend. It gets requests once it has answered a probe, and is still there after a restart of the gateway.

    [dim]Example:[/dim]  tonle backends add http://10.0.0.7:8000 --name gpu-7 --weight 2
    """
    row = {
        "url": backend_url, "name": name, "models": model, "kind": kind, "role": role, "weight": weight, "region": region,
        "max_concurrent": max_concurrent, "api_key_env": backend_key_env,
    }  # fmt: skip
    body = {field: value for field, value in row.items() if value is not None}
    reply = _changed(url, api_key, lambda server: server.post(_PATH, body, timeout_s=_TIMEOUT_S))
    screen.stderr().print(f"Added {reply['name']}; kept in {reply['kept']}.", markup=False)


@backends.command("change")
def change(
    name: NameArgument,
    role: RoleOption = None,
    weight: WeightOption = None,
    region: RegionOption = None,
    max_concurrent: ConcurrentOption = None,
    url: UrlOption = _GATEWAY,
    api_key: KeyOption = None,
) -> None:
    """Change a backend while it answers.

    [dim]Example:[/dim]  tonle backends change gpu-7 --weight 0.5
    """
    given = {"role": role, "weight": weight, "region": region, "max_concurrent": max_concurrent}
    body = {field: value for field, value in given.items() if value is not None}
    if not body:
        raise ConfigError("nothing to change: give --weight, --role, --region or --max-concurrent")
    reply = _changed(url, api_key, lambda server: server.patch(_place(name), body, timeout_s=_TIMEOUT_S))
    kept = reply["kept"]
    screen.stderr().print(
        f"Changed {reply['name']}, {kept if str(kept).startswith('until') else f'kept in {kept}'}.", markup=False
    )


@backends.command("drain")
def drain(name: NameArgument, url: UrlOption = _GATEWAY, api_key: KeyOption = None) -> None:
    """Send a backend nothing new; what runs there finishes. `tonle backends resume` ends that.

    [dim]Example:[/dim]  tonle backends drain gpu-7
    """
    reply = _changed(url, api_key, lambda server: server.post(f"{_place(name)}/drain", {}, timeout_s=_TIMEOUT_S))
    screen.stderr().print(f"{reply['name']} is drained; {_busy(reply)}.", markup=False)


@backends.command("resume")
def resume(name: NameArgument, url: UrlOption = _GATEWAY, api_key: KeyOption = None) -> None:
    """Send a drained backend requests again.

    [dim]Example:[/dim]  tonle backends resume gpu-7
    """
    reply = _changed(url, api_key, lambda server: server.post(f"{_place(name)}/resume", {}, timeout_s=_TIMEOUT_S))
    screen.stderr().print(f"{reply['name']} gets requests again.", markup=False)


@backends.command("remove")
def remove(name: NameArgument, url: UrlOption = _GATEWAY, api_key: KeyOption = None) -> None:
    """Remove a backend: nothing new is sent there, what runs may finish, then it is gone.

    [dim]Example:[/dim]  tonle backends remove gpu-7
    """
    reply = _changed(url, api_key, lambda server: server.delete(_place(name), timeout_s=_TIMEOUT_S))
    note = " It is in the gateway's settings, and back when that is restarted." if reply["source"] == "settings" else ""
    screen.stderr().print(f"{reply['name']} leaves; {_busy(reply)}.{note}", markup=False)


def _busy(reply: dict[str, Any]) -> str:
    running = reply["running"]
    return "nothing runs there" if not running else f"{running} request{'s' if running > 1 else ''} may finish there"


def _place(name: str) -> str:
    return f"{_PATH}/{quote(name, safe='/:')}"


def _changed(url: str, api_key: str | None, send: Callable[[RemoteServer], Awaitable[BufferedReply]]) -> dict[str, Any]:
    import msgspec

    reply: dict[str, Any] = msgspec.json.decode(_ask(url, api_key, send))
    return reply


def _ask(url: str, api_key: str | None, send: Callable[[RemoteServer], Awaitable[BufferedReply]]) -> bytes:
    """The body of a reply. Raises `TonleError`."""
    from tonle.cli.remote_server import RemoteServer

    async def main() -> bytes:
        server = RemoteServer(url, api_key=api_key)
        try:
            reply = await send(server)
        finally:
            server.close()
        if not 200 <= reply.status < 300:
            raise server.refusal(reply, reply.body)
        if not reply.body.startswith(b"{"):
            raise CallerError(f"{server.address} is not a Tonle gateway")
        return reply.body

    return asyncio.run(main())


def _show_table(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table
    from rich.text import Text

    if not rows:
        screen.stderr().print("No backends. [bold]tonle backends add URL[/bold] adds one.")
        return
    table = Table("name", "url", "from", "region", "role", "weight", "models", "running", "waiting", "state", box=None)
    for row in rows:
        cells = (
            row["name"], row["url"], row["source"], row["region"] or "-", row["role"], f"{row['weight']:g}",
            ", ".join(row["models"]) or "-", str(row["running"]), str(row["waiting"]), _state(row),
        )  # fmt: skip
        table.add_row(*(Text(screen.harmless(cell)) for cell in cells))
    out = screen.stdout()
    out.width = max(out.width, _TABLE_WIDTH)
    out.print(table)


def _state(row: dict[str, Any]) -> str:
    if row["leaving"]:
        return "leaving"
    if row["draining"]:
        return "drained"
    if row["unhealthy_reason"]:
        return f"unhealthy: {row['unhealthy_reason']}"
    return "healthy" if row["available"] else "paused after failures"
