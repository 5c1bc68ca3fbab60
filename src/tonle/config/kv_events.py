"""`KvEventsConfig`: where an engine announces which KV blocks it has. The keys are those of vLLM's `--kv-events-config`.

Does: read and check them. Does not: open sockets (`engine/kv/event_publisher.py`).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tonle.errors import ConfigError

_SETTING = "kv_events_config"
_LOCAL = ("ipc://", "inproc://")


class KvEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None  # None: zmq if events are enabled
    endpoint: str | None = None  # of the PUB socket; with a * it is listened on, else connected to
    replay_endpoint: str | None = None  # of the ROUTER socket that sends recent batches again; None: there is none
    buffer_steps: int = 10_000  # batches kept for that
    hwm: int = 100_000  # messages that wait for one subscriber, before it misses some
    max_queue_size: int = (
        100_000  # batches that wait to be sent, before all subscribers are told to forget what they know
    )
    topic: str = ""  # llm-d: kv@POD_IP@MODEL
    layout: Literal["array", "map"] = "array"  # ours: of an event. vLLM up to 0.23 wrote arrays, since then maps

    @property
    def is_on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"


def read_kv_events(given: dict[str, Any] | None) -> KvEventsConfig | None:
    """None: no events are wanted. Raises `ConfigError`."""
    if given is None:
        return None
    try:
        config = msgspec.convert(given, KvEventsConfig)
    except msgspec.ValidationError as error:
        known = ", ".join(KvEventsConfig.__struct_fields__)
        raise ConfigError(f"{_SETTING}: {error}; it takes {known}", param=_SETTING) from None
    for name in ("buffer_steps", "hwm", "max_queue_size"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{_SETTING}: {name} must be at least 1, not {getattr(config, name)}", param=_SETTING)
    if not config.is_on:
        return None
    if config.endpoint is None:
        raise ConfigError(
            f"{_SETTING} has no endpoint. Events carry the token ids of prompts, so they are only sent where you say: "
            '"tcp://*:5557" listens on every interface (vLLM\'s default), "tcp://HOST:5557" connects to a router',
            param=_SETTING,
        )
    for endpoint in (config.endpoint, config.replay_endpoint):
        if endpoint is not None and not endpoint.startswith(("tcp://", *_LOCAL)):
            raise ConfigError(
                f"{_SETTING}: {endpoint!r} is no address; write tcp://*:5557, tcp://HOST:PORT or ipc://PATH",
                param=_SETTING,
            )
    return config


def is_listened_on(endpoint: str) -> bool:
    """Whether a PUB socket binds to this address rather than connecting to it: vLLM's rule."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(_LOCAL)
