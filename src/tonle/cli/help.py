"""One style of help: a value is a word in capitals (N, FILE, MODEL), a switch has none.

Options say theirs with `metavar`. typer shows Python's types for the rest (`<str>` beside an argument, `<bool>` beside
--help) and braces around what is required; this takes them out.
"""

from __future__ import annotations

from functools import partial
from typing import Any


def tidy(command: Any) -> Any:
    """The command itself, and those under it, with plain help."""
    for each in getattr(command, "commands", {}).values():
        tidy(each)
    for param in command.params:
        if param.param_type_name == "argument":
            _tidy_argument(param)
    command.get_help_option = partial(plain_help_option, command.get_help_option)
    return command


def plain_help_option(make: Any, ctx: Any) -> Any:
    option = make(ctx)
    if option is not None:
        option.metavar = ""
    return option


def _tidy_argument(param: Any) -> None:
    """Its name says what it is; a type in the next column says it worse. Older typers have no such column."""
    name = param.metavar or param.name.upper()
    param.display_type_rich = lambda ctx: None
    param.get_usage_pieces = lambda ctx: [name if param.required else f"[{name}]"]
