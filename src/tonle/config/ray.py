"""`RayConfig`: how replicas run on a Ray cluster; the `ray:` section of a settings file, and flags of `tonle ray up`.

Does: hold defaults and help, check settings against each other. Does not: know Ray (`tonle.scaleout`), or hold settings of the
server itself: those stand beside the section, as `tonle serve --config` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tonle.config import values
from tonle.config.setting import PLACE, REPLICA, SCALING, Setting, setting, settings_of
from tonle.config.values import ValueType
from tonle.errors import ConfigError


def _place(default: Any, type: ValueType, help: str) -> Any:
    return setting(PLACE, default, type, help)


def _replica(default: Any, type: ValueType, help: str) -> Any:
    return setting(REPLICA, default, type, help)


def _scaling(default: Any, type: ValueType, help: str) -> Any:
    return setting(SCALING, default, type, help)


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    """Settings of `tonle ray up`."""

    name: str = _place(
        "tonle",
        values.pattern(r"[a-z]([-a-z0-9]{0,29}[a-z0-9])?", "lower-case letters, digits and hyphens, at most 31"),
        "Name of this service. Several can run on one cluster, each with a name and a list_port of its own.",
    )
    address: str = _place(
        "auto",
        values.text("ADDRESS"),
        "The Ray cluster: auto (the one this machine belongs to), or HOST:6379 of its head.",
    )
    list_port: int = _place(
        8365,
        values.integer(0, 65535),
        "Port on the head at which gateways find the replicas: `tonle gateway --discovery http://HEAD:PORT/backends`.",
    )

    gpus: int | None = _replica(
        None,
        values.optional(values.integer(0, 64), none="tensor_parallel_size on a cluster with GPUs, else 0"),
        "GPUs of each replica, all on one node. Set it where nodes with GPUs are added on demand.",
    )
    cpus: int = _replica(1, values.integer(0, 1024), "CPU cores that are reserved for each replica.")
    accelerator: str | None = _replica(
        None,
        values.optional(values.text("TYPE"), none="any"),
        "Ray's name of the GPU that replicas need, such as H100 or A10G, on a cluster with several kinds.",
    )
    start_timeout_s: float = _replica(
        900.0, values.duration(), "A replica that is not ready after this time is stopped, and another is started."
    )
    drain_timeout_s: float = _replica(
        600.0, values.duration(), "How long the requests of a replica may take to end before it is stopped."
    )

    min_replicas: int = _scaling(1, values.integer(1, 10_000), "Fewest replicas.")
    max_replicas: int = _scaling(4, values.integer(1, 10_000), "Most replicas.")
    waiting_requests: int = _scaling(5, values.integer(1), "Waiting requests per replica above which one is added.")
    max_use: float = _scaling(
        0.85,
        values.fraction(),
        "Use of a replica above which one is added: of its KV cache, or of max_num_seqs, whichever is more.",
    )
    scale_up_delay_s: float = _scaling(
        15.0, values.duration(), "Replicas are added when they were wanted for this long."
    )
    scale_down_delay_s: float = _scaling(
        300.0, values.duration(), "Replicas are removed when they were not wanted for this long."
    )
    max_surge: int = _scaling(
        1,
        values.integer(0, 1000),
        "Replicas above the wanted number while settings change: new ones are ready before old ones go. 0: where no GPU is "
        "spare, one old replica goes first, unless it is the only one.",
    )

    def validate(self) -> None:
        """Check settings against each other. Raises `ConfigError`."""
        if self.min_replicas > self.max_replicas:
            raise ConfigError(
                f"min_replicas ({self.min_replicas}) is more than max_replicas ({self.max_replicas}); raise max_replicas",
                param="min_replicas",
            )
        if self.cpus == 0 and self.gpus == 0:
            raise ConfigError(
                "cpus and gpus are both 0: Ray would put all replicas on one node; set cpus: 1", param="cpus"
            )


RAY_SETTINGS: dict[str, Setting] = settings_of(RayConfig)
