"""Flags made from the table of settings, so that a verb never lists a setting a second time.

Does: one typer option per setting, hidden ones for vLLM's flags. Does not: hold settings (`tonle.config`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from tonle.config.serve import SETTINGS
from tonle.config.setting import Setting
from tonle.config.vllm import VLLM_FLAGS, VllmFlag


def explain(what: str, default: str) -> str:
    """A help text with its default. typer cannot show it: to typer, a flag that was not given is None."""
    return rf"{what} [dim]\[default: {default}][/dim]" if default else what


_MODEL = SETTINGS["model"]

ModelArgument = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help=explain(_MODEL.help, _MODEL.type.show(None)), show_default=False),
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

# Of `tonle serve`: all settings but the model, which is an argument; then vLLM's names.
SERVE_FLAGS = (*(name for name in SETTINGS if name != "model"), *(f"vllm {name}" for name in VLLM_FLAGS))
ENGINE_FLAGS = (  # of verbs that run an engine for one person
    "device", "dtype", "max_model_len", "kv_cache_memory", "chat_template", "generation_config", "override_generation_config",
)  # fmt: skip


def with_flags(
    *names: str, table: Mapping[str, Setting] = SETTINGS
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a verb one flag per name: settings in `table`, or `vllm NAME` for a flag of vLLM's.

    The verb receives what the user set, by public name of the setting, as its parameter `flags`.
    """
    settings = {name: table[name] for name in names if not name.startswith("vllm ")}
    theirs = {f"vllm_{name[5:]}": VLLM_FLAGS[name[5:]] for name in names if name.startswith("vllm ")}

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(verb)
        def command(**arguments: Any) -> None:
            given = {name: arguments.pop(name) for name in (*settings, *theirs)}
            flags = {name: given[name] for name in settings if given[name] not in (None, [], ())}
            for name, flag in theirs.items():
                if given[name] not in (None, []):
                    for setting, value in flag.translate(given[name]).items():
                        if setting in flags or arguments.get(setting):
                            raise typer.BadParameter(_twice(flag, table[setting]))
                        flags[setting] = value
            verb(**arguments, flags=flags)

        signature = inspect.signature(verb, eval_str=True)
        own = [parameter for name, parameter in signature.parameters.items() if name != "flags"]
        parameters = [
            *own,
            *(_parameter(setting) for setting in settings.values()),
            *(_hidden(name, flag, table) for name, flag in theirs.items()),
        ]
        # typer looks at both
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def _twice(flag: VllmFlag, setting: Setting) -> str:
    ours = "the argument MODEL" if setting.name == "model" else setting.flag
    return f"{flag.flag} and {ours} set the same; give one of them."


def _parameter(setting: Setting) -> inspect.Parameter:
    is_switch = isinstance(setting.default, bool)
    is_list = isinstance(setting.default, tuple)
    spelled = f"{setting.flag}/--no-{setting.flag[2:]}" if is_switch else setting.flag
    option = typer.Option(
        *((spelled,) if setting.short is None else (spelled, setting.short)),
        metavar="" if is_switch else setting.type.metavar,
        help=explain(setting.help, setting.type.show(setting.default)),
        show_default=False,
        rich_help_panel=setting.group,
        callback=_check(setting),
    )
    plain: Any = bool if is_switch else list[str] if is_list else str
    return inspect.Parameter(
        setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[plain | None, option]
    )


def _check(setting: Setting) -> Callable[[Any], Any]:
    """A wrong value is a usage error, shown with its flag. The text is passed on as it is: `config.load` reads it."""

    def check(value: Any) -> Any:
        if value not in (None, [], ()):
            try:
                setting.type.read(value)
            except ValueError as error:
                raise typer.BadParameter(str(error)) from None
        return value

    return check


def _hidden(name: str, flag: VllmFlag, table: Mapping[str, Setting]) -> inspect.Parameter:
    """A flag of vLLM's: not in help, and checked as soon as it is read."""

    def check(value: Any) -> Any:
        if value not in (None, []):
            try:
                for setting, translated in flag.translate(value).items():
                    table[setting].type.read(translated)
            except ValueError as error:
                raise typer.BadParameter(str(error)) from None
        return value

    spelled = f"{flag.flag}/--no-{flag.flag[2:]}" if flag.switch else flag.flag
    option = typer.Option(
        *((spelled,) if flag.short is None else (spelled, flag.short)),
        metavar="", hidden=True, show_default=False, callback=check,
    )  # fmt: skip
    plain: Any = bool if flag.switch else list[str] if flag.many else str
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[plain | None, option]
    )
