"""The Responses API from settings: where responses are stored, and what its requests may use.

Does: build. Does not: import Redis unless it is chosen.
"""

from __future__ import annotations

from collections.abc import Callable

from tonle.cache.redis_client import RedisClient
from tonle.config.gateway import GatewayConfig
from tonle.config.stores import MEMORY
from tonle.edge.exchange import Exchange
from tonle.edge.server import NO_ROOM, HttpServer
from tonle.errors import CapacityError
from tonle.gateway.apis.responses.resources import Resources
from tonle.gateway.apis.responses.response_store import MAX_BYTES, MAX_SIZE, MemoryResponses, ResponseStore
from tonle.gateway.routing.router import Router


def response_store(config: GatewayConfig) -> ResponseStore | None:
    """None: nothing is stored. Raises `ConfigError`."""
    place, ttl_s = config.responses_place, config.response_store_ttl_s
    if place is None:
        return None
    if place == MEMORY:
        max_size, max_bytes = config.response_store_max_size or MAX_SIZE, config.response_store_max_bytes or MAX_BYTES
        return MemoryResponses(ttl_s, max_size=max_size, max_bytes=max_bytes)
    from tonle.gateway.apis.responses.redis_responses import RedisResponses

    return RedisResponses(RedisClient(place, timeout_s=config.store_timeout_s, param="response_store"), ttl_s)


def shared_resources(
    config: GatewayConfig,
    router: Router,
    server: Callable[[], HttpServer],
    *,
    own_length: Callable[[], int | None] | None,
) -> Resources:
    """`server`: not asked before requests come. `own_length`: the context length of the engine in this process, if there is
    one. Raises `ConfigError`."""

    def reserve(exchange: Exchange, num_bytes: int) -> None:
        held = server().held
        if held.num_bytes + num_bytes > held.max_bytes:
            raise CapacityError(NO_ROOM)
        held.hold(exchange, exchange.num_held + num_bytes)

    def context_length(model: str | None) -> int | None:
        if own_length is not None:
            return own_length()
        models = router.public_models()
        entry = models.get(model) if model else next(iter(models.values()), None)
        return None if entry is None else entry.max_model_len

    return Resources(
        store=response_store(config), max_bytes=config.max_body_bytes, reserve=reserve, context_length=context_length
    )
