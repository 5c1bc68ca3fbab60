"""Requests under way for each LoRA adapter, so that one is not removed under a request that was let in before.

Does: know them from `resolve` to their end, and wait until each has reached its engine. Does not: end any.
"""

from __future__ import annotations

import asyncio
import time

from tonle.gateway.relay import Relay

LOOK_S = 0.02  # how often they are looked at
SENT_S = 1.0  # a request that was sent to another server so long ago has reached its engine
MAX_WAIT_S = 30.0


class UnderWay:
    def __init__(self) -> None:
        self._relays: dict[str, set[Relay]] = {}  # by the name that backends have for the adapter

    def enter(self, adapter: str, relay: Relay) -> None:
        self._relays.setdefault(adapter, set()).add(relay)

    def leave(self, adapter: str, relay: Relay) -> None:
        relays = self._relays.get(adapter)
        if relays is not None:
            relays.discard(relay)
            if not relays:
                del self._relays[adapter]

    async def reach_engines(self, adapter: str) -> None:
        """Until every request for it, of those that were let in, is in an engine or has ended; at most `MAX_WAIT_S`."""
        deadline_s = time.monotonic() + MAX_WAIT_S
        while any(_is_outside(relay) for relay in self._relays.get(adapter, ())):
            if time.monotonic() >= deadline_s:
                return
            await asyncio.sleep(LOOK_S)


def _is_outside(relay: Relay) -> bool:
    """It may not have reached an engine yet."""
    if relay.began:
        return False
    if relay.asked_s is None:
        return True
    return not relay.facts.is_local and time.monotonic() - relay.asked_s < SENT_S
