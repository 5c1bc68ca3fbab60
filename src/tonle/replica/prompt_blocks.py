"""Which KV blocks a prompt has, told to a gateway that asks (`protocol/kv_blocks.py`)."""

from __future__ import annotations

from tonle.engine.kv.block_pool import block_digests, root_digest
from tonle.protocol.kv_blocks import KV_BLOCKS_HEADER, write_blocks
from tonle.replica.replica import Replica, ReplicaRequest


def block_headers(
    replica: Replica, request: ReplicaRequest, prompts: list[list[int]], adapter: str | None
) -> dict[str, str]:
    """Nothing for callers that are no gateway, and for several prompts in one request."""
    if not (replica.options.trust_salt and request.header(KV_BLOCKS_HEADER)) or len(prompts) != 1:
        return {}
    salt = request.salt
    if adapter is not None:
        if (info := replica.front.adapters.get(adapter)) is None:
            return {}
        salt = info.digest.encode() + salt
    digests = block_digests(root_digest(salt, adapted=adapter is not None), prompts[0], replica.card().block_size)
    return {KV_BLOCKS_HEADER: write_blocks(digests)} if digests else {}
