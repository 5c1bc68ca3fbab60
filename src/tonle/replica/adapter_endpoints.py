"""Loading and removing LoRA adapters while the server runs, with vLLM's bodies and replies.

Does: check what is asked, have the engine do it. Does not: check the caller's key (`gateway/routes.py`).
"""

from __future__ import annotations

import logging

from tonle.config.adapter_names import DOWNLOAD
from tonle.errors import InvalidRequest
from tonle.protocol.adapters import (
    ADAPTER_HEADER,
    LoadAdapterRequest,
    UnloadAdapterRequest,
    check_name,
    header_value,
    loaded_text,
    loaded_twice,
    unknown_adapter,
    unloaded_text,
)
from tonle.protocol.parse import parse
from tonle.replica.endpoints import EndpointReply, text_reply
from tonle.replica.replica import Replica, ReplicaRequest

log = logging.getLogger("tonle.replica")

MAX_PATH_CHARS = 4096  # no system opens a longer one


async def load_adapter(replica: Replica, request: ReplicaRequest) -> EndpointReply:
    """Replies when requests can use it."""
    asked, _ = parse(request.body, LoadAdapterRequest)
    name, path = asked.lora_name, asked.lora_path
    _check(replica, asked)
    check_name(name)
    if name in replica.names:
        raise InvalidRequest(f"lora_name {name} is the name of the model itself; choose another", param="lora_name")
    if not path or "://" in path or "\0" in path or len(path) > MAX_PATH_CHARS:
        hint = f"; {DOWNLOAD}" if "://" in path else ""
        raise InvalidRequest(
            f"lora_path must be a PEFT folder on the server's machine, not {path[:200]!r}{hint}", param="lora_path"
        )
    replaced = name in replica.front.adapters
    if replaced and not asked.load_inplace:
        raise loaded_twice(name)
    info = await replica.front.load_adapter(name, path, replace=asked.load_inplace)
    log.info("LoRA adapter %s is loaded from %s, rank %d, sha256 %s", name, path, info.rank, info.digest)
    headers = {ADAPTER_HEADER: header_value(name, info.digest)}
    return text_reply(loaded_text(name, replaced=replaced), headers=headers)


async def unload_adapter(replica: Replica, request: ReplicaRequest) -> EndpointReply:
    """Requests under way with it go on; the name is taken away at once."""
    asked, _ = parse(request.body, UnloadAdapterRequest)
    name = asked.lora_name
    _check(replica, asked)
    if name not in replica.front.adapters and name not in replica.front.awaited_adapters:
        raise unknown_adapter(name)
    await replica.front.unload_adapter(name)
    log.info("LoRA adapter %s is removed", name)
    return text_reply(unloaded_text(name))


def _check(replica: Replica, asked: UnloadAdapterRequest) -> None:
    """Raises `InvalidRequest`, or `CapacityError` while the engine is away."""
    if not replica.card().max_loras:
        raise InvalidRequest("this server was started without LoRA adapters: start it with --enable-lora")
    if asked.base_model is not None and asked.base_model not in replica.names:
        raise InvalidRequest(
            f"base_model must be a model of this server ({', '.join(replica.names)}), not {asked.base_model!r}",
            param="base_model",
        )
