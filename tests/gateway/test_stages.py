"""The order of the stages, seen from outside: which of them a request passes, however it ends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.running_gateway import Upstream, run, running_gateway
from tonle.gateway.auth import Auth
from tonle.gateway.backends.backend import Backend
from tonle.gateway.cached_reply import CachedReplies
from tonle.gateway.call import Call
from tonle.gateway.limits.memory_limiter import MemoryLimiter
from tonle.gateway.recording import Recorder
from tonle.gateway.relay import Relay
from tonle.gateway.routing.router import Router

STAGES: list[tuple[type[Any], str, str]] = [
    (Auth, "admit", "admit"), (Call, "read", "read"), (MemoryLimiter, "charge", "charge"),
    (Router, "resolve", "resolve"), (Recorder, "open", "open audit"),
    (CachedReplies, "applies_to", "replay"), (Router, "choose", "choose"), (Backend, "send", "send"),
    (Relay, "data", "watch"), (Recorder, "close", "close audit"),
]  # fmt: skip
WHOLE_WAY = ["admit", "read", "charge", "resolve", "open audit", "replay", "choose", "send", "watch", "close audit"]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    visited: list[str] = []

    def watched(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not visited or visited[-1] != name:
                visited.append(name)
            return method(*args, **kwargs)

        return call

    for kind, method, name in STAGES:
        monkeypatch.setattr(kind, method, watched(name, getattr(kind, method)))
    return visited


@pytest.mark.parametrize(
    ("settings", "fields", "way"),
    [
        ({}, {}, WHOLE_WAY),
        ({}, {"stream": True}, WHOLE_WAY),
        ({}, {"key": "wrong"}, ["admit", "open audit", "close audit"]),
        ({"tokens_per_day": 1}, {}, ["admit", "read", "charge", "open audit", "close audit"]),
        ({}, {"temperature": 0}, ["admit", "read", "charge", "resolve", "open audit", "replay", "close audit"]),
    ],
    ids=["whole", "streamed", "refused key", "over limit", "cached"],
)
def test_the_stages_in_order(
    tmp_path: Path, seen: list[str], settings: dict[str, Any], fields: dict[str, Any], way: list[str]
) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m"), **settings) as place:
            if "temperature" in fields or settings:
                await place.ask(**fields)  # fills the cache, or uses the day up
            seen.clear()
            await place.ask(**fields)
            assert seen == way

    run(main())
