"""`SharedCounts`: limits counted on a server, for all gateways that use it. Every call is one trip, and atomic on the server.

Time and day are the server's: clocks of gateways may differ. A request that holds a lease counts as running until it is
settled, or until the lease has run out because it was not renewed: its gateway died. Then what was estimated for it
counts as used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tonle.gateway.api_keys.key import KeyLimits
from tonle.gateway.limits.limiter import LimitName


@dataclass(frozen=True, slots=True)
class Held:
    """A lease: one running request of one key."""

    lease_id: str
    key_id: str
    tokens: int  # estimated, and charged


@dataclass(frozen=True, slots=True)
class Settlement:
    """How a request ended. `held` None: it was never charged, because its key has no limits or the server was away."""

    key_id: str
    used: int  # tokens
    held: Held | None = None


@dataclass(frozen=True, slots=True)
class OverLimit:
    name: LimitName
    wait_s: float


class SharedCounts(Protocol):
    """All of these raise `StoreLost`."""

    place: str  # for messages: without passwords

    async def charge(self, held: Held, limits: KeyLimits, *, lease_s: float) -> OverLimit | None:
        """None: it may run. Sent again for the same lease, it is charged once."""

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        """Corrects what was charged. A lease that is gone is charged in full, never refunded: too much rather than too little."""

    async def renew(self, held: Sequence[Held], *, lease_s: float) -> None:
        """These still run. A lease that the server has lost is there again."""

    async def used_today(self, key_ids: Iterable[str]) -> dict[str, int]:
        """Tokens of requests that have ended."""

    async def ping(self) -> None: ...
