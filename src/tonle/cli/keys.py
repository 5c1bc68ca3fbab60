"""`tonle keys`: make, list and revoke API keys of a gateway. A running gateway notices within a second."""

from __future__ import annotations

import asyncio
import datetime
import enum
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from tonle.cli import screen
from tonle.cli.flags import ConfigOption
from tonle.config.load import load_gateway
from tonle.errors import ConfigError

if TYPE_CHECKING:
    from tonle.config.gateway import GatewayConfig
    from tonle.gateway.api_keys.key import Key, KeyLimits
    from tonle.gateway.api_keys.store import KeyStore


class Action(enum.StrEnum):
    create = "create"
    list = "list"
    revoke = "revoke"


class ScopeName(enum.StrEnum):
    models = "models"
    metrics = "metrics"
    admin = "admin"


_LIMIT = "KeyLimits of the new key"
_TABLE_WIDTH = 200
PATIENCE_S = 10.0  # a person can wait longer for a server than a request can


def keys(
    action: Annotated[
        Action, typer.Argument(metavar="ACTION", help="What to do: create, list or revoke.", show_default=False)
    ],
    key_id: Annotated[
        str | None, typer.Argument(metavar="KEY_ID", help="With revoke: which key.", show_default=False)
    ] = None,
    name: Annotated[str, typer.Option(metavar="TEXT", help="With create: who or what it is for.")] = "",
    scope: Annotated[
        list[ScopeName] | None,
        typer.Option(metavar="NAME", help="What it may do: models, metrics, admin. Default: models."),
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(metavar="MODEL", help="Models it may use; give it several times. Default: all.")
    ] = None,
    tenant: Annotated[str, typer.Option(metavar="NAME", help="Keys of one tenant share cached answers.")] = "",
    requests_per_minute: Annotated[int | None, typer.Option(metavar="N", min=1, rich_help_panel=_LIMIT)] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(metavar="N", min=1, rich_help_panel=_LIMIT)] = None,
    max_concurrent: Annotated[int | None, typer.Option(metavar="N", min=1, rich_help_panel=_LIMIT)] = None,
    tokens_per_day: Annotated[int | None, typer.Option(metavar="N", min=1, rich_help_panel=_LIMIT)] = None,
    state_db: Annotated[
        str | None,
        typer.Option(
            metavar="PLACE",
            help="Where the gateway keeps them: its file, redis://… or postgresql://… (also TONLE_STATE_DB).",
            show_default=False,
        ),
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Make, list and revoke the API keys of a gateway.

    A new key is printed once, on a line of its own; only its hash is kept. Where the keys are is read from the same
    file and variables as the gateway's settings.

    [dim]Example:[/dim]  tonle keys create --name alice --requests-per-minute 60
    """
    from tonle.gateway.api_keys.key import KeyLimits

    if action is Action.create and not name:
        raise ConfigError("give the key a name: tonle keys create --name NAME", param="name")
    if action is Action.revoke and key_id is None:
        raise ConfigError("say which key: tonle keys revoke KEY_ID", param="key_id")
    settings = load_gateway({"state_db": state_db} if state_db else {}, file=config)
    limits = KeyLimits(
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        max_concurrent=max_concurrent,
        tokens_per_day=tokens_per_day,
    )
    wish = _Wish(name=name, scopes=scope or [ScopeName.models], models=model or [], tenant=tenant, limits=limits)

    async def act(store: KeyStore) -> None:
        match action:
            case Action.create:
                await _create(store, wish)
            case Action.list:
                _show(await store.all())
            case Action.revoke:
                key = await store.revoke(key_id or "")
                screen.stderr().print(f"{key.id} is revoked.")

    asyncio.run(_with_store(settings, act))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wish:
    """What the new key shall be like."""

    name: str
    scopes: list[ScopeName]
    models: list[str]
    tenant: str
    limits: KeyLimits


async def _with_store(settings: GatewayConfig, act: Callable[[KeyStore], Awaitable[None]]) -> None:
    from tonle.config.gateway import default_state_db
    from tonle.gateway.state_store import state_of

    state = state_of(settings.state_db or str(default_state_db()), timeout_s=max(PATIENCE_S, settings.store_timeout_s))
    try:
        await state.open()
        await act(state.keys)
    finally:
        await state.close()


async def _create(store: KeyStore, wish: _Wish) -> None:
    from tonle.gateway.api_keys.key import SCOPES, draw

    scopes = tuple(each for each in SCOPES if each in wish.scopes)
    key, secret = draw(wish.name, scopes=scopes, models=tuple(wish.models), limits=wish.limits, tenant=wish.tenant)
    await store.add(key)
    screen.stderr().print(f"{key.id} for {wish.name}. This is the only time it is shown:")
    typer.echo(secret)


def _show(keys: list[Key]) -> None:
    table = Table("id", "name", "scopes", "models", "limits", "tenant", "created", "state", box=None)
    for key in keys:
        limits = {name: value for name in key.limits.__struct_fields__ if (value := getattr(key.limits, name))}
        created = datetime.datetime.fromtimestamp(key.created, datetime.UTC).strftime("%Y-%m-%d %H:%M")
        shown = ", ".join(f"{name}={value}" for name, value in limits.items())
        table.add_row(
            key.id, key.name, ", ".join(key.scopes), ", ".join(key.models) or "all", shown or "-", key.tenant or "-",
            created, "valid" if key.revoked is None else "revoked",
        )  # fmt: skip
    out = screen.stdout()
    out.width = max(out.width, _TABLE_WIDTH)  # an id that is cut is of no use
    out.print(table)
