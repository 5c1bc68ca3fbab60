"""`Rollout`: replicas behind gateways are restarted one by one, the first of them as a canary if wanted.

Does: drain one, wait until it is idle, run the operator's command, wait until it is healthy, resume it, then the next. Does not:
go on after a failure.

However it ends, no backend stays drained, with one exception: a canary that was found worse and that no command brings back.
Resuming one that is down is safe: gateways send nothing to a server that is not healthy.
"""

from __future__ import annotations

from dataclasses import dataclass

from tonle.errors import CallerError, CapacityError, ConfigError
from tonle.scaleout.rollout import command
from tonle.scaleout.rollout.canary import CanaryPlan, watch
from tonle.scaleout.rollout.gateway_admin import GatewayBackend
from tonle.scaleout.rollout.gateways import Gateways, Say


class RolledBackError(CapacityError):
    """The canary was worse than the others, and gets no more requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long each wait of a step may take, in seconds."""

    drain_s: float = 600.0
    command_s: float = 600.0
    ready_s: float = 900.0  # a large model is loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPlan:
    restart: str  # a command, with {name} and {url}
    rollback: str | None = None  # brings back what ran before
    only: tuple[str, ...] = ()  # names of backends; empty: all
    canary: CanaryPlan | None
    limits: Limits


class Rollout:
    def __init__(self, gateways: Gateways, plan: RestartPlan, say: Say) -> None:
        self._gateways = gateways
        self._plan = plan
        self._say = say

    async def run(self) -> list[str]:
        """Names, in order. Raises `TonleError`, and `RolledBackError` after a canary that was worse."""
        names = chosen(await self._gateways.backends(), self._plan.only, self._say)
        for name in names:  # before anything is touched
            command.filled(self._plan.restart, name=name, url="")
            command.filled(self._plan.rollback or "", name=name, url="")
        for number, name in enumerate(names, 1):
            self._say(f"[{number}/{len(names)}] {name}")
            canary = self._plan.canary if number == 1 else None
            others = await stand_ins(self._gateways, name)
            if canary is None:
                await self._restart(name, self._plan.restart)
            else:
                await self._try_canary(name, others, canary)
            self._say(f"{name}: done")
        return names

    async def _restart(self, name: str, template: str, *, canary: CanaryPlan | None = None) -> None:
        limits, gateways = self._plan.limits, self._gateways
        try:
            await gateways.drain(name)
            await gateways.until_idle(name, limits.drain_s, self._say)
            backend = (await gateways.backends())[name]
            line = command.filled(template, name=name, url=backend.url)
            self._say(f"{name}: {line}")
            await command.run(line, within_s=limits.command_s)
            await gateways.until_healthy(name, limits.ready_s, self._say)
            if canary is not None:
                await gateways.set_share(name, canary.share)
        finally:
            await gateways.resume(name)

    async def _try_canary(self, name: str, others: set[str], canary: CanaryPlan) -> None:
        gateways = self._gateways
        own_share = (await gateways.backends())[name].share
        try:
            await self._restart(name, self._plan.restart, canary=canary)
            reason = await watch(gateways, name, others, canary, self._say)
            if reason is not None:
                self._say(f"{name}: is taken back: {reason}")
                await self._take_back(name)
        finally:
            await gateways.set_share(name, own_share)
        if reason is None:
            self._say(f"{name}: is as good as the others; going on")
        elif self._plan.rollback is not None:
            raise RolledBackError(f"rolled back: {name} was worse than the others: {reason}")
        else:
            raise RolledBackError(_stays_drained(name, reason))

    async def _take_back(self, name: str) -> None:
        """It stays drained, unless a command brings back what ran before."""
        gateways = self._gateways
        try:
            await gateways.drain(name)
            await gateways.until_idle(name, self._plan.limits.drain_s, self._say)
            if self._plan.rollback is not None:
                await self._restart(name, self._plan.rollback)
        except BaseException:
            await gateways.drain(name)
            self._say(f"{name}: stays drained, since it was worse and what ran before is not back")
            raise


def _stays_drained(name: str, reason: str) -> str:
    return (
        f"rolled back: {name} was worse than the others, and is drained now: {reason}. Bring back what ran there before, "
        f"then POST /admin/backends/{name}/resume; with --rollback COMMAND this is done for you"
    )


def chosen(backends: dict[str, GatewayBackend], only: tuple[str, ...], say: Say) -> list[str]:
    """Names of the backends to work on, in order. Raises `ConfigError`."""
    for name in only:
        if name not in backends:
            raise ConfigError(f"there is no backend {name!r}; there are: {', '.join(backends)}", param="only")
    if only:
        return list(dict.fromkeys(only))
    for backend in backends.values():
        if backend.draining:
            say(f"{backend.name}: is left out, since somebody has drained it (--only {backend.name} takes it in)")
    names = [backend.name for backend in backends.values() if not backend.draining]
    if not names:
        raise ConfigError("all backends are drained; resume them, or name some with --only", param="only")
    return names


async def stand_ins(gateways: Gateways, name: str) -> set[str]:
    """The backends that answer while `name` is away. Raises `CallerError` if there is none."""
    backends = await gateways.backends()
    if name not in backends:
        raise CallerError(f"{name} is no longer among the gateway's backends")
    models = set(backends[name].models)
    found = {
        other.name
        for other in backends.values()
        if other.name != name and other.available and other.share is None and models <= set(other.models)
    }
    if not found:
        raise CallerError(
            f"no other backend that is up serves {', '.join(sorted(models)) or 'its models'}: without {name}, requests would "
            "fail; add a backend first, or use --replace"
        )
    return found
