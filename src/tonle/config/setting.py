"""`Setting`: one setting as users meet it, made from a field of a config class.

A unit at the end of a field's name (`_s`, `_bytes`) is not part of its public name, because there a value carries its
own: field `drain_s`, file key `drain: 30s`, variable `TONLE_DRAIN=30s`, flag `--drain 30s`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Any

from tonle.config.values import ValueType

ENV_PREFIX = "TONLE_"

# Headings in help texts, in the order they are shown.
MODEL = "Model"
ANSWERS = "Answers"
ADAPTERS = "LoRA adapters"
POOL = "Worker pools"
ROUTING = "Backends and routing"
SERVER = "Server"
SCHEDULING = "Scheduling and memory"
TRANSFER = "Prefill and decode apart"
QUEUE = "Queue"
SECURITY = "Security"
LIMITS = "Default limits per key"
STATE = "Keys and usage"
CACHE = "Cache"
STORED = "Stored responses (/v1/responses)"
INFERENCE = "Inference service (/api/v1/inference, /health)"
AUDIT = "Audit"
LOGGING = "Logging"
OBSERVE = "Observability"
PLACE = "Service"
POD = "Pods"
REPLICA = "Each replica"
SCALING = "Replicas"
SECRETS = "Secrets"
GROUPS = (
    MODEL, ADAPTERS, POOL, ROUTING, SERVER, ANSWERS, SCHEDULING, TRANSFER, QUEUE, SECURITY, LIMITS, STATE, CACHE, STORED,
    INFERENCE, AUDIT, OBSERVE, LOGGING, PLACE, POD, REPLICA, SCALING, SECRETS,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting as users meet it."""

    field: str  # of the config class
    default: Any
    type: ValueType
    group: str  # heading in help texts
    help: str
    engine: str | None = None  # the field of EngineConfig it sets
    option: str | None = None  # the flag's name, where it is not the file's key
    short: str | None = None  # -tp: a second flag

    @property
    def name(self) -> str:
        """The key in a file."""
        return re.sub("_(s|bytes)$", "", self.field)

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        return "--" + (self.option or self.name).replace("_", "-")


def setting(
    group: str, default: Any, type: ValueType, help: str, *, engine: str | None = None, option: str | None = None,
    short: str | None = None,
) -> Any:  # fmt: skip
    """A field of a config class."""
    described = {"type": type, "group": group, "help": help, "engine": engine, "option": option, "short": short}
    return field(default=default, metadata=described)


def settings_of(config: type[Any]) -> dict[str, Setting]:
    """By public name, in the order of `GROUPS`; within a group, inherited settings first."""
    entries = sorted(fields(config), key=lambda entry: GROUPS.index(entry.metadata["group"]))
    found = (Setting(field=entry.name, default=entry.default, **entry.metadata) for entry in entries)
    return {each.name: each for each in found}
