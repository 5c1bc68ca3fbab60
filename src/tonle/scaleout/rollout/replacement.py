"""`Replacement`: each old backend gives way to a new server at another address, the first as a canary if wanted.

Does: add the new one to the gateways, wait until it is healthy and serves what the old one serves, drain the old one and remove
it. Does not: start or stop servers.

A pair is replaced or it is not: whatever goes wrong, or Ctrl-C, the new one leaves the gateways again and the old one is resumed.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass

from tonle.edge.client import Address
from tonle.errors import CallerError, ConfigError
from tonle.scaleout.rollout.canary import CanaryPlan, watch
from tonle.scaleout.rollout.gateways import Gateways, Say
from tonle.scaleout.rollout.rollout import Limits, RolledBackError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplacePlan:
    pairs: tuple[tuple[str, str], ...]  # name of the old backend, URL of the new one
    canary: CanaryPlan | None
    limits: Limits


class Replacement:
    def __init__(self, gateways: Gateways, plan: ReplacePlan, say: Say) -> None:
        self._gateways = gateways
        self._plan = plan
        self._say = say

    async def run(self) -> list[str]:
        """Names of the new backends. Raises `TonleError`, and `RolledBackError` after a canary that was worse."""
        backends = await self._gateways.backends()
        names = []
        for old, url in self._plan.pairs:  # before anything is touched
            if old not in backends:
                raise ConfigError(f"there is no backend {old!r}; there are: {', '.join(backends)}", param="replace")
            names.append(Address.parse(url).netloc)
            if names[-1] in backends:
                raise ConfigError(f"there is a backend {names[-1]} already", param="replace")
        for number, (old, url) in enumerate(self._plan.pairs):
            self._say(f"[{number + 1}/{len(names)}] {old} -> {url}")
            await self._replace(old, url, names[number], self._plan.canary if number == 0 else None)
        return names

    async def _replace(self, old: str, url: str, new: str, canary: CanaryPlan | None) -> None:
        gateways, limits = self._gateways, self._plan.limits
        async with AsyncExitStack() as undo:
            undo.push_async_callback(gateways.remove, new)
            await gateways.add(url, new, like=old, share=None if canary is None else canary.share)
            await gateways.until_healthy(new, limits.ready_s, self._say)
            await self._check_models(old, new)
            if canary is not None:
                await self._try_canary(old, new, canary)
            undo.push_async_callback(gateways.resume, old)
            await gateways.drain(old)
            await gateways.until_idle(old, limits.drain_s, self._say)
            undo.pop_all()
        await gateways.remove(old)
        self._say(f"{new}: has taken the place of {old}, which gets no more requests and can be stopped")

    async def _check_models(self, old: str, new: str) -> None:
        backends = await self._gateways.backends()
        if missing := sorted(set(backends[old].models) - set(backends[new].models)):
            raise CallerError(
                f"{new} does not serve {', '.join(missing)}, which {old} does; start it with the same models"
            )

    async def _try_canary(self, old: str, new: str, canary: CanaryPlan) -> None:
        """Raises `RolledBackError`."""
        backends = await self._gateways.backends()
        models = set(backends[old].models)
        others = {each.name for each in backends.values() if each.name != new and models & set(each.models)}
        reason = await watch(self._gateways, new, others, canary, self._say)
        if reason is not None:
            raise RolledBackError(f"rolled back: {new} was worse than the others, and gets no more requests: {reason}")
        self._say(f"{new}: is as good as the others; going on")
        await self._gateways.set_share(new, None)
