"""Settings of each kind of requests: defaults, and those that make no sense for it.

Does: name the setting and what to do. Does not: read files or ask a server.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import TYPE_CHECKING

from tonle.bench.datasets.shipped import is_shipped
from tonle.bench.kinds.metrics import METRICS, RequestKind
from tonle.errors import ConfigError

if TYPE_CHECKING:
    from tonle.bench.options import BenchOptions

PATHS: dict[RequestKind, str] = {
    "embeddings": "/v1/embeddings",
    "rerank": "/v1/rerank",
    "asr": "/v1/audio/transcriptions",
    "tts": "/v1/audio/speech",
    "images": "/v1/images/generations",
}
MAX_SOUND_SECONDS = 3600.0

# Settings that only these kinds have; of all others, only chats have those of `CHAT_SETTINGS`.
KIND_SETTINGS: dict[str, tuple[RequestKind, ...]] = {
    "items": ("embeddings", "rerank", "images"),
    "sentences": ("embeddings", "rerank", "tts", "images"),
    "audio_seconds": ("asr",),
}
CHAT_SETTINGS = (
    "endpoint", "preset", "format", "input_tokens", "output_tokens", "shared_prefix_tokens", "prefixes", "prefix_skew", "turns",
    "think_time", "prompt_kind", "graphemes", "replay", "speed", "since", "until", "ignore_eos", "temperature",
)  # fmt: skip
# Fields of the body that a benchmark sets itself.
OWN_FIELDS: dict[RequestKind, tuple[str, ...]] = {
    "chat": ("messages", "n", "prompt", "stream"),
    "embeddings": ("input",),
    "rerank": ("query", "documents"),
    "asr": ("file", "stream"),
    "tts": ("input", "stream_format"),
    "images": ("prompt", "n", "stream"),
}


def check_kind(options: BenchOptions) -> None:
    """Raise `ConfigError`."""
    defaults = {field.name: field.default for field in fields(options)}
    given = [name for name, default in defaults.items() if getattr(options, name) != default]
    refuse_settings(options.kind, given)
    for name in OWN_FIELDS[options.kind]:
        if name in options.extra_body:
            raise ConfigError(f"extra_body must not hold {name!r}: the benchmark sets it itself", param="extra_body")
    for bound in options.slo.bounds:
        limits = METRICS[options.kind].limits
        if bound.metric not in limits:
            raise ConfigError(
                f"requests of kind {options.kind} have no {bound.metric.upper()}: an SLO of theirs is about "
                f"{' or '.join(metric.upper() for metric in limits)}",
                param="slo",
            )
    for name, span in (("items", options.items), ("sentences", options.sentences)):
        if span is not None and not 1 <= span.low <= span.high:
            raise ConfigError(f"{name} {span} must be at least 1 and go upwards", param=name)
    seconds = options.audio_seconds
    if seconds is not None and not 0 < seconds.low <= seconds.high <= MAX_SOUND_SECONDS:
        raise ConfigError(
            f"audio_seconds {seconds} must be more than 0, go upwards and be at most {MAX_SOUND_SECONDS:g}",
            param="audio_seconds",
        )
    if options.file is not None and seconds is not None:
        raise ConfigError("audio_seconds is for made-up sounds, not for a folder's", param="audio_seconds")
    if options.file is not None and options.sentences is not None and not is_shipped(options.file):
        raise ConfigError("sentences is for made-up texts, not for a file's", param="sentences")


def refuse_settings(kind: RequestKind, given: Iterable[str]) -> None:
    """Raise `ConfigError` for the first of the given settings that this kind of requests does not have."""
    for name in given:
        if kind != "chat" and name in CHAT_SETTINGS:
            raise ConfigError(
                f"{name} is for chats and completions, not for requests of kind {kind}{_instead(kind)}", param=name
            )
        kinds = KIND_SETTINGS.get(name)
        if kinds is not None and kind not in kinds:
            raise ConfigError(f"{name} is for requests of kind {', '.join(kinds)}, not of kind {kind}", param=name)


def _instead(kind: RequestKind) -> str:
    own = [name for name, kinds in KIND_SETTINGS.items() if kind in kinds]
    return f", which have {', '.join([*own, 'data'])}"
