"""Worker pools in the settings: `workers` of `tonle serve`, and the settings of `tonle worker`, which runs one pool alone.

Does: read and check what is written. Does not: know kinds (`tonle.workers` does), or start anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tonle.config import values
from tonle.config.kv_settings import KvSettings
from tonle.config.routing import Name, Positive, read_object, read_yaml
from tonle.config.server import ServerConfig, cache_by_default_setting, port_setting
from tonle.config.setting import MODEL, POOL, Setting, setting, settings_of
from tonle.config.values import ValueType
from tonle.errors import ConfigError

STRATEGIES = ("naive", "bucketed", "memory_aware")
Strategy = Literal["naive", "bucketed", "memory_aware"]
Kind = Annotated[str, Meta(pattern=r"^[A-Za-z_][\w.]*(:[A-Za-z_]\w*)?$")]

_WANTED = "must be a list of worker pools, each with at least a kind"
_DURATION, _SIZE = values.duration(), values.size()
MIB = 1024**2


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One pool. None: the pool's own default (docs/workers.md)."""

    kind: Kind  # embeddings, rerank, asr, tts, images, or package.module:Class
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] | None = None  # default: the kind's
    model: str | None = None  # a folder or a hub name; default: the kind's own
    served_name: Name | None = None  # what callers ask for; default: the model's name, without its folders
    device: str | None = None  # cpu, cuda:0; several with commas
    instances: Positive | None = None  # processes on each device
    min_instances: Annotated[int, Meta(ge=0)] | None = None  # kept although idle
    max_batch: Positive | None = None  # jobs at once
    max_wait_ms: Annotated[float, Meta(ge=0)] | None = None  # of the first job of a batch, for others
    max_queue: Positive | None = None  # jobs that wait
    timeout: float | str | None = None  # 300s: without a result, a worker counts as hung
    idle_unload: float | str | None = None  # 10m: an idle process beyond min_instances ends
    max_memory: int | str | None = None  # 4GiB: a process that has more is replaced
    strategy: Strategy | None = None
    options: dict[str, Any] = {}  # the kind's own

    def __str__(self) -> str:
        """As a flag gives it."""
        plain = {"kind": self.kind} | ({} if self.model is None else {"model": self.model})
        given = {name: value for name, value in msgspec.structs.asdict(self).items() if value not in (None, {})}
        return "=".join(plain.values()) if given == plain else msgspec.json.encode(given).decode()

    def pool_values(self) -> dict[str, Any]:
        """Under the names of `PoolConfig`, what is set. Raises `ValueError`."""
        found = {name: getattr(self, name) for name in _SAME}
        found["timeout_s"] = None if self.timeout is None else _DURATION.read(self.timeout)
        found["idle_unload_s"] = None if self.idle_unload is None else _DURATION.read(self.idle_unload)
        found["max_memory_mb"] = None if self.max_memory is None else max(1, _SIZE.read(self.max_memory) // MIB)
        return {name: value for name, value in found.items() if value is not None}


_SAME = ("kind", "name", "model", "served_name", "device", "instances", "min_instances", "max_batch", "max_wait_ms",
         "max_queue", "strategy", "options")  # fmt: skip


def worker_pools() -> ValueType:
    """A list of `WorkerConfig`. In text: KIND or KIND=MODEL, several with commas; or YAML."""

    def read(value: object) -> tuple[WorkerConfig, ...]:
        items = _items(value)
        if not isinstance(items, list):
            raise ValueError(f"{_WANTED}, not {type(items).__name__}")
        pools = []
        for number, item in enumerate(items, 1):
            pool = (
                item
                if isinstance(item, WorkerConfig)
                else read_object(item, WorkerConfig, f"{_WANTED}: entry {number}")
            )
            try:
                pool.pool_values()
            except ValueError as error:
                raise ValueError(f"{_WANTED}: entry {number} ({pool.kind}): a time or a size {error}") from None
            pools.append(pool)
        return tuple(pools)

    return ValueType("KIND[=MODEL]", read, lambda pools: ", ".join(pool.kind for pool in pools))


def _items(value: object) -> Any:
    """A flag gives a list of texts, a variable one text, a file a list of objects or texts."""
    if isinstance(value, str):
        if value.lstrip().startswith(("[", "-", "{")):
            found = read_yaml(value)
            return [found] if isinstance(found, dict) else found
        return [_short(part.strip()) for part in value.split(",") if part.strip()]
    if isinstance(value, list | tuple):
        return [each for item in value for each in (_items(item) if isinstance(item, str) else [item])]
    return value


def _short(text: str) -> dict[str, str]:
    kind, has_model, model = text.partition("=")
    return {"kind": kind, "model": model} if has_model else {"kind": kind}


def _milliseconds() -> ValueType:
    """0 or more; 5 and 5ms are the same."""

    def read(value: object) -> float:
        text = str(value).strip()
        found: float = _DURATION.read(text if text[-1:].isalpha() else f"{text}ms")
        return found * 1000

    return ValueType("MS", read, lambda number: f"{number:g}")


def _pool(default: Any, type: ValueType, help: str) -> Any:
    return setting(POOL, default, type, help)


def _optional(type: ValueType, none: str, help: str) -> Any:
    return _pool(None, values.optional(type, none=none), help)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings(KvSettings):
    """A part of `ServeConfig` (`serve.py`)."""

    workers: tuple[WorkerConfig, ...] = setting(
        POOL,
        (),
        worker_pools(),
        "Pool of processes beside the language model: embeddings, rerank, asr, tts, images or package.module:Class. Repeat the "
        "flag for more; in a file each can have settings of its own.",
        option="worker",
    )

    def check_workers(self, *, frontends: int) -> None:
        """Raises `ConfigError`."""
        if self.workers and frontends > 1:
            raise ConfigError(
                f"--frontends {frontends} does not work with --worker: each front end would start the pools again. Run them "
                "apart, `tonle worker KIND`, and put `tonle gateway` in front of both",
                param="frontends",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerServerConfig(ServerConfig):
    """Settings of `tonle worker`: one pool behind HTTP."""

    kind: str | None = setting(
        MODEL,
        None,
        values.optional(values.text("KIND"), none=""),
        "embeddings, rerank, asr, tts, images, or a class of your own: package.module:Class.",
    )
    model: str | None = setting(
        MODEL, None, values.optional(values.text(), none="the kind's own"), "A folder or a hub name such as org/name."
    )
    name: str | None = _optional(values.text("NAME"), "the kind's", "Name of the pool in logs, metrics and paths.")
    served_name: str | None = _optional(
        values.text("NAME"), "the model's, without its folders", "Name of the model in the API."
    )
    device: str = _pool("cpu", values.text("DEVICE"), "cpu, cuda:0, a MIG device; several with commas.")
    instances: int = _pool(1, values.integer(1), "Processes on each device.")
    min_instances: int | None = _optional(
        values.integer(0),
        "all of them",
        "Processes that are kept although idle; 0 starts the first with the first request.",
    )
    max_batch: int = _pool(32, values.integer(1), "Most jobs in one batch.")
    max_wait_ms: float = _pool(5.0, _milliseconds(), "How long the first job of a batch waits for others, in ms.")
    max_queue: int = _pool(1024, values.integer(1), "Most jobs that wait; more are refused (503).")
    timeout_s: float = _pool(
        300.0, values.duration(), "Without a result for so long, a process counts as hung and is replaced."
    )
    idle_unload_s: float | None = _optional(
        values.duration(), "never", "An idle process beyond min_instances ends after this long."
    )
    max_memory_bytes: int | None = _optional(values.size(), "no bound", "A process that has more memory is replaced.")
    strategy: str = _pool(
        "memory_aware", values.choice(*STRATEGIES), "Which jobs go together: naive, bucketed or memory_aware."
    )
    options: dict[str, Any] | None = _optional(values.json_object(), "none", "Options of the kind, as a JSON object.")  # noqa: RUF009

    port: int = port_setting(8000)
    cache_by_default: bool = cache_by_default_setting(False)

    def validate(self) -> None:
        """Check settings against each other. Raises `ConfigError`."""
        self.check_tls()
        self.check_origins()
        self.check_requests()
        self.check_observed()
        self.check_cache()
        self.check_responses()

    def pool(self) -> WorkerConfig:
        """Raises `ConfigError`."""
        if self.kind is None:
            raise ConfigError("say which kind of worker: tonle worker KIND [MODEL]", param="kind")
        row = {name: getattr(self, name) for name in _SAME if name != "options"}
        row |= {"timeout": self.timeout_s, "idle_unload": self.idle_unload_s, "max_memory": self.max_memory_bytes}
        row["options"] = self.options or {}
        try:
            return read_object(row, WorkerConfig, "the worker pool")
        except ValueError as error:
            raise ConfigError(str(error), param="kind") from None


WORKER_SETTINGS: dict[str, Setting] = settings_of(WorkerServerConfig)
