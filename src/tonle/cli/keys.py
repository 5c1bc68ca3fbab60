"""`tonle keys`: make, list and revoke API keys of a gateway. A running gateway notices within a second."""

from __future__ import annotations

import datetime
import enum
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from tonle.cli import screen
from tonle.errors import ConfigError


class Action(enum.StrEnum):
    create = "create"
    list = "list"
    revoke = "revoke"


class ScopeName(enum.StrEnum):
    models = "models"
    metrics = "metrics"
    admin = "admin"


_LIMIT = "Limits of the new key"
_TABLE_WIDTH = 200


def keys(
    action: Annotated[Action, typer.Argument(help="What to do.", show_default=False)],
    key_id: Annotated[str | None, typer.Argument(help="With revoke: which key.", show_default=False)] = None,
    name: Annotated[str, typer.Option(help="With create: who or what it is for.")] = "",
    scope: Annotated[list[ScopeName] | None, typer.Option(help="What it may do. Default: models.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="Models it may use. Default: all.")] = None,
    tenant: Annotated[str, typer.Option(help="Keys of one tenant share cached answers.")] = "",
    requests_per_minute: Annotated[int | None, typer.Option(min=1, rich_help_panel=_LIMIT)] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1, rich_help_panel=_LIMIT)] = None,
    max_concurrent: Annotated[int | None, typer.Option(min=1, rich_help_panel=_LIMIT)] = None,
    tokens_per_day: Annotated[int | None, typer.Option(min=1, rich_help_panel=_LIMIT)] = None,
    state_db: Annotated[
        Path | None, typer.Option(help="The gateway's file.", envvar="TONLE_STATE_DB", show_default=False)
    ] = None,
) -> None:
    """Make, list and revoke the API keys of a gateway.

    A new key is printed once, on a line of its own; only its hash is kept.

    [dim]Example:[/dim]  tonle keys create --name alice --requests-per-minute 60
    """
    from tonle.config.gateway import default_state_db
    from tonle.gateway.keys.key import SCOPES, Limits, draw
    from tonle.gateway.keys.store import KeyStore

    store = KeyStore(state_db or default_state_db())
    try:
        match action:
            case Action.create:
                if not name:
                    raise ConfigError("give the key a name: tonle keys create --name NAME", param="name")
                limits = Limits(
                    requests_per_minute=requests_per_minute,
                    tokens_per_minute=tokens_per_minute,
                    max_concurrent=max_concurrent,
                    tokens_per_day=tokens_per_day,
                )
                scopes = tuple(each for each in SCOPES if each in (scope or [ScopeName.models]))
                key, secret = draw(name, scopes=scopes, models=tuple(model or ()), limits=limits, tenant=tenant)
                store.add(key)
                screen.stderr().print(f"{key.id} for {name}. This is the only time it is shown:")
                typer.echo(secret)
            case Action.list:
                _show(store)
            case Action.revoke:
                if key_id is None:
                    raise ConfigError("say which key: tonle keys revoke KEY_ID", param="key_id")
                screen.stderr().print(f"{store.revoke(key_id).id} is revoked.")
    finally:
        store.close()


def _show(store: object) -> None:
    from tonle.gateway.keys.store import KeyStore

    assert isinstance(store, KeyStore)
    table = Table("id", "name", "scopes", "models", "limits", "tenant", "created", "state", box=None)
    for key in store.all():
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
