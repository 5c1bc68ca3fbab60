"""What callers are told about fields that were removed, changed or are not known; and 400 for those who ask."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.running_gateway import ADMIN, CHAT, JSON, KEY, RunningGateway, Upstream, run, running_gateway
from tonle.gateway.routes import PIPED
from tonle.protocol.embeddings import RERANK_PATHS, SCORE_PATHS
from tonle.protocol.known import KNOWN, unknown_fields

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"}, "/v1/embeddings": {"input": "hi"}, "/v1/responses": {"input": "hi"},
    **{path: {"query": "q", "documents": ["d"]} for path in RERANK_PATHS},
    **{path: {"text_1": "a", "text_2": "b"} for path in SCORE_PATHS},
    "/tokenize": {"prompt": "hi"}, "/detokenize": {"tokens": [1]},
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "temperature": 0.5},
    "/api/v1/inference": {"user_input": "hi", "use_cache": False},
}  # fmt: skip


async def post(place: RunningGateway, path: str, strict: str = "", **fields: Any) -> Any:
    model = {} if path == "/api/v1/inference" else {"model": "m"}
    headers = {"authorization": f"Bearer {KEY}"} | ({"x-tonle-strict": strict} if strict else {})
    return await place.client.post(path, json={**BODIES[path], **model, **fields}, headers=headers)


@pytest.mark.parametrize("path", BODIES)
def test_every_endpoint_tells_of_a_slip_and_refuses_it_if_asked(tmp_path: Path, path: str) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        async with running_gateway(tmp_path, upstream) as place:
            plain = await post(place, path, strict="1")
            assert plain.status_code == 200 and "x-tonle-warnings" not in plain.headers
            told = await post(place, path, temprature=0.5)
            assert told.headers["x-tonle-warnings"] == "1; temprature"
            body = told.json()
            (warning,) = (body["metadata"] if path == "/api/v1/inference" else body)["warnings"]
            assert warning["param"] == "temprature" and "unknown field" in warning["message"]
            refused = await post(place, path, strict="true", temprature=0.5)
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "temprature"
            assert "strict mode refuses this request; without it: temprature: " in refused.json()["error"]["message"]
        assert [record["warnings"] is None for record in place.records()] == [True, False, False]
        assert len(upstream.requests) == 2

    run(main())


def test_every_endpoint_of_the_gateway_has_its_list() -> None:
    assert set(KNOWN) == {*PIPED, "/v1/responses"} == set(BODIES) - {"/api/v1/inference"}
    for path, body in BODIES.items():
        assert not unknown_fields(path, {**body, "model": "m"})
    assert unknown_fields(CHAT, {"a": None, "b": 0}) == ["b"]


def test_a_strict_gateway_is_strict_with_everybody(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m", owned_by="tonle")
        async with running_gateway(tmp_path, upstream, strict=True) as place:
            assert (await post(place, CHAT, temprature=0.5)).status_code == 400
            assert (await post(place, CHAT, user="me")).status_code == 200
        assert upstream.headers[0]["x-tonle-strict"] == "1"  # a replica knows more fields than we do
        assert "user" not in upstream.requests[0]  # we acted on it: to the replica it would have no effect

    run(main())


def test_a_stream_tells_in_its_first_chunk_and_the_cache_keeps_it_out(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            for state in ("miss", "hit"):
                told = await place.ask(stream=True, temperature=0, cache_salt="x")
                assert told.headers["x-cache"] == state
                first, *others = told.text.split("\n\n")
                assert [each["param"] for each in json.loads(first.removeprefix("data: "))["warnings"]] == [
                    "cache_salt"
                ]
                assert "warnings" not in "".join(others) and others[-2:] == ["data: [DONE]", ""]
            silent = await place.ask(stream=True, temperature=0)
            assert silent.headers["x-cache"] == "hit" and "warnings" not in silent.text

    run(main())


def test_a_backends_own_remarks_stand_beside_ours(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m", owned_by="tonle")
        upstream.warnings = [{"param": "store", "message": "accepted, has no effect"}]
        async with running_gateway(tmp_path, upstream) as place:
            for stream in (False, True):
                told = await place.ask(store=True, cache_salt="x", stream=stream)
                assert told.headers["x-tonle-warnings"] == "2; cache_salt, store"
                body = json.loads(told.text.split("\n\n")[0].removeprefix("data: ")) if stream else told.json()
                assert [each["param"] for each in body["warnings"]] == ["cache_salt", "store"]

    run(main())


def test_nobody_but_an_admin_steps_forward(tmp_path: Path) -> None:
    async def main() -> None:
        ours, other = Upstream("m", owned_by="tonle"), Upstream("v", owned_by="vllm")
        async with running_gateway(tmp_path, ours, other) as place:
            told = await place.ask(priority="critical")
            assert told.headers["x-tonle-warnings"] == "1; priority"
            assert (await place.ask(priority="critical", headers={"x-tonle-strict": "1"})).status_code == 400
            for key, priority in ((KEY, "low"), (ADMIN, "critical")):
                assert "x-tonle-warnings" not in (await place.ask(priority=priority, key=key)).headers
            assert "normal is used" in (await place.ask(model="v", priority="soon")).json()["warnings"][0]["message"]
        assert [body.get("priority") for body in ours.requests] == [2, 3, "critical"]
        assert "priority" not in other.requests[0]  # there it means something else

    run(main())


def test_the_service_tells_what_it_changed(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m"), context_window=3) as place:
            told = await post(place, "/api/v1/inference", context_window=50, max_context_length=100)
            assert [each["param"] for each in told.json()["metadata"]["warnings"]] == ["context_window"]
            assert (await post(place, "/api/v1/inference", strict="1", context_window=50)).status_code == 400
            wrong = await post(place, "/api/v1/inference", context_window=0)
            assert wrong.status_code == 400 and "context_window" in wrong.json()["error"]["message"]
            large = await place.client.post("/api/v1/inference", content=b"x" * 9_000_000,
                                            headers=JSON | {"authorization": f"Bearer {KEY}"})  # fmt: skip
            assert large.status_code == 413

    run(main())
