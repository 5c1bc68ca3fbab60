"""`Hops`: the gateways that a request has passed, so that it never comes back to one of them.

Does: name this gateway, read and write the header, refuse a request that has been here. Does not: choose (`routing/policies.py`).

The header of a request lists the gateways it has passed. A reply that says that a gateway could not answer (5xx) lists those that
were tried behind it, too: so a request visits each gateway once, however many there are and whoever knows whom.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable

from tonle.edge.exchange import Exchange
from tonle.gateway.refusals import LoopDetected

VIA_HEADER = "x-tonle-via"
GATEWAY_HEADER = "x-tonle-gateway"  # of a gateway's list of models: its name in the other header
MAX_HOPS = 16
_NAME = re.compile(r"[A-Za-z0-9._:-]{1,64}")

Passed = dict[str, None]  # in order


class Hops:
    def __init__(self, name: str | None = None) -> None:
        self.name = name or secrets.token_hex(8)  # of this gateway, or of all that share its state

    def share(self, secret: str, region: str | None) -> None:
        """All gateways of one region with this secret are one: a request that passed one of them has passed all."""
        self.name = hashlib.blake2b(f"{secret}\0{region}".encode(), digest_size=8).hexdigest()

    def enter(self, exchange: Exchange) -> Passed:
        """The gateways that a request has passed, and this one. Raises `LoopDetected`."""
        passed = read_via(exchange.header(VIA_HEADER))
        if self.name in passed:
            raise LoopDetected(f"this request has passed this gateway ({self.name}) before: the backends of these gateways lead "
                               f"to each other ({' → '.join((*passed, self.name))})")  # fmt: skip
        if len(passed) >= MAX_HOPS:
            raise LoopDetected(f"this request has passed {len(passed)} gateways, and that is too many")
        passed[self.name] = None
        return passed


def read_via(text: str) -> Passed:
    """What is not a name is passed over, and so is what exceeds the bound by far: anyone may send the header."""
    if not text:
        return {}
    names = (part.strip() for part in text[: 128 * MAX_HOPS].split(","))
    return dict.fromkeys(name for name in names if _NAME.fullmatch(name))


def written(passed: Iterable[str]) -> str:
    return ",".join(passed)
