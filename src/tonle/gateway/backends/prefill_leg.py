"""The prefill leg: one server computes the prompt, another fetches its keys and values and writes the answer.

Does: vLLM's protocol with `kv_transfer_params`, passed on as they come. Does not: choose the servers, or send. A
prefill server keeps the blocks for a short while (vLLM: 30 s), so the second leg follows at once.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tonle.edge.client import UpstreamError

LEFT_OUT = ("stream_options", "min_tokens", "n", "best_of")  # of the caller's request: one sequence computes the prompt
_WANTED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class PrefillError(UpstreamError):
    """The first leg failed: the fault of the prefill server, and the second leg was not begun."""


def prefill_changes(body: dict[str, Any], model: str) -> dict[str, Any]:
    """What the first leg asks for instead: one token, and where its blocks will be."""
    changes = {"model": model, "max_tokens": 1, "kv_transfer_params": _WANTED}
    return changes | ({"max_completion_tokens": 1} if "max_completion_tokens" in body else {})


def transfer_params(answer: bytes) -> dict[str, Any]:
    """What the second leg must carry, from the answer to the first. Raises `UpstreamError`."""
    try:
        params = msgspec.json.decode(answer).get("kv_transfer_params")
    except (msgspec.MsgspecError, AttributeError):
        params = None
    if not isinstance(params, dict):
        raise UpstreamError("prefill refused", "it sent no kv_transfer_params; is its role set?")
    return params
