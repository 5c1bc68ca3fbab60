"""`Gateways`: all gateways in front of the same replicas, asked as one.

Does: drain at each, add up what runs, wait within a limit of time. Does not: take anything back by itself.
A backend has the same name in each of them; what one says is enough where they cannot differ.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

from tonle.errors import CallerError, CapacityError, NotFound
from tonle.observe.backend_figures import Figures
from tonle.scaleout.rollout.gateway_admin import GatewayAdmin, GatewayBackend

POLL_S = 0.5
_STEADY = 2  # probes in a row that must find a backend healthy

Say = Callable[[str], None]


class TooLongError(CapacityError):
    """A wait of a rollout has reached its limit."""


class Gateways:
    def __init__(self, admins: Sequence[GatewayAdmin]) -> None:
        self.admins = list(admins)

    def close(self) -> None:
        for admin in self.admins:
            admin.close()

    async def backends(self) -> dict[str, GatewayBackend]:
        """By name, as the first gateway sees them. Raises `CallerError` if another one does not have them all."""
        first, *others = [
            {backend.name: backend for backend in each if not backend.leaving}
            for each in await asyncio.gather(*(admin.backends() for admin in self.admins))
        ]
        for admin, other in zip(self.admins[1:], others, strict=True):
            if missing := sorted(set(first) ^ set(other)):
                raise CallerError(
                    f"{admin.address} and {self.admins[0].address} do not have the same backends: {', '.join(missing)}; "
                    "a rollout needs all gateways of a service, and the same names in each"
                )
        return first

    async def drain(self, name: str) -> None:
        await asyncio.gather(*(admin.drain(name) for admin in self.admins))

    async def resume(self, name: str) -> None:
        await asyncio.gather(*(admin.resume(name) for admin in self.admins))

    async def set_share(self, name: str, share: float | None) -> None:
        await asyncio.gather(*(admin.set_share(name, share) for admin in self.admins))

    async def add(self, url: str, name: str, *, like: str, share: float | None) -> None:
        """Gateways that share their state know it from the first of them; that is not an error."""
        for admin in self.admins:
            if name not in {backend.name for backend in await admin.backends() if not backend.leaving}:
                await admin.add(url, name, like=like, share=share)

    async def remove(self, name: str) -> None:
        for admin in self.admins:
            with contextlib.suppress(NotFound):
                if not any(backend.leaving for backend in await admin.backends() if backend.name == name):
                    await admin.remove(name)

    async def seen(self, name: str) -> list[GatewayBackend]:
        """One backend, as each gateway sees it."""
        every = await asyncio.gather(*(admin.backends() for admin in self.admins))
        return [backend for backends in every for backend in backends if backend.name == name]

    async def until_idle(self, name: str, within_s: float, say: Say) -> None:
        """No request of any gateway runs or waits there. Raises `TooLongError`."""
        ends_s, told = time.monotonic() + within_s, -1
        while True:
            left = sum(backend.running + backend.waiting for backend in await self.seen(name))
            if left == 0:
                return
            if time.monotonic() >= ends_s:
                raise TooLongError(
                    f"{name} still has {left} requests after {within_s:g} s; give them longer with --drain-timeout"
                )
            if left != told:
                told = left
                say(f"{name}: waiting for {left} requests to end")
            await asyncio.sleep(POLL_S)

    async def until_healthy(self, name: str, within_s: float, say: Say) -> None:
        """Each gateway has asked it, and found it healthy, twice in a row. Raises `TooLongError` with the last reason."""
        ends_s, steady, told = time.monotonic() + within_s, 0, ""
        while True:
            probed = await asyncio.gather(*(admin.probe(name) for admin in self.admins))
            reasons = [backend.unhealthy_reason for backend in probed if backend.unhealthy_reason is not None]
            steady = 0 if reasons else steady + 1
            if steady >= _STEADY:
                return
            if time.monotonic() >= ends_s:
                why = reasons[0] if reasons else "it was not healthy twice in a row"
                raise TooLongError(f"{name} did not become healthy within {within_s:g} s: {why}")
            if reasons and reasons[0] != told:
                told = reasons[0]
                say(f"{name}: waiting until it is healthy ({told})")
            await asyncio.sleep(POLL_S)

    async def figures(self) -> dict[str, Figures]:
        """By backend, of all gateways together, since each gateway's start."""
        total: dict[str, Figures] = {}
        for each in await asyncio.gather(*(admin.figures() for admin in self.admins)):
            for name, figures in each.items():
                total.setdefault(name, Figures()).merge(figures)
        return total
