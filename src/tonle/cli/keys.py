"""`tonle keys`: create, list and revoke the API keys in a state database. A running server notices within a second."""

from __future__ import annotations

import asyncio
import datetime
import enum
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from tonle.cli import screen
from tonle.cli.flags import ConfigOption
from tonle.config.load_settings import load_gateway
from tonle.errors import ConfigError

if TYPE_CHECKING:
    from tonle.gateway.api_keys.key import Key
    from tonle.gateway.state_store import StateStore


class ScopeName(enum.StrEnum):
    models = "models"
    metrics = "metrics"
    priority = "priority"
    gateway = "gateway"
    dashboard = "dashboard"
    admin = "admin"


_LIMITS = "Limits (default: the gateway's own)"
_TABLE_WIDTH = 200
PATIENCE_S = 10.0  # a person can wait longer for a database than a request can

keys = typer.Typer(
    name="keys",
    help="Create, list and revoke the API keys of a gateway.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)

StateOption = Annotated[
    str | None,
    typer.Option(
        "--state-db",
        metavar="PLACE",
        help="Where the gateway keeps its keys: a file, redis://… or postgresql://… (also TONLE_STATE_DB).",
        show_default=False,
    ),
]


def _limit(what: str) -> Any:
    return typer.Option(metavar="N", min=1, help=what, rich_help_panel=_LIMITS, show_default=False)


@keys.command("create")
def create(
    name: Annotated[str, typer.Option(metavar="TEXT", help="Who or what the key is for.", show_default=False)],
    scope: Annotated[
        list[ScopeName] | None,
        typer.Option(
            metavar="NAME",
            help="What it may do: models, metrics, priority (ask for more than normal priority), gateway (another gateway "
            "asks with it for its callers), dashboard (see it, change nothing) or admin; repeatable. Default: models.",
        ),
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(metavar="MODEL", help="A model it may use; repeatable. Default: all models.")
    ] = None,
    tenant: Annotated[
        str, typer.Option(metavar="NAME", help="Keys of one tenant share cached answers.", show_default=False)
    ] = "",
    requests_per_minute: Annotated[int | None, _limit("Requests per minute.")] = None,
    tokens_per_minute: Annotated[int | None, _limit("Tokens per minute, prompts and answers.")] = None,
    max_concurrent: Annotated[int | None, _limit("Requests at the same time.")] = None,
    tokens_per_day: Annotated[int | None, _limit("Tokens per day (UTC), prompts and answers.")] = None,
    audio_seconds_per_minute: Annotated[int | None, _limit("Seconds of sound per minute.")] = None,
    images_per_minute: Annotated[int | None, _limit("Images per minute.")] = None,
    state_db: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Create a key and print it once; the gateway stores only its hash.

    [dim]Example:[/dim]  tonle keys create --name alice --requests-per-minute 60
    """
    from tonle.gateway.api_keys.key import SCOPES, KeyLimits, draw

    if not name.strip():
        raise ConfigError("the name of a key must not be empty", param="name")
    limits = KeyLimits(
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        max_concurrent=max_concurrent,
        tokens_per_day=tokens_per_day,
        audio_seconds_per_minute=audio_seconds_per_minute,
        images_per_minute=images_per_minute,
    )
    scopes = tuple(each for each in SCOPES if each in (scope or [ScopeName.models]))
    key, secret = draw(name, scopes=scopes, models=tuple(model or ()), limits=limits, tenant=tenant)

    async def add(state: StateStore) -> None:
        await state.keys.add(key)

    _with_state(state_db, config, add)
    screen.stderr().print(f"Created key {key.id} for {name}. It is shown only this once:", markup=False)
    typer.echo(secret)


@keys.command("list")
def show_all(
    as_json: Annotated[
        bool,
        typer.Option("--json", metavar="", help="Print JSON, with the fields of GET /admin/keys.", show_default=False),
    ] = False,
    state_db: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """List the keys and what they may do.

    [dim]Example:[/dim]  tonle keys list --json
    """

    async def read(state: StateStore) -> None:
        found = await state.keys.all()
        if as_json:
            used = await _used_today(state, [key.id for key in found])
            entries = {"keys": [shown_key(key, used) for key in found]}
            typer.echo(json.dumps(entries, indent=2, ensure_ascii=False))
        elif found:
            _show_table(found)
        else:
            screen.stderr().print("No keys yet. [bold]tonle keys create --name NAME[/bold] creates one.")

    from tonle.gateway.admin import shown_key

    place = _place(state_db, config)
    if _is_missing(place):  # to look must not create it
        screen.stderr().print(f"No keys yet: there is no file {place}.", markup=False)
        if as_json:
            typer.echo(json.dumps({"keys": []}))
        return
    _with_state(state_db, config, read)


@keys.command("revoke")
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="KEY_ID", help="Its id, as `tonle keys list` shows it.")],
    state_db: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Revoke a key. A running gateway refuses it within a second.

    [dim]Example:[/dim]  tonle keys revoke KEY_ID
    """

    if _is_missing(place := _place(state_db, config)):
        raise ConfigError(f"there is no file {place}: no key to revoke", param="state_db")

    async def end(state: StateStore) -> None:
        key = await state.keys.revoke(key_id)
        screen.stderr().print(f"Revoked key {key.id} ({key.name}).", markup=False)

    _with_state(state_db, config, end)


def _place(state_db: str | None, config: Path | None) -> str:
    from tonle.config.gateway import default_state_db

    return load_gateway({"state_db": state_db} if state_db else {}, file=config).state_db or str(default_state_db())


def _is_missing(place: str) -> bool:
    """It would be a file, and is none."""
    from tonle.config.stores import scheme_of

    return not scheme_of(place) and not Path(place).exists()


def _with_state(state_db: str | None, config: Path | None, use: Callable[[StateStore], Awaitable[None]]) -> None:
    """Where the state is comes from the same flag, file and variables as the gateway's settings."""
    from tonle.gateway.state_store import state_of

    settings = load_gateway({"state_db": state_db} if state_db else {}, file=config)
    place = _place(state_db, config)

    async def main() -> None:
        state = state_of(place, timeout_s=max(PATIENCE_S, settings.store_timeout_s))
        try:
            await state.open()
            await use(state)
        finally:
            await state.close()

    asyncio.run(main())


async def _used_today(state: StateStore, key_ids: list[str]) -> dict[str, int]:
    """Tokens by key. From a file, what a running gateway has saved so far."""
    if state.counts is not None:
        return await state.counts.used_today(key_ids)
    today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    return {} if state.usage is None else await state.usage.usage(today)


def _show_table(keys: list[Key]) -> None:
    table = Table("id", "name", "scopes", "models", "limits", "tenant", "created (UTC)", "status", box=None)
    for key in keys:
        limits = {name: value for name in key.limits.__struct_fields__ if (value := getattr(key.limits, name))}
        created = datetime.datetime.fromtimestamp(key.created, datetime.UTC).strftime("%Y-%m-%d %H:%M")
        shown = ", ".join(f"{name}={value}" for name, value in limits.items())
        cells = (
            key.id, key.name, ", ".join(key.scopes), ", ".join(key.models) or "all", shown or "-", key.tenant or "-",
            created, "valid" if key.revoked is None else "revoked",
        )  # fmt: skip
        table.add_row(*(Text(screen.harmless(cell)) for cell in cells))
    out = screen.stdout()
    out.width = max(out.width, _TABLE_WIDTH)  # wide enough that no id is cut
    out.print(table)
