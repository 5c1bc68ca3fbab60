"""Flags made from the table of knobs, so that a verb never lists a setting a second time."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from tonle.config.knobs import Knob
from tonle.config.serve import KNOBS


def explain(what: str, default: str) -> str:
    """A help text with its default. Defaults of knobs are ours to show: to typer, a flag that was not given is None."""
    return rf"{what} [dim]\[default: {default}][/dim]" if default else what


_MODEL = KNOBS["model"]

ModelArgument = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help=explain(_MODEL.help, _MODEL.kind.show(None)), show_default=False),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="YAML file with settings, one `name: value` per line (also TONLE_CONFIG).",
        show_default=False,
    ),
]

SERVE_FLAGS = tuple(name for name in KNOBS if name != "model")  # the model is an argument
ENGINE_FLAGS = (  # of verbs that run an engine for one person
    "device", "dtype", "max_model_len", "kv_cache_memory", "chat_template", "generation_config", "override_generation_config",
)  # fmt: skip


def with_flags(*names: str, table: Mapping[str, Knob] = KNOBS) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a verb one flag per knob. It receives those the user set, by public name, as its parameter `flags`."""

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(verb)
        def command(**arguments: Any) -> None:
            flags = {name: value for name in names if (value := arguments.pop(name)) not in (None, [], ())}
            verb(**arguments, flags=flags)

        signature = inspect.signature(verb, eval_str=True)
        own = [parameter for name, parameter in signature.parameters.items() if name != "flags"]
        parameters = [*own, *(_parameter(table[name]) for name in names)]
        # typer looks at both
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def _parameter(knob: Knob) -> inspect.Parameter:
    is_switch = isinstance(knob.default, bool)
    is_list = isinstance(knob.default, tuple)
    option = typer.Option(
        f"{knob.flag}/--no-{knob.flag[2:]}" if is_switch else knob.flag,
        metavar="" if is_switch else knob.kind.metavar,
        help=explain(knob.help, knob.kind.show(knob.default)),
        show_default=False,
        rich_help_panel=knob.group,
        callback=_check(knob),
    )
    plain: Any = bool if is_switch else list[str] if is_list else str
    return inspect.Parameter(
        knob.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[plain | None, option]
    )


def _check(knob: Knob) -> Callable[[Any], Any]:
    """A wrong value is a usage error, told beside its flag. The text goes on as it is: `config.load` reads it."""

    def check(value: Any) -> Any:
        if value not in (None, [], ()):
            try:
                knob.kind.read(value)
            except ValueError as error:
                raise typer.BadParameter(str(error)) from None
        return value

    return check
