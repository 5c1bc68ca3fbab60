"""`PoolConfig`: the settings of one pool of workers. Does: hold and check. Does not: read files or flags (`config/`)."""

from __future__ import annotations

import math
import re
from typing import Any, Literal, get_args

import msgspec

from tonle.errors import ConfigError
from tonle.workers.builtin import kind_path

Strategy = Literal["naive", "bucketed", "memory_aware"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A `WorkerPool` checks it."""

    kind: str  # a name of `BUILTIN`, or package.module:Class
    name: str = ""  # for logs, metrics and the path of a kind of one's own; empty: the kind's
    model: str | None = None  # what Kind.load gets: a folder or a name; None: the kind's own default
    served_name: str | None = None  # the name callers use; None: `model`, else `name`
    device: str = "cpu"  # cpu, cuda:0, MIG-…; several with commas: as many instances on each
    options: dict[str, Any] = {}  # the kind's own

    instances: int = 1  # processes, on each device
    min_instances: int | None = None  # kept although idle, in all; 0: the first job starts one; None: all of them
    idle_unload_s: float | None = None  # an idle instance above `min_instances` ends after this; None: never

    max_batch: int = 32  # jobs at once
    max_batch_units: int | None = None  # sum of Job.size in a batch, padding included; None: no bound
    max_wait_ms: float = 5.0  # how long the first job of a batch may wait for others
    strategy: Strategy = "memory_aware"  # which jobs go together: as dynamic_batching has it
    bucket_size: int = 128  # units of Job.size; strategy bucketed only

    max_queue: int = 1024  # jobs that wait; while there are as many, more are refused
    timeout_s: float = 300.0  # without a result, and the worker counts as hung
    load_timeout_s: float = 1800.0  # for Kind.load and the warm-up
    max_memory_mb: int | None = None  # resident; a worker above it is replaced after its batch; None: no bound

    @property
    def pool_name(self) -> str:
        return self.name or self.kind.rpartition(":")[2].lower()

    @property
    def model_name(self) -> str:
        return self.served_name or self.model or self.pool_name

    @property
    def devices(self) -> list[str]:
        """Of each instance."""
        return [device.strip() for device in self.device.split(",") for _ in range(self.instances)]

    @property
    def least(self) -> int:
        """Instances that are kept although idle."""
        total = len(self.devices)
        return total if self.min_instances is None else min(self.min_instances, total)

    def validate(self) -> None:
        """Raises `ConfigError`."""
        kind_path(self.kind)
        if not _NAME.fullmatch(self.pool_name):
            raise ConfigError(
                f"name {self.pool_name!r} of a pool must be letters, digits, '.', '_' and '-', at most 64", param="name"
            )
        if not all(device.strip() for device in self.device.split(",")):
            raise ConfigError(
                f"device {self.device!r} must be cpu, cuda:0, MIG-…, or several with commas", param="device"
            )
        if self.strategy not in STRATEGIES:
            raise ConfigError(
                f"strategy must be one of {', '.join(STRATEGIES)}, not {self.strategy!r}", param="strategy"
            )
        for name, least in _WHOLE.items():
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ConfigError(f"{name} must be an integer of at least {least}, not {value!r}", param=name)
        for name in ("timeout_s", "load_timeout_s", "idle_unload_s"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and 0 < value < math.inf):
                raise ConfigError(f"{name} must be a number of seconds above 0, not {value!r}", param=name)
        if not (isinstance(self.max_wait_ms, int | float) and 0 <= self.max_wait_ms < math.inf):
            raise ConfigError(f"max_wait_ms must be at least 0, not {self.max_wait_ms!r}", param="max_wait_ms")


_WHOLE = {"instances": 1, "min_instances": 0, "max_batch": 1, "max_batch_units": 1, "bucket_size": 1, "max_queue": 1,
          "max_memory_mb": 1}  # fmt: skip
