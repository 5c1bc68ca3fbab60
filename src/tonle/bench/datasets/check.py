"""Settings about what is sent that make no sense together.

Does: name the setting and what to do. Does not: read files or ask a server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tonle.errors import ConfigError

if TYPE_CHECKING:
    from tonle.bench.options import BenchOptions


def check_data(options: BenchOptions) -> None:
    """Raise `ConfigError`."""
    if options.prefixes < 1:
        raise ConfigError(f"prefixes must be at least 1, not {options.prefixes}", param="prefixes")
    if options.prefixes > 1 and not options.shared_prefix_tokens:
        raise ConfigError("several prefixes need their length: give shared_prefix_tokens too", param="prefixes")
    if options.turns is not None and not 1 <= options.turns.low <= options.turns.high:
        raise ConfigError(f"turns {options.turns} must be at least 1 and go upwards", param="turns")
    if options.think_time.high < options.think_time.low:
        raise ConfigError(f"think_time {options.think_time} must go upwards", param="think_time")
    _check_endpoint(options)
    if options.replay is not None:
        _check_replay(options)
    elif options.since is not None or options.until is not None or options.speed != 1.0:
        raise ConfigError("speed, since and until are for a replay: give the trail with replay", param="replay")
    if options.file is not None and (options.shared_prefix_tokens or options.prompt_kind != "auto"):
        raise ConfigError("a shared prefix and a prompt kind are for synthetic prompts, not for a file's", param="file")
    if options.file is None and options.format is not None:
        raise ConfigError("a format is for a file: give it with data", param="format")


def _check_endpoint(options: BenchOptions) -> None:
    if options.prompt_kind == "ids" and options.endpoint == "chat":
        raise ConfigError(
            "the chat endpoint takes no token ids: use prompt kind words, or the completions endpoint",
            param="prompt_kind",
        )
    if options.turns is not None and (options.endpoint == "completions" or options.prompt_kind == "ids"):
        raise ConfigError(
            "conversations (turns) need the chat endpoint and prompts of words, not completions or token ids",
            param="turns",
        )


def _check_replay(options: BenchOptions) -> None:
    unused = {
        "rate": options.rates,
        "ramp": options.ramp,
        "sweep": options.sweep,
        "data": options.file,
        "turns": options.turns,
        "shared_prefix_tokens": options.shared_prefix_tokens,
        "endpoint": options.endpoint,
    }
    for name, value in unused.items():
        if value:
            raise ConfigError(
                f"a replay sends what was recorded, when it was recorded: {name} cannot be set as well", param=name
            )
    if options.processes > 1:
        raise ConfigError("a replay is sent by one process: leave processes at 1", param="processes")
