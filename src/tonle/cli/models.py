"""`tonle models` and `tonle pull`: the models on this machine, and how to add one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tonle.cli import screen
from tonle.cli.flags import ConfigOption, ModelArgument
from tonle.config.gguf_parts import all_parts
from tonle.config.load_settings import load

if TYPE_CHECKING:
    from tonle.models.source import ModelSource

_UNBROKEN = 10_000  # columns


def models(
    as_json: Annotated[
        bool, typer.Option("--json", metavar="", help="Print JSON instead of a table.", show_default=False)
    ] = False,
) -> None:
    """List the models on this machine: those Tonle downloaded, and those in the Hugging Face cache.

    [dim]Example:[/dim]  tonle models --json
    """
    from tonle.models.source import cached_models

    found = cached_models()
    if as_json:
        typer.echo(json.dumps([_entry(source) for source in found], indent=2, ensure_ascii=False))
    elif found:
        _show_table(found)
    else:
        screen.stderr().print("No models yet. [bold]tonle pull[/bold] downloads the default one.")


def pull(model: ModelArgument = None, config: ConfigOption = None) -> None:
    """Download a model, so that it can start without a network later.

    [dim]Example:[/dim]  tonle pull Qwen/Qwen2.5-0.5B-Instruct
    """
    from tonle.models.source import resolve

    settings = load({"model": model} if model else {}, file=config)
    source = resolve(settings.model)
    screen.stdout().print(f"[bold]{source.name}[/bold] is at {source.path}")


def _entry(source: ModelSource) -> dict[str, str | int]:
    return {"name": source.name, "kind": source.kind, "bytes": _num_bytes(source.path), "path": str(source.path)}


def _show_table(sources: list[ModelSource]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("Model", "Kind", "Size", "Path"):
        table.add_column(column, justify="right" if column == "Size" else "left", overflow="fold")
    for source in sources:
        entry = _entry(source)
        table.add_row(source.name, source.kind, screen.size(_num_bytes(source.path)), Text(str(entry["path"])))
    console = screen.stdout()
    if not console.is_terminal:
        console.width = _UNBROKEN  # one model, one line
    console.print(table, soft_wrap=False)


def _num_bytes(path: Path) -> int:
    """On disk, links followed: the hub keeps a folder of links to its files."""
    files = all_parts(path) if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)
