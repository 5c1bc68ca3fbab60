"""One engine behind HTTP: the gateway's server and pipeline in front of a replica, in one process.

Does: put them together from the settings, and serve until told to stop. Does not: start or stop the engine.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable
from dataclasses import fields, replace

from tonle.config.gateway import GatewayConfig
from tonle.config.serve import ServeConfig
from tonle.config.stores import MEMORY
from tonle.engine.front import Front
from tonle.errors import ConfigError
from tonle.gateway.backends.transport import Transport
from tonle.gateway.gateway import NO_LIMIT, Gateway
from tonle.gateway.local_server import LocalServer
from tonle.gateway.local_workers import EngineAndWorkers, LocalWorkers
from tonle.gateway.sleep_pages import Sleeper
from tonle.protocol.replies import ModelEntry
from tonle.replica.dispatch import COMPUTING, GENERATING, ReplicaTransport
from tonle.replica.replica import Replica, ReplicaOptions
from tonle.replica.salt_secret import kept_salt_secret

_SHARED = {entry.name for entry in fields(ServeConfig)} & {entry.name for entry in fields(GatewayConfig)}


def build_server(
    front: Front, settings: ServeConfig, options: ReplicaOptions | None = None, *, sleeper: Sleeper | None = None,
    workers: LocalWorkers | None = None,
) -> Gateway:  # fmt: skip
    """Raises `ConfigError`. `options` tell what no setting does: where one process is one of several. `workers`: pools beside
    the engine."""
    replica = Replica(front, options or replica_options(settings))
    transport: Transport = ReplicaTransport(replica)
    models = replica.entries
    if workers is not None:
        transport, models, workers = _with_workers(replica, transport, workers)

    def close() -> None:
        replica.draining = True

    local = LocalServer(
        transport=transport,
        models=models,
        metrics=replica.metrics,
        trust_salt=replica.options.trust_salt,
        trust_router=replica.options.trust_router,
        enable_lora=settings.enable_lora,
        context_length=lambda: None if front.card is None else front.card.context_length,
        on_drain=close,
        request_of=lambda handle: front.request_name(handle),
        salt_secret=kept_salt_secret(settings),
        sleeper=sleeper,
        workers=workers,
    )
    config = gateway_config(settings)
    if replica.metrics.shared and config.cache == MEMORY:
        config = replace(config, cache=None)  # one process could not empty the others' memory
    if replica.metrics.shared and config.responses_place == MEMORY:
        config = replace(config, response_store=None)  # the next request may come to another process
    return Gateway(config, local=local)


def _with_workers(
    replica: Replica, engine: Transport, workers: LocalWorkers
) -> tuple[Transport, Callable[[], dict[str, ModelEntry]], LocalWorkers]:
    """Both behind one transport. Raises `ConfigError` if two models have one name."""
    if same := replica.entries().keys() & workers.models().keys():
        raise ConfigError(f"the language model and a worker pool are both called {min(same)}; give one of them another name "
                          "(served_model_name, or served_name of the pool)", param="workers")  # fmt: skip
    name = replica.front.name
    by_path = dict.fromkeys((*GENERATING, *COMPUTING, "/tokenize", "/detokenize"), (name,)) | dict(workers.by_path)
    joined = EngineAndWorkers(engine, workers)
    return joined, lambda: {**replica.entries(), **workers.models()}, replace(workers, by_path=by_path)


def replica_options(settings: ServeConfig) -> ReplicaOptions:
    return ReplicaOptions(
        strict=settings.strict, aliases=settings.served_model_name[1:], trust_salt=settings.trust_salt,
        adapters=tuple(name for name, _ in settings.lora), tool_call_parser=settings.tool_call_parser,
        reasoning_parser=settings.reasoning_parser, trust_router=settings.role is not None,
    )  # fmt: skip


def gateway_config(settings: ServeConfig) -> GatewayConfig:
    """The settings both have. The engine has a queue of its own and restarts by itself: neither is guarded twice."""
    shared = {name: getattr(settings, name) for name in _SHARED}
    return GatewayConfig(**shared, backend_timeout_s=math.inf, breaker_failures=NO_LIMIT, retries=0)


async def serve(
    front: Front, settings: ServeConfig, *, listener: socket.socket, options: ReplicaOptions | None = None,
    on_ready: Callable[[], None] | None = None, stop: asyncio.Event | None = None, sleeper: Sleeper | None = None,
    workers: LocalWorkers | None = None,
) -> int:  # fmt: skip
    """Serve until SIGTERM or SIGINT, then let running requests finish for at most `drain`. Returns how many were cut off.

    `on_ready` is called when connections are accepted. Setting `stop` does what a signal does; in a thread other than
    the main one it is the only way.
    """
    server = build_server(front, settings, options, sleeper=sleeper, workers=workers)
    return await server.serve(listener, stop=stop, on_ready=on_ready)
