"""`Fleet`: which replicas there are, what stands in front of them, and what happens to them.

Does: hold and check. Does not: run anything (`cluster.py`), or read files (`fleet_file.py`).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from tonle.config.gateway import GatewayConfig
from tonle.engine.schedule import SchedulerLimits, Targets
from tonle.errors import ConfigError
from tonle.simulate.step_times import StepTimes

if TYPE_CHECKING:
    from tonle.simulate.profile import Profile

Role = Literal["any", "prefill", "decode"]
LengthClass = Literal["any", "short", "long"]
Metric = Literal["queue", "running", "kv", "schedule"]

_GATEWAY = GatewayConfig()


def default_name(number: int) -> str:
    """Of a replica without one, counted from 0."""
    return f"replica-{number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """One server: the engine's limits and step times, and what the gateway is told about it."""

    times: StepTimes
    limits: SchedulerLimits
    num_blocks: int
    name: str | None = None  # None: `default_name`
    role: Role = "any"
    length: LengthClass = "any"
    weight: float = 1.0
    price_per_hour: float = 0.0
    max_concurrent: int | None = None  # None: the fleet's
    max_queued: int | None = None
    targets: Targets | None = None  # of adaptive tuning (`target_itl_ms`, `target_ttft_ms`)


class Autoscaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many replicas there are, decided every `every_s` as KEDA and the HPA do: so many that each has at most `target`.

    queue: requests that wait, at the gateway or in an engine; running: requests in steps; kv: share of KV blocks in use (0..1);
    schedule: what `schedule` says. New replicas are copies of the fleet's last one that is no prefill server.
    """

    metric: Metric = "queue"
    target: float = 4.0
    min: int = 1
    max: int = 10
    every_s: float = 15.0
    cold_start_s: float = 60.0  # from the decision until a new replica takes requests
    down_after_s: float = 300.0  # fewer only if fewer were enough for so long
    tolerance: float = 0.1  # of the metric, around the target: no change
    schedule: list[tuple[float, int]] = []  # seconds after the begin -> replicas

    def check(self) -> None:
        """Raises `ConfigError`."""
        if not 1 <= self.min <= self.max:
            raise ConfigError(f"autoscaling needs 1 ≤ min ≤ max, not {self.min} and {self.max}", param="autoscaling")
        for name in ("target", "every_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"autoscaling: {name} must be more than 0", param="autoscaling")
        for name in ("cold_start_s", "down_after_s", "tolerance"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"autoscaling: {name} must be at least 0", param="autoscaling")
        if self.metric == "kv" and self.target > 1:
            raise ConfigError(
                f"autoscaling by kv: target is a share of KV blocks, such as 0.8, not {self.target:g}",
                param="autoscaling",
            )
        if self.metric == "schedule" and not self.schedule:
            raise ConfigError("autoscaling by schedule needs a schedule: [[seconds, replicas], …]", param="autoscaling")


class Failure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Replica number `replica` (from 0) dies at `at_s`, and takes requests again `restart_s` later; None: never."""

    replica: int
    at_s: float
    restart_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """`gateway`: one stands in front of the replicas; None: if there are several, or may be. Its settings are those of
    `tonle gateway`. Without one, requests go straight to the only server, which admits all of them."""

    replicas: list[ReplicaOptions]
    gateway: bool | None = None
    prefix_affinity: bool = _GATEWAY.prefix_affinity
    length_threshold: int = _GATEWAY.length_threshold
    prefill_threshold: int = _GATEWAY.prefill_threshold
    max_concurrent: int = _GATEWAY.max_concurrent
    max_queued: int = _GATEWAY.max_queued
    max_queued_tokens: int = _GATEWAY.max_queued_tokens
    retries: int = _GATEWAY.retries
    probe_interval_s: float = _GATEWAY.probe_interval_s
    gateway_s: float = 0.0  # that a request takes longer because of it
    kv_bytes_per_token: int = 0  # that move from a prefill server to the one that answers
    kv_bytes_per_s: float = math.inf
    kv_latency_s: float = 0.0
    autoscaling: Autoscaling | None = None
    failures: list[Failure] = field(default_factory=list)

    @property
    def has_gateway(self) -> bool:
        return len(self.replicas) > 1 or self.autoscaling is not None if self.gateway is None else self.gateway

    @property
    def gateway_config(self) -> GatewayConfig:
        shared = ("prefix_affinity", "length_threshold", "prefill_threshold", "max_concurrent", "max_queued")
        names = (*shared, "max_queued_tokens", "retries", "probe_interval_s")
        return GatewayConfig(**{name: getattr(self, name) for name in names})

    def resized(self, count: int) -> Fleet:
        """With so many replicas: the first is repeated, without its name. Raises `ConfigError` if they differ."""
        nameless = [replace(each, name=None) for each in self.replicas]
        if any(each != nameless[0] for each in nameless):
            raise ConfigError(
                "these replicas are not alike: it is not clear which to add or leave out", param="replicas"
            )
        return replace(self, replicas=nameless[:1] * count)

    def check(self) -> None:
        """Raises `ConfigError`."""
        if not self.replicas:
            raise ConfigError("a fleet needs at least one replica", param="replicas")
        self._check_names()
        roles = {each.role for each in self.replicas}
        if roles == {"prefill"}:
            raise ConfigError(
                "there are replicas with role: prefill, but none with role: decode or any", param="replicas"
            )
        if self.gateway is False and self.has_several:
            raise ConfigError("several replicas need a gateway in front of them", param="gateway")
        self._check_limits()
        for failure in self.failures:
            if not 0 <= failure.replica < len(self.replicas):
                raise ConfigError(
                    f"replica {failure.replica} cannot fail: there are {len(self.replicas)}, counted from 0",
                    param="failures",
                )
            if not (0 <= failure.at_s < math.inf and 0 <= (failure.restart_s or 0.0) < math.inf):
                raise ConfigError("failures: at_s and restart_s are seconds, and must be at least 0", param="failures")
        if self.autoscaling is not None:
            self.autoscaling.check()

    def _check_names(self) -> None:
        """The gateway tells replicas apart by them."""
        names = [each.name or default_name(number) for number, each in enumerate(self.replicas)]
        for name, one in zip(names, self.replicas, strict=True):
            if names.count(name) > 1:
                raise ConfigError(f"two replicas are called {name}; give each a name of its own", param="replicas")
            if self.autoscaling is not None and one.name is not None and re.fullmatch(r"replica-\d+", one.name):
                raise ConfigError(
                    f"{name} is what autoscaling may call a replica that it adds: give it another name",
                    param="replicas",
                )

    def _check_limits(self) -> None:
        limits = [(self.max_concurrent, self.max_queued)]
        limits += [(each.max_concurrent or self.max_concurrent, each.max_queued or 0) for each in self.replicas]
        for max_concurrent, max_queued in limits:
            if max_concurrent < 1:
                raise ConfigError(f"max_concurrent must be at least 1, not {max_concurrent}", param="max_concurrent")
            if max_queued < 0:
                raise ConfigError(f"max_queued must be at least 0, not {max_queued}", param="max_queued")
        for name in ("gateway_s", "kv_latency_s", "probe_interval_s"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ConfigError(f"{name} must be a number of seconds, at least 0, not {value:g}", param=name)
        if not self.kv_bytes_per_s > 0:
            raise ConfigError(
                f"kv_bytes_per_s must be more than 0, not {self.kv_bytes_per_s:g}", param="kv_bytes_per_s"
            )
        for options in self.replicas:
            if not 0 < options.weight < math.inf:
                raise ConfigError(f"weight must be a number above 0, not {options.weight:g}", param="weight")
            if not 0 <= options.price_per_hour < math.inf:
                raise ConfigError(
                    f"price_per_hour must be at least 0, not {options.price_per_hour:g}", param="price_per_hour"
                )

    @property
    def has_several(self) -> bool:
        return len(self.replicas) > 1 or self.autoscaling is not None


def fleet_of(profile: Profile, *, replicas: int = 1, price_per_hour: float = 0.0, **limit_changes: int) -> Fleet:
    """So many servers as `profile` measured one. `limit_changes`: `max_num_seqs=64`, `max_num_batched_tokens=1024`,
    `long_prefill_tokens=256`, …"""
    if replicas < 1:
        raise ConfigError(f"replicas must be at least 1, not {replicas}", param="replicas")
    options: dict[str, Any] = {"num_blocks": profile.server.num_blocks, "price_per_hour": price_per_hour}
    one = ReplicaOptions(times=profile.times, limits=profile.limits(**limit_changes), **options)
    return Fleet(replicas=[one] * replicas)
