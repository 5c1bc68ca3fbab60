"""`tonle explain`: where the time of one request went, as its server tells it: a waterfall, then sentences."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from tonle.cli import screen
from tonle.errors import CallerError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_TIMEOUT_S = 30.0
_NOT_FOUND = "request_not_found"  # the code of a server that has the path, and not the request
_BAR_CELLS = 40
_MIN_BAR_CELLS = 10
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_STYLES = {
    "accept": "bright_black", "gateway queue": "yellow", "send": "bright_black", "engine queue": "yellow",
    "prefill": "cyan", "decode": "green", "worker": "green", "deliver": "bright_black", "stalled": "red", "preempted": "red",
}  # fmt: skip


def explain(
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="The id of the request: the header X-Request-Id of its reply, or the `id` of a completion.",
        ),
    ],
    url: Annotated[
        str, typer.Option("--url", metavar="URL", help="The server that answered it, with or without /v1.")
    ] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            metavar="KEY",
            help="API key of the request's owner, or one of scope admin or dashboard.",
            envvar="OPENAI_API_KEY",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", metavar="", help="Print what the server replies.", show_default=False)
    ] = False,
) -> None:
    """Say where the time of one request went.

    Of the last 5,000 requests of a server, `tonle serve` or `tonle gateway`, since it was started.

    [dim]Example:[/dim]  tonle explain req-5a0c3f9be1d24c7788901234 --url http://127.0.0.1:8000
    """
    import msgspec

    body = asyncio.run(_ask(request_id, url, api_key))
    if as_json:
        typer.echo(msgspec.json.format(body, indent=2).decode())
    else:
        _show(msgspec.json.decode(body))


async def _ask(request_id: str, url: str, api_key: str | None) -> bytes:
    """Raises `TonleError`."""
    from tonle.cli.remote_server import RemoteServer

    server = RemoteServer(url, api_key=api_key)
    try:
        reply = await server.get(f"/v1/requests/{quote(request_id, safe='')}/explain", timeout_s=_TIMEOUT_S)
    finally:
        server.close()
    found = _decoded(reply.body)
    if (
        reply.status == HTTPStatus.OK
        and isinstance(found.get("spans"), list)
        and isinstance(found.get("request"), dict)
    ):
        return reply.body
    error = found.get("error")
    is_known_path = isinstance(error, dict) and error.get("code") == _NOT_FOUND
    if reply.status == HTTPStatus.OK or (reply.status == HTTPStatus.NOT_FOUND and not is_known_path):
        raise CallerError(f"{server.address} does not explain requests; `tonle serve` and `tonle gateway` do")
    raise server.refusal(reply, reply.body)


def _decoded(body: bytes) -> dict[str, Any]:
    """Empty if it is no JSON object."""
    import msgspec

    try:
        found = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def _show(found: dict[str, Any]) -> None:
    from rich.text import Text

    console = screen.stdout()
    console.print(Text(screen.one_line(_title(found)), style="bold"))
    console.print()
    console.print(_waterfall(found, console), soft_wrap=False)
    console.print()
    for sentence in found.get("sentences") or ():
        console.print(Text(f"- {screen.one_line(str(sentence))}"))


def _title(found: dict[str, Any]) -> str:
    row = found["request"]
    status = row.get("status") or "?"
    if row.get("http_status"):
        status += f" ({row['http_status']})"
    place = f" at {row['backend']}" if row.get("backend") not in (None, "", "local") else ""
    return f"{found.get('id')}: {row.get('path')}, {row.get('model') or 'no model'}{place}, {status}, {_ms(found.get('total_s'))}"


def _waterfall(found: dict[str, Any], console: Console) -> Table:
    """One line for each span: its bar where it lies in the whole."""
    from rich.table import Table
    from rich.text import Text

    total_s = float(found.get("total_s") or 0.0)
    cells = max(_MIN_BAR_CELLS, min(_BAR_CELLS, console.width - 60))
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(style="dim", overflow="fold")
    for span in found["spans"]:
        for level, each in ((0, span), *((1, child) for child in span.get("children") or ())):
            name = str(each.get("name"))
            bar = _bar(float(each.get("start_s") or 0), float(each.get("seconds") or 0), total_s, cells)
            table.add_row(
                Text("  " * level + screen.one_line(name)),
                _ms(each.get("seconds")),
                Text(bar, style=_STYLES.get(name, "")),
                Text(screen.one_line(str(each.get("detail") or ""))),
            )
    return table


def _bar(start_s: float, seconds: float, total_s: float, cells: int) -> str:
    """Whole cells up to its start, then as many eighths as it is long; never nothing."""
    if total_s <= 0:
        return " " * cells
    before = min(round(start_s / total_s * cells), cells - 1)
    eighths = max(1, min(round(seconds / total_s * cells * 8), (cells - before) * 8))
    bar = "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
    return (" " * before + bar).ljust(cells)


def _ms(seconds: Any) -> str:
    from tonle.observe.time_words import ms

    return ms(float(seconds or 0.0))
