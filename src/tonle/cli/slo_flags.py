"""Flags that state an SLO, the same for every verb that has one: `--ttft-p95 200ms`, `--slo ttft-p50=100ms`.

Does: give a verb these flags and turn what was given into one `Slo`. Does not: judge anything (`bench/slo.py`).

    @app.command()
    @with_slo_flags
    def tune(model: str, slo: Slo) -> None: ...
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer

from tonle.bench.slo import METRICS, Bound, Metric, Slo, parse_duration_ms
from tonle.errors import ConfigError

PANEL = "Service-level objective (SLO)"
PERCENTS = (95, 99)  # those with a flag of their own; --slo takes any

_LONG_NAMES: dict[Metric, str] = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "time between chunks of an answer (inter-token latency)",
    "e2el": "time to the end of an answer",
}
_SLO = "A limit for any percentile, such as ttft-p50=100ms; can be given several times."


def with_slo_flags(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb the flags. It receives what they say as its parameter `slo`, an `Slo` that is false if none was given."""

    @functools.wraps(verb)
    def command(**arguments: Any) -> None:
        given = {name: arguments.pop(name) for name in _NAMES}
        more = arguments.pop("slo")
        try:
            slo = slo_of(given, more or ())
        except ConfigError as error:
            raise typer.BadParameter(str(error)) from None
        verb(**arguments, slo=slo)

    signature = inspect.signature(verb, eval_str=True)
    own = [parameter for name, parameter in signature.parameters.items() if name != "slo"]
    parameters = [*own, *_parameters()]
    # typer looks at both
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def slo_of(limits: Mapping[str, str | None], more: Sequence[str] = ()) -> Slo:
    """From `{"ttft_p95": "200ms", …}` and texts such as `ttft-p50=100ms`. Raises `ConfigError`."""
    bounds = [
        Bound(*_NAMES[name], parse_duration_ms(limit, _flag(name)))
        for name, limit in limits.items()
        if limit is not None
    ]
    bounds += Slo.parse(more).bounds
    seen: set[tuple[str, float]] = set()
    for bound in bounds:
        key = (bound.metric, bound.percent)
        if key in seen:
            raise ConfigError(f"{bound.metric.upper()} p{bound.percent:g} has two limits; give one", param="slo")
        seen.add(key)
    return Slo(tuple(bounds))


_NAMES: dict[str, tuple[Metric, float]] = {
    f"{metric}_p{percent}": (metric, percent) for metric in METRICS for percent in PERCENTS
}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _parameters() -> list[inspect.Parameter]:
    made = []
    for name, (metric, percent) in _NAMES.items():
        what = f"{_LONG_NAMES[metric][0].upper()}{_LONG_NAMES[metric][1:]}"
        option = typer.Option(
            _flag(name),
            metavar="TIME",
            help=f"{what}: {percent:g} of 100 within this, such as {'8s' if metric == 'e2el' else '200ms'}.",
            show_default=False,
            rich_help_panel=PANEL,
        )
        made.append(_parameter(name, Annotated[str | None, option]))
    option = typer.Option("--slo", metavar="LIMIT", help=_SLO, show_default=False, rich_help_panel=PANEL)
    return [*made, _parameter("slo", Annotated[list[str] | None, option])]


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
