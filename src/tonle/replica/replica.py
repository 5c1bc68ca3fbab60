"""`Replica`: what every endpoint of one engine shares: the front, the options, the metrics, and whether it takes work.

Does: answer "is it ready", "which models and adapters are there", "is that strict". Does not: handle requests.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple

from tonle.engine.front import Front
from tonle.engine.messages import AdapterInfo, ModelCard
from tonle.errors import ConfigError, EngineRestarting, ShuttingDown
from tonle.protocol.adapters import unknown_model
from tonle.protocol.openai import FieldWarning
from tonle.protocol.parse import strict_refusal
from tonle.protocol.replies import ModelEntry
from tonle.replica.chat_style import chat_style
from tonle.telemetry.metrics import Metrics

RETRY_AFTER_S = 5.0  # a guess at how long loading or a restart takes


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    max_choices: int = 128  # prompts x n of one request
    strict: bool = False  # True: a field that would only be warned about is an error (per request: X-Tonle-Strict: 1)
    aliases: tuple[str, ...] = ()  # more names the model answers to
    adapters: tuple[str, ...] = ()  # those that the engine loads when it starts
    tool_call_parser: str = "auto"  # the format of tool calls; auto: as the chat template says
    reasoning_parser: str = "auto"  # the same of thoughts; none: thoughts are content
    trust_salt: bool = False  # True: the header X-Tonle-Salt says who shares cached prefixes; only behind a gateway

    trust_router: bool = False  # True: kv_transfer_params of requests are acted on; only behind a router

    # Where this process is one of several front ends
    metrics_dir: str | None = None  # the folder in which all of them count
    started_s: float | None = None  # when the server began, `time.monotonic()`; None = with this process

    def __post_init__(self) -> None:
        """Raises `ConfigError`."""
        if self.max_choices <= 0:
            raise ConfigError(f"max_choices must be more than 0, not {self.max_choices}", param="max_choices")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRequest:
    """What an endpoint is asked: an HTTP request without its connection."""

    method: str
    path: str
    body: bytes
    headers: dict[str, str]  # names in lower case
    salt: bytes = b""  # requests with different salts share no cached prefix

    def header(self, name: str) -> str:
        """Empty if absent."""
        return self.headers.get(name, "")

    def answer_id(self, prefix: str) -> str:
        """OpenAI's prefix, then the request's id."""
        return f"{prefix}-{self.header('x-request-id').removeprefix('req-')}"


class _Listed(NamedTuple):
    """Names that can be asked for, and what they were made of."""

    adapters: dict[str, AdapterInfo]
    awaited: dict[str, AdapterInfo]
    is_ready: bool
    entries: dict[str, ModelEntry]


class Replica:
    def __init__(self, front: Front, options: ReplicaOptions) -> None:
        """Raises `ConfigError` if there is no such parser."""
        self.front = front
        self.options = options
        self.chat_style = chat_style(front.text, options.tool_call_parser, options.reasoning_parser)
        self.metrics = Metrics(front.name, front, shared_dir=options.metrics_dir)
        self._listed: _Listed | None = None
        self.started_s = time.monotonic() if options.started_s is None else options.started_s
        self.draining = False  # set when told to stop: finish what runs, take nothing new

    @property
    def names(self) -> list[str]:
        return [self.front.name, *self.options.aliases]

    def why_not_ready(self) -> str | None:
        if self.draining:
            return "the server is shutting down"
        if self.front.failure is not None:
            return f"the engine is not running: {self.front.failure.message}"
        if not self.front.ready:
            return "the model is still being loaded"
        return None

    def card(self) -> ModelCard:
        """The model's card. Raises `CapacityError` (503) unless new work is welcome."""
        reason, card = self.why_not_ready(), self.front.card
        if reason is not None or card is None:
            kind = ShuttingDown if self.draining else EngineRestarting
            raise kind(f"not ready: {reason}", retry_after_s=RETRY_AFTER_S)
        return card

    def entries(self) -> dict[str, ModelEntry]:
        """All names that can be asked for: the model's own, then those of its adapters, also of those that the engine will
        have shortly: a request for one is not for an unknown model, but comes too early."""
        front, listed = self.front, self._listed
        adapters, awaited, is_ready = front.adapters, front.awaited_adapters, front.ready
        if (
            listed is None
            or listed.adapters is not adapters  # the front replaces both with each change
            or listed.awaited is not awaited
            or listed.is_ready != is_ready
        ):
            listed = self._listed = _Listed(adapters, awaited, is_ready, self._list(adapters, awaited, is_ready))
        return listed.entries

    def _list(
        self, adapters: dict[str, AdapterInfo], awaited: dict[str, AdapterInfo], is_ready: bool
    ) -> dict[str, ModelEntry]:
        name = self.front.name
        found = {own: ModelEntry(id=own, root=name) for own in self.names}
        for adapter in (*adapters.values(), *awaited.values()):
            entry = ModelEntry(id=adapter.name, root=name, parent=name, digest=adapter.digest)
            found.setdefault(adapter.name, entry)
        for adapter_name in () if is_ready else self.options.adapters:
            found.setdefault(adapter_name, ModelEntry(id=adapter_name, root=name, parent=name))
        return found

    def adapter(self, model: str) -> str | None:
        """`model`, if that is an adapter."""
        return model if self.entries()[model].parent is not None else None

    def resolve(self, model: str | None) -> str:
        """The name to answer under. Raises `UnknownModel`, or `InvalidRequest` if it is a path or a URL."""
        if model is None:
            return self.front.name
        if model not in (entries := self.entries()):
            which = "language model is" if len(entries) == 1 else "language models are"
            raise unknown_model(model, f"its {which} {', '.join(entries)}")
        return model

    def check_strict(self, request: ReplicaRequest, warnings: list[FieldWarning]) -> None:
        """Raises `InvalidRequest` if there are warnings and the caller or the server is strict about them."""
        strict = self.options.strict or request.header("x-tonle-strict").lower() in ("1", "true")
        if strict and warnings:
            raise strict_refusal(warnings)
