"""Flags that say what is sent: a preset, lengths, a file, conversations, or the replay of an audit trail.

Does: give a verb these flags, and turn what was given into settings of `BenchOptions`. Does not: read files or send.

    @app.command()
    @with_data_flags(before="seed")
    def bench(url: str, data: dict[str, Any], seed: int) -> None: ...
"""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from tonle.bench.datasets.presets import PRESETS, preset_list, preset_settings
from tonle.bench.datasets.shipped import SHIPPED
from tonle.bench.options import Pause, Span
from tonle.cli.screen import show_error
from tonle.errors import ConfigError

COULD_NOT_START = 2

REPLAY_PANEL = "Replay of an audit trail"
_prompts = partial(typer.Option, rich_help_panel="Prompts", show_default=False)
_replay = partial(typer.Option, rich_help_panel=REPLAY_PANEL, show_default=False)


class PromptKindName(enum.StrEnum):
    auto = "auto"
    ids = "ids"
    words = "words"


class FormatName(enum.StrEnum):
    jsonl = "jsonl"
    sharegpt = "sharegpt"
    openai_batch = "openai-batch"


_PRESET = f"A named workload: {', '.join(PRESETS)}. `--preset list` says what each is; other options go over it."
_DATA = (
    "Send prompts from a file: JSON lines with a prompt or messages on each, ShareGPT conversations, or an OpenAI batch file. "
    f"Or a set that comes with Tonle: {', '.join(SHIPPED)}. In `tonle bench --kind asr`, a folder of WAV files."
)
_SKEW = "How unevenly prefixes are drawn: 0 evenly, 1 the n-th 1/n as often as the first (Zipf)."
_TURNS = (
    "Conversations of so many turns, each sent after the answer to the one before; with a file, at most so many of each. "
    "--requests and --rate then count conversations."
)
_KIND = "Synthetic prompts: ids (exact length), words (approximate length), or auto: ids if the server accepts them."
_REPLAY = "Send the requests of this audit trail again, when they were sent then, and name the answers that changed."

# Flags by the name of their parameter. None: not given.
_FLAGS: dict[str, Any] = {
    "preset": Annotated[str | None, _prompts(metavar="NAME", help=_PRESET)],
    "input_tokens": Annotated[
        str | None, _prompts(metavar="N|N-N", help="Tokens per prompt: 128 (the default), or a range such as 32-400.")
    ],
    "output_tokens": Annotated[
        str | None, _prompts(metavar="N|N-N", help="Tokens per answer: 64 (the default), or a range such as 128-512.")
    ],
    "shared_prefix_tokens": Annotated[
        int | None,
        _prompts(metavar="N", help="Tokens that all prompts have in common at the start, in addition to their own."),
    ],
    "prefixes": Annotated[
        int | None,
        _prompts(metavar="N", help="So many different shared prefixes; each request begins with one of them."),
    ],
    "prefix_skew": Annotated[float | None, _prompts(metavar="N", help=_SKEW)],
    "turns": Annotated[str | None, _prompts(metavar="N|N-N", help=_TURNS)],
    "think_time": Annotated[
        str | None,
        _prompts(metavar="N|N-N", help="Seconds between an answer and the next turn: 2, or a range such as 0.5-5."),
    ],
    "prompt_kind": Annotated[PromptKindName | None, _prompts(metavar="NAME", help=_KIND)],
    "file": Annotated[Path | None, _prompts("--data", "--dataset", "--file", metavar="NAME|FILE|FOLDER", help=_DATA)],
    "format": Annotated[
        FormatName | None,
        _prompts(metavar="NAME", help="Of the file: jsonl, sharegpt or openai-batch. Default: seen from its content."),
    ],
    "graphemes": Annotated[
        bool | None,
        _prompts(
            "--graphemes/--no-graphemes",
            metavar="",
            help=f"Count the letters of answers (grapheme clusters) too. Default: with --data {', '.join(SHIPPED)}.",
        ),
    ],
    "replay": Annotated[Path | None, _replay(metavar="DIR", help=_REPLAY)],
    "speed": Annotated[float | None, _replay(metavar="N", help="So many times as fast as recorded. Default: 1.")],
    "since": Annotated[
        str | None, _replay(metavar="TIME", help="From this time on, in UTC: 2025-01-31 or 2025-01-31T09:30.")
    ],
    "until": Annotated[str | None, _replay(metavar="TIME", help="Up to this time.")],
}


def with_data_flags(*, before: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a verb the flags, before its parameter of that name. It receives settings of `BenchOptions` as `data`."""

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(verb)
        def command(**arguments: Any) -> None:
            given = {name: arguments.pop(name) for name in _FLAGS}
            if given["preset"] == "list":
                typer.echo(preset_list())
                raise typer.Exit
            try:
                if given["replay"] is not None and arguments.get("concurrency") is not None:
                    raise ConfigError("a replay sends requests when they were recorded: --concurrency cannot be set as well",
                                      param="concurrency")  # fmt: skip
                data = data_settings(given)
            except ConfigError as error:
                show_error(error)
                raise typer.Exit(COULD_NOT_START) from None
            verb(**arguments, data=data)

        signature = inspect.signature(verb, eval_str=True)
        parameters: list[inspect.Parameter] = []
        for name, parameter in signature.parameters.items():
            if name == before:
                parameters += _parameters()
            if name != "data":
                parameters.append(parameter)
        # typer looks at both
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def _parameters() -> list[inspect.Parameter]:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [inspect.Parameter(name, kind, default=None, annotation=flag) for name, flag in _FLAGS.items()]


def data_settings(given: dict[str, Any]) -> dict[str, Any]:
    """Settings of `BenchOptions`: the preset's, and over them what was given. Raises `ConfigError`."""
    given = {name: value for name, value in given.items() if value is not None}
    preset = given.pop("preset", None)
    if preset is not None:
        for name in ("file", "replay"):
            if name in given:
                raise ConfigError(f"a preset is for synthetic prompts, not for {'a file' if name == 'file' else 'a replay'}",
                                  param="preset")  # fmt: skip
    settings = {} if preset is None else preset_settings(preset)
    settings["answers_as_recorded"] = "output_tokens" not in given
    for name in ("input_tokens", "output_tokens", "turns"):
        if name in given:
            given[name] = Span.parse(given[name], name)
    if "think_time" in given:
        given["think_time"] = Pause.parse(given["think_time"], "think_time")
    for name in ("prompt_kind", "format"):
        if name in given:
            given[name] = given[name].value
    return settings | given
