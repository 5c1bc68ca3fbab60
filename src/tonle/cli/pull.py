"""`tonle pull`: fetch a model now, so that a later start needs no network."""

from __future__ import annotations

from tonle.cli import screen
from tonle.cli.flags import ConfigOption, ModelArgument
from tonle.config.load import load


def pull(model: ModelArgument = None, config: ConfigOption = None) -> None:
    """Fetch a model, so that it starts without a network later.

    [dim]Example:[/dim]  tonle pull Qwen/Qwen2.5-0.5B-Instruct
    """
    from tonle.models.source import resolve

    settings = load({"model": model} if model else {}, file=config)
    source = resolve(settings.model)
    screen.stdout().print(f"[bold]{source.name}[/bold] is at {source.path}")
