"""`Server`: a replica as the gateway sees it: a real `Backend`, with its gate and breaker on the virtual clock.

Does: start, kill and restart the replica behind it; count what all of them did. Does not: choose among servers (`cluster.py`).
"""

from __future__ import annotations

import random
from collections.abc import Callable

from tonle.config.gateway import GatewayConfig
from tonle.config.routing import BackendConfig
from tonle.gateway.admission import Gate
from tonle.gateway.backends.backend import Backend
from tonle.gateway.backends.breaker import Breaker
from tonle.simulate.fleet import ReplicaOptions, default_name
from tonle.simulate.replica import Ended, Replica
from tonle.simulate.result import ReplicaReport

MODEL = "model"
NO_LIMIT = 1 << 30  # of a server without a gateway: its engine queues by itself, and no breaker pauses it


class Server:
    def __init__(
        self,
        number: int,
        options: ReplicaOptions,
        config: GatewayConfig,
        clock: Callable[[], float],
        *,
        created_s: float,
        gated: bool,
        on_end: Callable[[Server, Ended], None],
        seed: int,
        skip: bool,
    ) -> None:
        self.number = number
        self.options = options
        self.name = options.name or default_name(number)
        self.replica: Replica | None = None  # None: it is down
        self.under_way: set[int] = set()  # handles that the replica has
        self.removed_s: float | None = None
        self.began_s: float | None = None
        self._created_s = created_s
        self._up_since_s: float | None = None
        self._up_s = 0.0
        self._skip, self._on_end = skip, on_end
        self._rng = random.Random(f"{seed}/replica/{number}")
        self._ended: list[Replica] = []
        row = BackendConfig(
            url=f"http://{default_name(number)}:8000", name=self.name, models=(MODEL,), kind="tonle", role=options.role,
            length=options.length, weight=options.weight,
            max_concurrent=(options.max_concurrent if gated else NO_LIMIT), max_queued=options.max_queued,
        )  # fmt: skip
        self.backend = Backend(row, config)
        gate = self.backend.gate
        self.backend.gate = Gate(
            max_concurrent=gate.max_concurrent,
            max_queued=gate.max_queued,
            max_queued_tokens=gate.max_queued_tokens,
            clock=clock,
        )
        self.backend.breaker = Breaker(
            max_failures=config.breaker_failures if gated else NO_LIMIT, pause_s=config.breaker_pause_s, clock=clock
        )

    def start(self, now: float) -> None:
        options = self.options
        self.replica = Replica(
            options.limits, options.num_blocks, options.times, rng=self._rng, targets=options.targets, skip=self._skip,
            on_end=lambda ended: self._on_end(self, ended), now=now,
        )  # fmt: skip
        self._up_since_s = now
        self.began_s = now if self.began_s is None else self.began_s

    def stop(self, now: float) -> list[int]:
        """It is down from now on. Returns the handles of requests that it had."""
        if self.replica is None:
            return []
        assert self._up_since_s is not None
        self._up_s += now - self._up_since_s
        counts = self.replica.counts  # which has it from before the last steps in which nothing but decoding happened
        counts.max_kv_usage = max(counts.max_kv_usage, self.replica.kv_usage)
        self._ended.append(self.replica)
        self.replica.stop()
        self.replica = None
        lost, self.under_way = sorted(self.under_way), set()
        return lost

    @property
    def is_idle(self) -> bool:
        return not self.under_way and not self.backend.gate.num_inside and not self.backend.gate.num_queued

    def report(self, now: float) -> ReplicaReport:
        """When all is over. It is paid for from the moment it was asked for until it is removed."""
        self.stop(now)
        paid_s = (now if self.removed_s is None else self.removed_s) - self._created_s
        counts = [replica.counts for replica in self._ended]
        schedulers = [replica.scheduler for replica in self._ended]
        steps = sum(each.steps for each in counts)
        return ReplicaReport(
            name=self.name,
            role=self.options.role,
            length=self.options.length,
            begin_s=self.began_s or 0.0,
            up_s=self._up_s,
            requests=sum(each.ended for each in counts),
            steps=steps,
            rows_per_step=sum(each.rows for each in counts) / steps if steps else 0.0,
            busy_share=sum(each.device_s for each in counts) / self._up_s if self._up_s else 0.0,
            output_tokens=sum(each.output_tokens for each in counts),
            prompt_tokens=sum(each.prompt_tokens for each in schedulers),
            cached_tokens=sum(each.prefix_hits for each in schedulers),
            preemptions=sum(each.num_preemptions for each in schedulers),
            max_running=max((each.max_running for each in counts), default=0),
            max_kv_usage=max((each.max_kv_usage for each in counts), default=0.0),
            cost=paid_s / 3600 * self.options.price_per_hour,
        )
