"""`watch`: a canary gets its share of the requests for a while, and is compared with the others all that time.

Does: read the gateways' figures each second, stop at the first good reason. Does not: give the share, or take the canary back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

from tonle.observe.backend_figures import Figures
from tonle.scaleout.rollout.gateways import Gateways, Say
from tonle.scaleout.rollout.judge import Tolerance, shown, why_worse

POLL_S = 1.0
_TELL_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryPlan:
    share: float  # of the requests, 0..1
    watch_s: float
    warm_up_s: float = 0.0  # its first requests do not count: caches are cold
    tolerance: Tolerance


async def watch(gateways: Gateways, name: str, others: set[str], plan: CanaryPlan, say: Say) -> str | None:
    """Why it must go, or None. `others`: backends with the same models."""
    if plan.warm_up_s:
        say(f"{name}: gets {plan.share:.0%} of the requests; the first {plan.warm_up_s:g} s do not count")
        if (reason := await _trouble_within(gateways, name, plan.warm_up_s)) is not None:
            return reason
    before = await gateways.figures()
    ends_s, tell_s = time.monotonic() + plan.watch_s, 0.0
    while True:
        canary, rest = _since(before, await gateways.figures(), name, others)
        reason = await _trouble(gateways, name) or why_worse(canary, rest, plan.tolerance)
        now_s = time.monotonic()
        if now_s >= tell_s or reason is not None or now_s >= ends_s:
            left_s = max(0.0, ends_s - now_s)
            say(f"{name}: {shown(canary)}; the others: {shown(rest)}; {left_s:.0f} s left")
            tell_s = now_s + _TELL_S
        if reason is not None:
            return reason
        if now_s >= ends_s:
            return _too_few(canary, plan)
        await asyncio.sleep(min(POLL_S, max(0.05, ends_s - now_s)))


def _too_few(canary: Figures, plan: CanaryPlan) -> str | None:
    if canary.requests >= plan.tolerance.min_requests:
        return None
    return (
        f"it got {canary.requests} requests in {plan.watch_s:g} s, too few to judge it by (--min-requests "
        f"{plan.tolerance.min_requests}); watch for longer, or give it a larger share"
    )


def _since(
    before: Mapping[str, Figures], now: Mapping[str, Figures], name: str, others: set[str]
) -> tuple[Figures, Figures]:
    """Of the canary, and of the others together."""
    rest = Figures()
    for other in others:
        rest.merge(now.get(other, Figures()).since(before.get(other, Figures())))
    return now.get(name, Figures()).since(before.get(name, Figures())), rest


async def _trouble_within(gateways: Gateways, name: str, seconds: float) -> str | None:
    ends_s = time.monotonic() + seconds
    while (left_s := ends_s - time.monotonic()) > 0:
        if (reason := await _trouble(gateways, name)) is not None:
            return reason
        await asyncio.sleep(min(POLL_S, left_s))
    return None


async def _trouble(gateways: Gateways, name: str) -> str | None:
    """A gateway has stopped sending requests to it."""
    seen = await gateways.seen(name)
    if not seen:
        return "it is no longer among the gateway's backends"
    return next((f"it is out of service: {backend.trouble}" for backend in seen if backend.trouble is not None), None)
