"""`kv_transfer_params`: what a router says about where a prompt is computed, in the names of vLLM's NIXL connector.

Does: read them from a request, write them into an answer. Routers pass them from one to the other as they are. Does not: fetch
(`engine/transfer`), or refuse: what cannot be fetched is computed.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import msgspec

from tonle.engine.request import KeptBlocks, RemoteBlocks
from tonle.errors import InvalidRequest
from tonle.protocol.openai import FieldWarning, SamplingFields
from tonle.protocol.parse import RequestT, decode_object, typed, unused

log = logging.getLogger("tonle.replica")

_MAX_PORT = 65535


class Transfer(NamedTuple):
    tells: bool = False  # the answer says where the prompt is kept for another server,
    keep: bool = False  # and it is kept
    remote: RemoteBlocks | None = None  # the prompt was computed by another server


NO_TRANSFER = Transfer()


class _Params(msgspec.Struct):
    """Those that say where blocks are. `remote_token` is ours; all others have vLLM's names."""

    remote_host: str
    remote_port: int
    remote_request_id: str
    remote_token: str
    remote_block_ids: list[int]
    tp_size: int = 1


def parse_from_router(
    body: bytes, request_type: type[RequestT]
) -> tuple[RequestT, list[FieldWarning], dict[str, Any] | None]:
    """As `parse`, and with the parameters, which are no field of a caller's request. Raises `InvalidRequest`."""
    raw = decode_object(body)
    params = raw.pop("kv_transfer_params", None)
    if params is not None and not isinstance(params, dict):
        raise InvalidRequest("kv_transfer_params must be an object", param="kv_transfer_params")
    request = typed(raw, request_type)
    return request, unused(raw, request), params


def read_transfer(params: dict[str, Any] | None, request: SamplingFields, role: str, *, num_prompts: int) -> Transfer:
    """`role`: of this server. Raises `InvalidRequest`."""
    if not params:
        return NO_TRANSFER
    if params.get("do_remote_decode") is True and role != "decode":
        if request.stream:
            raise InvalidRequest("do_remote_decode needs stream: false", param="kv_transfer_params")
        return Transfer(tells=True, keep=num_prompts == 1)
    if params.get("do_remote_prefill") is True and role != "prefill" and num_prompts == 1:
        sequences = request.n or 1, getattr(request, "best_of", None) or 1  # the larger of both is computed
        return Transfer(remote=_remote(params, max(sequences)))
    return NO_TRANSFER


def _remote(params: dict[str, Any], readers: int) -> RemoteBlocks | None:
    try:
        found = msgspec.convert(params, _Params)
        if not 0 < found.remote_port <= _MAX_PORT:
            raise msgspec.ValidationError(f"remote_port is {found.remote_port}")
    except msgspec.ValidationError as error:
        log.warning("kv_transfer_params name no blocks of a Tonle server (%s); the prompt is computed here", error)
        return None
    return RemoteBlocks(
        host=found.remote_host, port=found.remote_port, lease=found.remote_request_id, token=found.remote_token,
        num_blocks=len(found.remote_block_ids), tp_size=found.tp_size, readers=readers,
    )  # fmt: skip


def transfer_params(kept: KeptBlocks | None) -> dict[str, Any]:
    """For the server that decodes. Without blocks (the prompt is shorter than one, or there are several) it is told to
    compute by itself."""
    if kept is None:
        return {"do_remote_prefill": False, "do_remote_decode": False}
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": kept.blocks,
        "remote_engine_id": kept.engine_id,
        "remote_request_id": kept.lease,
        "remote_host": kept.host,
        "remote_port": kept.port,
        "remote_token": kept.token,
        "remote_num_tokens": kept.num_tokens,
        "tp_size": 1,
    }
