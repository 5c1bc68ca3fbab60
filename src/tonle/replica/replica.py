"""`Replica`: what every endpoint shares: the front, the options, the metrics, and whether we are open.

Does: answer "is it ready", "is that our model", "is that strict". Does not: handle requests.
"""

from __future__ import annotations

import time

from tonle.engine.messages import ModelCard
from tonle.errors import EngineRestarting, ShuttingDown, UnknownModel
from tonle.protocol.openai import FieldWarning
from tonle.protocol.parse import strict_refusal
from tonle.replica.exchange import Exchange
from tonle.replica.options import ReplicaOptions
from tonle.replica.served import Served
from tonle.telemetry.metrics import Metrics

RETRY_AFTER_S = 5.0  # a guess at how long loading or a restart takes
_HEADER_CHARS = 256  # of X-Tonle-Warnings


class Replica:
    def __init__(self, front: Served, options: ReplicaOptions) -> None:
        self.front = front
        self.options = options
        self.metrics = Metrics(front.name, front, shared_dir=options.metrics_dir)
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

    def resolve(self, model: str | None) -> str:
        """The name to answer under. Raises `NotFound`."""
        if model is None:
            return self.front.name
        if model not in self.names:
            raise UnknownModel(
                f"there is no model {model!r} here; this server has {', '.join(self.names)}", param="model"
            )
        return model

    def check_strict(self, exchange: Exchange, warnings: list[FieldWarning]) -> None:
        """Raises `InvalidRequest` if there are warnings and the caller or the server is strict about them."""
        strict = self.options.strict or exchange.header("x-tonle-strict").lower() in ("1", "true")
        if strict and warnings:
            raise strict_refusal(warnings)


def warning_headers(warnings: list[FieldWarning]) -> list[tuple[str, str]]:
    """`X-Tonle-Warnings: 2; user, top_a`. Field names come from the caller: only plain ASCII goes into a header."""
    if not warnings:
        return []
    names = ", ".join(warning.param for warning in warnings).encode("unicode_escape").decode()
    return [("x-tonle-warnings", f"{len(warnings)}; {names}"[:_HEADER_CHARS].rstrip())]
