"""`Autoscaler`: how many replicas there should be, decided every few seconds, as KEDA and the horizontal pod autoscaler decide.

Does: read the metric, compute the number wanted, add and remove servers. Does not: choose who answers a request.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from tonle.simulate.fleet import Autoscaling

if TYPE_CHECKING:
    from tonle.simulate.cluster import Cluster
    from tonle.simulate.server import Server


class Autoscaler:
    def __init__(self, cluster: Cluster, options: Autoscaling) -> None:
        self._cluster = cluster
        self._options = options
        answering = [each for each in cluster.fleet.replicas if each.role != "prefill"]
        self._template = replace(answering[-1], name=None)  # copies have names of their own
        self._wanted: deque[tuple[float, int]] = deque()  # lately: when, how many

    def start(self) -> None:
        self._cluster.clock.at(self._options.every_s, self._decide)

    def _decide(self) -> None:
        clock, options = self._cluster.clock, self._options
        present = self._present()
        wanted = max(options.min, min(options.max, self._desired(present)))
        self._wanted.append((clock.now, wanted))
        while self._wanted[0][0] < clock.now - options.down_after_s:
            self._wanted.popleft()
        if wanted > len(present):
            for _ in range(wanted - len(present)):
                self._cluster.add_server(self._template, options.cold_start_s)
        elif (most := max(count for _, count in self._wanted)) < len(present) and clock.now >= options.down_after_s:
            for server in reversed(present[most:]):  # the newest first
                self._cluster.remove_server(server)
        clock.at(clock.now + options.every_s, self._decide)

    def _present(self) -> list[Server]:
        """Those that answer, also those that are still starting."""
        return [
            server
            for server in self._cluster.servers
            if server.removed_s is None and not server.backend.draining and server.options.role != "prefill"
        ]

    def _desired(self, present: list[Server]) -> int:
        options, now = self._options, self._cluster.clock.now
        if options.metric == "schedule":
            return next((count for at_s, count in sorted(options.schedule, reverse=True) if at_s <= now), len(present))
        up = [server for server in present if server.replica is not None]
        if not up:
            return len(present)
        value = sum(_value(server, options.metric) for server in up)
        # As the HPA: replicas that are starting count with what they have, which is nothing.
        ratio = value / len(present) / options.target
        return len(present) if abs(ratio - 1) <= options.tolerance else math.ceil(value / options.target)


def _value(server: Server, metric: str) -> float:
    replica, gate = server.replica, server.backend.gate
    assert replica is not None
    if metric == "kv":
        return replica.kv_usage
    return float(replica.num_running if metric == "running" else replica.num_waiting + gate.num_queued)
