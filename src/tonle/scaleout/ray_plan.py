"""`RayPlan`: all that the controller of a service on Ray is started with, from settings. Needs no Ray.

Does: resources, version and limits. Does not: connect, or read files.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from tonle import __version__
from tonle.config.ray import RayConfig
from tonle.config.serve import ServeConfig
from tonle.errors import ConfigError
from tonle.scaleout.controller import ControllerSettings
from tonle.scaleout.demand import ScaleLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSpec:
    """What a replica is started with."""

    version: str
    settings: str = field(repr=False)  # text of a settings file of `tonle serve`; it may hold keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Of one replica."""

    cpus: int
    gpus: int
    accelerator: str | None = None

    def bundle(self) -> dict[str, float]:
        """As Ray counts them; on one node."""
        found: dict[str, float] = {"CPU": self.cpus, "GPU": self.gpus}
        if self.accelerator is not None:
            found[f"accelerator_type:{self.accelerator}"] = 0.001  # any node that has one has 1 of it
        return {name: count for name, count in found.items() if count}


@dataclass(frozen=True, slots=True, kw_only=True)
class RayPlan:
    controller: ControllerSettings
    spec: ReplicaSpec
    resources: Resources
    list_port: int


def plan_of(serve: ServeConfig, config: RayConfig, settings: dict[str, Any], *, cluster_gpus: int) -> RayPlan:
    """`settings`: of the replicas, as their file has them. `cluster_gpus`: that the cluster has. Raises `ConfigError`."""
    engine = serve.engine()
    gpus = _gpus(config, engine.tensor_parallel_size, cluster_gpus)
    resources = Resources(cpus=config.cpus, gpus=gpus, accelerator=config.accelerator)
    if not config.cpus and not gpus:
        raise ConfigError("a replica without a GPU needs a core: set cpus: 1 in the section ray", param="cpus")
    text = json.dumps(settings, sort_keys=True)  # JSON is YAML
    version = hashlib.sha256(f"{__version__}\0{text}\0{resources}".encode()).hexdigest()[:12]
    max_num_seqs, _ = engine.batch_limits(gpu=gpus > 0)
    scale = ScaleLimits(
        min_replicas=config.min_replicas, max_replicas=config.max_replicas, waiting_requests=config.waiting_requests,
        max_use=config.max_use, max_num_seqs=max_num_seqs, up_delay_s=config.scale_up_delay_s,
        down_delay_s=config.scale_down_delay_s,
    )  # fmt: skip
    controller = ControllerSettings(
        name=config.name, version=version, scale=scale, max_surge=config.max_surge,
        start_timeout_s=config.start_timeout_s, drain_timeout_s=config.drain_timeout_s,
        api_key=next(iter(serve.api_key), None),
    )  # fmt: skip
    spec = ReplicaSpec(version=version, settings=text)
    return RayPlan(controller=controller, spec=spec, resources=resources, list_port=config.list_port)


def _gpus(config: RayConfig, tensor_parallel_size: int, cluster_gpus: int) -> int:
    """Of each replica. Raises `ConfigError`."""
    if config.gpus is None:
        return tensor_parallel_size if cluster_gpus else 0
    if 0 < config.gpus < tensor_parallel_size:
        raise ConfigError(
            f"gpus ({config.gpus}) is less than tensor_parallel_size ({tensor_parallel_size}); leave gpus out",
            param="gpus",
        )
    return config.gpus
