"""`Tracing`: which requests are traced, and their spans and metrics at their end.

Does: begin or join a trace, hand ended requests to the sender. Does not: import OpenTelemetry unless `otlp_endpoint` is set,
or take part in a request: nothing happens per token, and there is no context that code could lose.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tonle.config.observe import ObserveConfig
from tonle.errors import ConfigError
from tonle.observe.seen_request import SeenRequest
from tonle.observe.trace_context import TraceContext
from tonle.observe.trace_facts import TraceFacts

if TYPE_CHECKING:
    from tonle.observe.otlp_sender import OtlpSender

log = logging.getLogger("tonle.observe")

GATEWAY_SERVICE = "tonle-gateway"
SERVE_SERVICE = "tonle-serve"
_PATHS = ("/v1/traces", "/v1/metrics")


class Tracing:
    def __init__(self, sender: OtlpSender, share: float) -> None:
        """`share`: of traces that begin here, 0 to 1."""
        self._sender = sender
        self._share = share
        self._draw = random.Random().random
        self._failed = False

    @classmethod
    def of(cls, config: ObserveConfig, service: str) -> Tracing | None:
        """None if no collector is set. Raises `ConfigError`."""
        if config.otlp_endpoint is None:
            return None
        endpoint = _checked(config.otlp_endpoint)
        try:
            from tonle.observe.otlp_sender import OtlpSender
        except ImportError as error:
            raise ConfigError(
                "otlp_endpoint needs the OpenTelemetry SDK and its exporter for OTLP over HTTP: pip install 'tonle[otel]' "
                f"({error})",
                param="otlp_endpoint",
            ) from error
        return cls(OtlpSender(endpoint, service), config.otlp_sample)

    def begin(self, headers: Mapping[str, str]) -> TraceContext:
        """The trace a request belongs to: its caller's, recorded if the caller records it, or one that begins here."""
        theirs = TraceContext.of(headers)
        if theirs is None:
            return TraceContext.begin(sampled=self._share >= 1 or self._draw() < self._share)
        return theirs.joined() if theirs.sampled else theirs

    def ended(self, seen: SeenRequest, trace: TraceFacts | None) -> None:
        """`trace`: None if it is not recorded. Raises nothing: a request is answered whether or not it can be told of."""
        try:
            self._sender.add(seen, trace)
        except Exception:
            if not self._failed:  # the next would say the same
                self._failed = True
                log.exception("the spans of a request could not be made, id %s", seen.id)

    async def start(self) -> None:
        self._sender.start()

    async def stop(self) -> None:
        await self._sender.stop()


def _checked(endpoint: str) -> str:
    """The address without a slash at its end. Raises `ConfigError`."""
    base = endpoint.rstrip("/")
    try:
        parts = urlsplit(base)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise ConfigError(
            f"otlp_endpoint {endpoint!r} must be the address of a collector for OTLP over HTTP, such as http://127.0.0.1:4318",
            param="otlp_endpoint",
        )
    if base.endswith(_PATHS):
        raise ConfigError(
            f"otlp_endpoint {endpoint!r} must be the collector's address alone: /v1/traces and /v1/metrics are added to it",
            param="otlp_endpoint",
        )
    return base
