"""`KvSettings`: the settings of a server about keys and values outside the device, and about what it says of those inside.

A part of `ServeConfig` (`serve.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tonle.config import values
from tonle.config.engine import EngineConfig
from tonle.config.server import ServerConfig
from tonle.config.setting import SCHEDULING, setting
from tonle.config.stores import redis_url
from tonle.config.values import ValueType


def _engine(engine_field: str, type: ValueType, help: str) -> Any:
    default = EngineConfig.__dataclass_fields__[engine_field].default
    return setting(SCHEDULING, default, type, help, engine=engine_field)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSettings(ServerConfig):
    kv_events_config: dict[str, Any] | None = _engine(  # noqa: RUF009  (makes a field)
        "kv_events_config",
        values.optional(values.json_object(), none="no events"),
        "Where to announce which KV blocks are cached, for routers such as llm-d's. vLLM's JSON object, with "
        "enable_kv_cache_events, endpoint, topic and so on. Needs the extra kv-events. Events carry the token ids of prompts.",
    )
    kv_offload_memory_bytes: int = setting(
        SCHEDULING,
        0,
        values.size(0),
        "Host memory for KV blocks that were evicted from the device: a prompt that begins with them is copied back instead of "
        "computed. 0 = none.",
        engine="kv_offload_memory",
    )
    kv_offload_dir: str | None = _engine(
        "kv_offload_dir",
        values.optional(values.path(), none="no folder"),
        "Folder for KV blocks that find no room in memory. It outlives the server, and several may share it. As private as the "
        "prompts they were computed from.",
    )
    kv_offload_disk_bytes: int = setting(
        SCHEDULING,
        EngineConfig().kv_offload_disk,
        values.size(),
        "Most that --kv-offload-dir may hold.",
        engine="kv_offload_disk",
    )
    kv_offload_redis: str | None = _engine(
        "kv_offload_redis",
        values.optional(redis_url(), none="no Redis"),
        "A Redis for evicted KV blocks, which servers of the same model share: redis://HOST:6379/0. Needs the extra redis.",
    )
