"""The steps from the replicas there are to those there should be. A pure function.

Does: say how many to start and which to drain; with new settings, new replicas are ready before old ones go. Does not: do it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

State = Literal["starting", "ready", "draining"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFacts:
    id: str
    version: str  # of the settings it was started with
    state: State
    requests: int = 0  # running and waiting there
    age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Steps:
    start: int = 0
    drain: tuple[str, ...] = ()  # ids


def reconcile(replicas: Sequence[ReplicaFacts], wanted: int, version: str, max_surge: int) -> Steps:
    """`wanted`: replicas that should serve with the settings of `version`. `max_surge`: how many more there may be meanwhile."""
    if wanted == 1:
        max_surge = max(1, max_surge)  # or nobody would answer
    staying = [each for each in replicas if each.state != "draining"]
    new = [each for each in staying if each.version == version]
    surplus = _least_needed(new, max(0, len(new) - wanted))
    # Those of old settings that do not answer yet would be replaced at once.
    outdated = tuple(each.id for each in staying if each.version != version and each.state == "starting")
    staying = [each for each in staying if each.id not in surplus and each.id not in outdated]
    new = [each for each in staying if each.version == version]
    old = [each for each in staying if each.version != version]
    may_go = max(0, sum(each.state == "ready" for each in staying) - wanted)
    if max_surge == 0 and len(new) < wanted <= len(staying) and all(each.state == "ready" for each in staying):
        may_go += 1  # one makes room for a new one, and only when nothing else is on its way
    going = _least_needed(old, min(len(old), may_go))
    room = wanted + max_surge - (len(staying) - len(going))
    return Steps(start=max(0, min(wanted - len(new), room)), drain=surplus + outdated + going)


def _least_needed(replicas: Sequence[ReplicaFacts], count: int) -> tuple[str, ...]:
    """Those that are not ready, then those with the fewest requests, the youngest first: their caches are the coldest."""
    ordered = sorted(replicas, key=lambda each: (each.state == "ready", each.requests, each.age_s))
    return tuple(each.id for each in ordered[:count])
