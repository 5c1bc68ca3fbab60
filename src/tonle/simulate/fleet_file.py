"""A fleet from a YAML file: replicas that differ, roles, autoscaling, failures.

Does: read, refuse what it does not know by name, find profiles. Does not: check the fleet as a whole (`Fleet.check`).

    replicas:
      - profile: llama-3.2-3b-h200     # one that comes with Tonle, or a file
        count: 2
        role: decode                   # any, prefill or decode
        price_per_hour: 4.0
        max_num_seqs: 128              # any limit of the scheduler
    prefix_affinity: true              # and other settings of the gateway
    autoscaling: {metric: queue, target: 4, min: 1, max: 8, cold_start_s: 60}
    failures:
      - {replica: 1, at_s: 30, restart_s: 45}
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tonle.config.yaml_fault import yaml_fault
from tonle.engine.schedule import Targets
from tonle.errors import ConfigError
from tonle.simulate.fleet import Autoscaling, Failure, Fleet, LengthClass, ReplicaOptions, Role
from tonle.simulate.profile import Profile, load_profile

_Positive = Annotated[int, Meta(ge=1)]
_LIMITS = ("max_num_seqs", "max_num_batched_tokens", "long_prefill_tokens", "context_length", "prefix_caching")


class _Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Replicas that are alike."""

    profile: str | None = None  # default: the command line's
    count: _Positive = 1
    name: str | None = None
    role: Role = "any"
    length: LengthClass = "any"
    weight: Annotated[float, Meta(gt=0)] = 1.0
    price_per_hour: Annotated[float, Meta(ge=0)] | None = None
    max_concurrent: _Positive | None = None
    max_queued: Annotated[int, Meta(ge=0)] | None = None
    max_num_seqs: _Positive | None = None
    max_num_batched_tokens: _Positive | None = None
    long_prefill_tokens: _Positive | None = None
    context_length: _Positive | None = None
    num_blocks: _Positive | None = None
    prefix_caching: bool | None = None
    target_itl_ms: Annotated[float, Meta(gt=0)] | None = None
    target_ttft_ms: Annotated[float, Meta(gt=0)] | None = None


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    replicas: Annotated[list[_Row], Meta(min_length=1)]
    gateway: bool | None = None
    prefix_affinity: bool | None = None
    length_threshold: _Positive | None = None
    prefill_threshold: Annotated[int, Meta(ge=0)] | None = None
    max_concurrent: _Positive | None = None
    max_queued: Annotated[int, Meta(ge=0)] | None = None
    max_queued_tokens: _Positive | None = None
    retries: Annotated[int, Meta(ge=0)] | None = None
    probe_interval_s: Annotated[float, Meta(ge=0)] | None = None
    gateway_s: Annotated[float, Meta(ge=0)] | None = None
    kv_bytes_per_token: Annotated[int, Meta(ge=0)] | None = None
    kv_bytes_per_s: Annotated[float, Meta(gt=0)] | None = None
    kv_latency_s: Annotated[float, Meta(ge=0)] | None = None
    autoscaling: Autoscaling | None = None
    failures: list[Failure] | None = None


def read_fleet(
    path: Path, profile: Profile | None = None, *, price_per_hour: float = 0.0
) -> tuple[Fleet, list[Profile]]:
    """And the profiles of its replicas. `profile`, `price_per_hour`: of replicas that name none. Raises `ConfigError`."""
    file = _read(path)
    replicas: list[ReplicaOptions] = []
    profiles: list[Profile] = []
    for row in file.replicas:
        own = load_profile(row.profile) if row.profile is not None else profile
        if own is None:
            raise ConfigError(f"{path}: a replica names no profile; give one there, or --profile", param="fleet")
        options = _replica(row, own, price_per_hour)
        names = (
            [row.name]
            if row.count == 1
            else [None if row.name is None else f"{row.name}-{n}" for n in range(row.count)]
        )
        replicas += [dataclasses.replace(options, name=name) for name in names]
        profiles.append(own)
    rest = {name: getattr(file, name) for name in file.__struct_fields__ if name != "replicas"}
    fleet = Fleet(replicas=replicas, **{name: value for name, value in rest.items() if value is not None})
    fleet.check()
    return fleet, profiles


def _replica(row: _Row, profile: Profile, price_per_hour: float) -> ReplicaOptions:
    changes: dict[str, Any] = {name: value for name in _LIMITS if (value := getattr(row, name)) is not None}
    targets = None
    if row.target_itl_ms is not None or row.target_ttft_ms is not None:
        targets = Targets(_seconds(row.target_itl_ms), _seconds(row.target_ttft_ms))
    return ReplicaOptions(
        times=profile.times,
        limits=profile.limits(**changes),
        num_blocks=row.num_blocks or profile.server.num_blocks,
        role=row.role,
        length=row.length,
        weight=row.weight,
        price_per_hour=price_per_hour if row.price_per_hour is None else row.price_per_hour,
        max_concurrent=row.max_concurrent,
        max_queued=row.max_queued,
        targets=targets,
    )


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1e3


def _read(path: Path) -> _File:
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the fleet {path}: {reason}", param="fleet") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {yaml_fault(error)}", param="fleet") from None
    try:
        return msgspec.convert(data, _File)
    except msgspec.ValidationError as error:
        said = re.sub(r" - at `\$\.?(.*)`$", r" (at \1)", str(error)).replace("`", "'")
        raise ConfigError(f"{path} does not describe a fleet: {said}", param="fleet") from None
