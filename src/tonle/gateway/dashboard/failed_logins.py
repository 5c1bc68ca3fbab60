"""`FailedLogins`: how long an address must wait after wrong keys.

Does: count failures by address, in bounded memory. Does not: block an address for longer than `MAX_WAIT_S`, or forget because
a right key follows: the holder of one key could guess the others in between.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable

FREE = 5  # wrong keys before an address has to wait
MAX_WAIT_S = 60.0
FORGET_S = 900.0  # after this long without one
MAX_ADDRESSES = 10_000


class FailedLogins:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: dict[str, tuple[int, float]] = {}  # by network: how many, and when the last one was

    def wait_s(self, client: str) -> float:
        """How long until the next try; 0: now."""
        count, last_s = self._failures.get(_network(client), (0, 0.0))
        if count < FREE:
            return 0.0
        return max(0.0, last_s + min(MAX_WAIT_S, 2.0 ** (count - FREE)) - self._clock())

    def add(self, client: str) -> int:
        """Returns how many there were."""
        name, now_s = _network(client), self._clock()
        count, last_s = self._failures.pop(name, (0, 0.0))
        if count and now_s - last_s > FORGET_S:
            count = 0
        while len(self._failures) >= MAX_ADDRESSES:
            del self._failures[next(iter(self._failures))]
        self._failures[name] = (count + 1, now_s)
        return count + 1


def _network(client: str) -> str:
    """One machine may have any address of its /64."""
    try:
        address = ipaddress.ip_address(client.partition("%")[0])
    except ValueError:
        return client
    if address.version == 4 or address.ipv4_mapped is not None:  # the latter: at a socket for both, all have one /64
        return str(address)
    return str(ipaddress.ip_network((address, 64), strict=False))
