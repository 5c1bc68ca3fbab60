"""`kv_transfer_params`: from a router's request to the engine, and from the engine to an answer."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tonle.engine.request import KeptBlocks
from tonle.errors import InvalidRequest
from tonle.protocol.openai import CompletionRequest
from tonle.replica.read_transfer import NO_TRANSFER, Transfer, parse_from_router, read_transfer, transfer_params

KEPT = KeptBlocks(engine_id="e", host="10.0.0.1", port=8101, lease="1-ab", token="secret", blocks=[4, 7], num_tokens=32)


def read(params: Any, role: str, **fields: Any) -> Transfer:
    body = msgspec.json.encode({"model": "m", "prompt": "x", "kv_transfer_params": params, **fields})
    request, warnings, found = parse_from_router(body, CompletionRequest)
    assert not warnings
    return read_transfer(found, request, role, num_prompts=1)


@pytest.mark.parametrize(("role", "keeps"), [("prefill", True), ("both", True), ("decode", False)])
def test_a_prompt_is_kept_by_servers_whose_role_it_is(role: str, keeps: bool) -> None:
    wanted = {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None, "remote_block_ids": None}
    assert read(wanted, role) == Transfer(tells=keeps, keep=keeps)


def test_what_one_server_answers_is_what_the_other_fetches() -> None:
    params = transfer_params(KEPT)
    found = read(params, "decode", n=3).remote
    assert found is not None
    assert (found.host, found.port, found.lease, found.token) == ("10.0.0.1", 8101, "1-ab", "secret")
    assert (found.num_blocks, found.tp_size, found.readers) == (2, 1, 3)
    several = read(params, "decode", n=2, best_of=5).remote
    assert several is not None and several.readers == 5
    assert (best := read(params, "decode", best_of=4).remote) is not None and best.readers == 4
    assert read(params, "prefill") == NO_TRANSFER
    assert read(transfer_params(None), "both") == NO_TRANSFER


@pytest.mark.parametrize(
    "change",
    [
        {"remote_token": None},
        {"remote_port": 0},
        {"remote_port": 1 << 16},
        {"remote_block_ids": ["x"]},
        {"tp_size": "1"},
    ],
)
def test_blocks_of_others_are_computed_here(change: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """vLLM's parameters have no token; others may be damaged. No request is refused for that."""
    assert read(transfer_params(KEPT) | change, "decode") == NO_TRANSFER
    assert "computed here" in caplog.text


def test_of_several_prompts_none_is_kept_and_the_answer_says_so() -> None:
    request, _, params = parse_from_router(
        b'{"prompt": ["a", "b"], "kv_transfer_params": {"do_remote_decode": true}}', CompletionRequest
    )
    assert read_transfer(params, request, "prefill", num_prompts=2) == Transfer(tells=True, keep=False)
    assert transfer_params(None)["do_remote_prefill"] is False


def test_a_stream_has_no_place_for_the_answer() -> None:
    with pytest.raises(InvalidRequest, match="stream: false"):
        read({"do_remote_decode": True}, "prefill", stream=True)


def test_anything_else_is_an_error() -> None:
    with pytest.raises(InvalidRequest, match="must be an object"):
        read([1], "decode")
