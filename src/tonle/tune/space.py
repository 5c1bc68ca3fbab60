"""What is searched: one row per knob, with its values on a device, the servers that have it, and whether a simulation knows it.

Does: hold the table, choose values, name settings. Does not: try any (`stage_simulated.py`, `stage_measured.py`).

Settings are a dict by the names that `tonle serve --config` reads, with what differs from the default only: {} is the default.
A running server cannot change any of these: each change needs a restart. Measurements of the same settings one after the other
do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tonle.bench.slo import NO_SLO, Slo
from tonle.config.serve import SETTINGS
from tonle.errors import ConfigError

Settings = dict[str, Any]
ServerKind = Literal["tonle", "vllm", "other"]

_TARGET_SHARES = (0.6, 0.8, 0.95)  # of an SLO's limit: how far below it the adaptive target lies
MANY_CORES = 8  # from so many on, a second front end has a core to run on


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What values are chosen by."""

    device: str  # "cpu" | "cuda"
    cpus: int = 1
    slo: Slo = NO_SLO


@dataclass(frozen=True, slots=True)
class Knob:
    name: str  # a key of `tonle serve --config`
    values: Callable[[DeviceFacts], tuple[Any, ...]]  # besides the default; empty: not searched there
    vllm_flag: str | None  # None: vLLM has no such flag, or it is not searched there
    simulated: bool  # the simulator ranks it; else it is only measured
    purpose: str
    allow: str | None = None  # the word after --allow that it needs
    changes_answers: bool = False
    alone: bool = False  # tried by itself: with it, the engine moves the other limits

    @property
    def tonle_flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def _by_device(cpu: tuple[Any, ...] = (), cuda: tuple[Any, ...] = ()) -> Callable[[DeviceFacts], tuple[Any, ...]]:
    return lambda facts: cuda if facts.device == "cuda" else cpu


def _targets(facts: DeviceFacts) -> tuple[int, ...]:
    """Below the tightest limit on gaps between tokens, in whole milliseconds."""
    limits = [bound.limit_ms for bound in facts.slo.bounds if bound.metric in ("itl", "tpot")]
    if not limits:
        return ()
    return tuple(dict.fromkeys(max(1, round(min(limits) * share)) for share in _TARGET_SHARES))


KNOBS = (
    Knob(
        "max_num_seqs",
        _by_device(cpu=(1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128),
                   cuda=(8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)),
        "--max-num-seqs",
        simulated=True,
        purpose="requests computed at the same time: fewer make each token faster, more raise throughput",
    ),
    Knob(
        "max_num_batched_tokens",
        _by_device(cpu=(32, 64, 128, 192, 256, 384, 512, 768, 1024, 2048),
                   cuda=(256, 512, 1024, 2048, 4096, 8192, 16384)),
        "--max-num-batched-tokens",
        simulated=True,
        purpose="tokens computed in one step: fewer keep gaps between tokens short, more bring first tokens earlier",
    ),
    Knob(
        "long_prefill_token_threshold",
        _by_device(cpu=(16, 32, 64, 128, 256, 512), cuda=(128, 256, 512, 1024, 2048, 4096)),
        "--long-prefill-token-threshold",
        simulated=True,
        purpose="most tokens of one prompt in a step: keeps a long prompt from delaying all others",
    ),
    Knob(
        "target_itl",
        _targets,
        None,
        simulated=True,
        purpose="adaptive limits instead of fixed ones: the engine moves them toward this time between tokens as it runs",
        alone=True,
    ),
    Knob(
        "frontends",
        lambda facts: (2, 4) if facts.cpus >= MANY_CORES and facts.device == "cuda" else (),
        None,
        simulated=False,
        purpose="HTTP processes: a fast GPU's tokens are more than one process can send",
    ),
    Knob(
        "kv_cache_dtype",
        # On a CPU auto is int8 or float32, and which is not known here: one of them would be measured against itself.
        _by_device(cuda=("fp8",)),
        "--kv-cache-dtype",
        simulated=False,
        purpose="8-bit KV cache: about twice the tokens fit",
        allow="kv-dtype",
        changes_answers=True,
    ),
    Knob(
        "quantization",
        _by_device(cpu=("int8", "int4"), cuda=("fp8", "int8", "int4")),
        None,
        simulated=False,
        purpose="weights in few bits, made as they are loaded: less memory, and less to read for each token",
        allow="quantization",
        changes_answers=True,
    ),
    Knob(
        "speculation",
        lambda facts: ("off",),  # auto is suffix, so that would be measured against itself
        None,
        simulated=False,
        purpose="no guesses from text seen before: they pay for themselves where texts repeat",
        allow="speculation",
    ),
)  # fmt: skip
BY_NAME = {knob.name: knob for knob in KNOBS}
ALLOWABLE = tuple(knob.allow for knob in KNOBS if knob.allow is not None)

# Each start of vLLM takes minutes: a coarse grid.
_VLLM_VALUES: dict[str, Callable[[DeviceFacts], tuple[Any, ...]]] = {
    "max_num_seqs": _by_device(cpu=(4, 8, 16, 32, 64), cuda=(32, 64, 128, 256, 512)),
    "max_num_batched_tokens": _by_device(cpu=(256, 512, 1024, 4096), cuda=(1024, 2048, 4096, 8192, 16384)),
    "long_prefill_token_threshold": _by_device(cpu=(128, 256), cuda=(512, 2048)),
}


@dataclass(frozen=True, slots=True)
class Choice:
    """A knob with the values that this search tries. The default, which sets nothing, is always one more."""

    name: str
    values: tuple[Any, ...]
    simulated: bool
    alone: bool = False


def checked_values(
    kind: ServerKind, own: Mapping[str, Sequence[Any]], allow: Iterable[str] = ()
) -> dict[str, tuple[Any, ...]]:
    """The caller's own values as the server's settings read them. Raises `ConfigError`."""
    allow = set(allow)
    if unknown := sorted(allow - set(ALLOWABLE)):
        raise ConfigError(f"--allow takes {', '.join(ALLOWABLE)}, not {', '.join(unknown)}", param="allow")
    if kind == "tonle" and (unknown := sorted(set(own) - set(BY_NAME))):
        raise ConfigError(
            f"--values: `tonle tune` does not search {', '.join(unknown)}; it searches {', '.join(BY_NAME)}",
            param="values",
        )
    for name, values in own.items():
        knob = BY_NAME.get(name)
        if kind != "other" and values and knob is not None and knob.allow is not None and knob.allow not in allow:
            reason = "it changes answers; " if knob.changes_answers else ""
            raise ConfigError(f"--values {name}: {reason}add --allow {knob.allow}", param="values")
    return {
        name: tuple(_read_value(name, value) for value in values) if _is_read(kind, name) else tuple(values)
        for name, values in own.items()
    }


def _is_read(kind: ServerKind, name: str) -> bool:
    """Whether Tonle knows which values the setting has: vLLM's has the same numbers, but other names of types."""
    return kind == "tonle" or (kind == "vllm" and name in BY_NAME and BY_NAME[name].simulated)


def _read_value(name: str, value: Any) -> Any:
    try:
        read = SETTINGS[name].type.read(value)
    except ValueError as error:
        raise ConfigError(f"--values {name}: {error}", param="values") from None
    if read is None:
        raise ConfigError(f"--values {name}: {value!r} is the default, which is always tried", param="values")
    return read


def choices(
    kind: ServerKind, facts: DeviceFacts, *, allow: Iterable[str] = (), own: Mapping[str, Sequence[Any]] | None = None
) -> list[Choice]:
    """What to search. `own` replaces the values of a knob (none: leave it alone), and for vLLM or another server adds flags."""
    allow = set(allow)
    own = checked_values(kind, own or {}, allow)
    found = []
    for knob in KNOBS if kind != "other" else ():
        if kind == "vllm" and knob.vllm_flag is None:
            continue
        table = _VLLM_VALUES.get(knob.name, knob.values) if kind == "vllm" else knob.values
        if knob.allow is not None and knob.allow not in allow:
            own.pop(knob.name, None)
            continue
        values = tuple(own.pop(knob.name)) if knob.name in own else table(facts)
        if values:
            found.append(Choice(knob.name, values, knob.simulated and kind == "tonle", knob.alone))
    found += [Choice(name, tuple(values), simulated=False) for name, values in own.items() if values]
    if not found:
        place = " for a place {NAME} in --command" if kind == "other" else ""
        raise ConfigError(f"there is nothing to search; give values to try{place}: --values NAME=1,2,4", param="values")
    return found


def without_effect(allow: Iterable[str], found: Iterable[Choice]) -> list[str]:
    """What to tell of words after --allow that bring nothing to search: a sentence each."""
    searched = {choice.name for choice in found}
    names = {knob.allow: knob.name for knob in KNOBS if knob.allow is not None}
    return [
        f"--allow {word} alone tries nothing on this device, whose default already is what suits it; name what to try, with "
        f"--values {names[word]}=…"
        for word in dict.fromkeys(allow)
        if names[word] not in searched
    ]


def parse_values(texts: Iterable[str]) -> dict[str, tuple[Any, ...]]:
    """Read `max_num_seqs=8,16,32`; `max_num_seqs=` leaves it alone. Raises `ConfigError`."""
    found: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        name, equals, rest = text.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        if not equals or not name:
            raise ConfigError(
                f"--values takes NAME=VALUE,VALUE such as max_num_seqs=8,16,32, not {text!r}", param="values"
            )
        if name in found:
            raise ConfigError(f"--values {name} is there twice; give all its values at once", param="values")
        found[name] = tuple(_number(part.strip()) for part in rest.split(",") if part.strip())
    return found


def _number(text: str) -> Any:
    try:
        return int(text)
    except ValueError:
        return text


def alternatives(knobs: Iterable[Choice]) -> list[Settings]:
    """Settings of knobs that are tried by themselves."""
    return [{knob.name: value} for knob in knobs if knob.alone for value in knob.values]


def variants(knobs: Iterable[Choice], base: Settings) -> list[Settings]:
    """`base` with one value of each knob that is only measured."""
    return [
        {**base, knob.name: value} for knob in knobs if not knob.simulated and not knob.alone for value in knob.values
    ]


def simulated_part(settings: Settings) -> Settings:
    """Without what the simulator does not know."""
    return {name: value for name, value in settings.items() if name in BY_NAME and BY_NAME[name].simulated}


def key_of(settings: Mapping[str, Any]) -> str:
    """The same text for the same settings."""
    return " ".join(f"{name}={settings[name]}" for name in sorted(settings))


def describe(settings: Mapping[str, Any]) -> str:
    """For people."""
    return ", ".join(f"{name} {value}" for name, value in settings.items()) or "default"


def notes_of_answers(settings: Mapping[str, Any]) -> list[str]:
    """Of each of these that changes what the model answers: what it is for, and that it does."""
    return [
        f"{name} {value}: {BY_NAME[name].purpose}; answers differ from the default's"
        for name, value in settings.items()
        if name in BY_NAME and BY_NAME[name].changes_answers
    ]
