"""/v1/responses inside the gateway: failures, records, limits, cache, warnings, and where responses are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.fakes.stores import Store
from tests.gateway.responses.chat_backend import ChatBackend, client_of, responses_gateway
from tests.gateway.running_gateway import ADMIN, JSON, KEY, RunningGateway, Upstream, run, running_gateway, until

PATH = "/v1/responses"


async def respond(
    place: RunningGateway, *, key: str = KEY, headers: dict[str, str] | None = None, **fields: Any
) -> httpx.Response:
    head = {"authorization": f"Bearer {key}", **(headers or {})}
    return await place.client.post(PATH, json={"model": "m", "input": "What is the capital?", **fields}, headers=head)


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


def num_stored(place: RunningGateway) -> int:
    store: Any = place.gateway._responses.store
    return int(store.num_entries)


@pytest.mark.parametrize(("screw", "value"), [("stream_error", "it broke"), ("break_after", 2)])
def test_a_stream_that_fails_says_so_and_is_not_stored(tmp_path: Path, screw: str, value: Any) -> None:
    async def main() -> None:
        backend = ChatBackend()
        setattr(backend, screw, value)
        async with responses_gateway(tmp_path, backend) as (place, client):
            told: list[Any] = []
            with pytest.raises(openai.APIError, match=r"it broke|broke off"):
                async for event in await client.responses.create(model="m", input="Hi", stream=True):
                    told.append(event)  # noqa: PERF401 - those before the exception, too
            assert told[0].type == "response.created" and told[-1].type == "response.failed"
            assert told[-1].response.status == "failed" and told[-1].response.error.message
            assert num_stored(place) == 0
            with pytest.raises(openai.APIError):
                async with client.responses.stream(model="m", input="Hi") as stream:
                    await stream.get_final_response()
        assert [record["status"] for record in place.records()] == ["failed", "failed"]

    run(main())


def test_a_caller_who_hangs_up_leaves_nothing_stored(tmp_path: Path) -> None:
    async def main() -> None:
        backend = ChatBackend()
        backend.pause_after = 2
        async with responses_gateway(tmp_path, backend) as (place, client):
            stream = await client.responses.create(model="m", input="Hi", stream=True)
            first = await anext(aiter(stream))
            assert first.type == "response.created"
            await stream.close()
            await until(lambda: backend.num_hangups == 1, "the backend was not told")
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(first.response.id)
            assert num_stored(place) == 0
        (record,) = place.records()
        assert record["status"] == "cancelled" and record["endpoint"] == PATH
        assert record["response_id"] == first.response.id

    run(main())


def test_errors_have_openais_shape_and_the_callers_names(tmp_path: Path) -> None:
    async def main() -> None:
        backend = ChatBackend()
        async with running_gateway(tmp_path, backend) as place:
            for status, fields in (
                (400, {"tools": [{"type": "web_search"}]}),
                (404, {"model": "other"}),
                (400, {"input": []}),
            ):
                reply = await respond(place, **fields)
                assert reply.status_code == status and set(reply.json()["error"]) == {
                    "message",
                    "type",
                    "param",
                    "code",
                }
            assert (await respond(place, key="wrong")).status_code == 401
            backend.status = 500
            failed = await respond(place)
            assert failed.status_code == 500 and failed.json()["error"]["message"] == "broken on purpose"
            backend.hang.clear()
            for stream in (False, True):
                late = await respond(place, headers={"x-request-deadline-ms": "50"}, stream=stream)
                assert late.status_code == 504 and late.json()["error"]["code"] == "deadline_exceeded"
        records = place.records()
        assert len(records) == 7 and {record["endpoint"] for record in records} == {PATH}

    run(main())


def test_a_backend_that_is_no_chat_is_a_502(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChatBackend, "_whole", lambda self, body: {"object": "other"})

    async def main() -> None:
        async with running_gateway(tmp_path, ChatBackend()) as place:
            reply = await respond(place)
            assert reply.status_code == 502 and "not a chat completion" in reply.json()["error"]["message"]

    run(main())


def test_bodies_of_every_kind_are_refused_with_400(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, ChatBackend()) as place:
            headers = {**JSON, "authorization": f"Bearer {KEY}"}
            odd = [
                b"",
                b"{",
                b"[]",
                b"5",
                b'{"input"',
                b"{}",
                b'{"input": {}}',
                b'{"input": "\xff"}',
                b'{"input": ' + b"[" * 200 + b"]" * 200 + b"}",
                b'{"input": "x", "previous_response_id": 5}',
                b'{"input": "x", "previous_response_id": ""}',
                b'{"input": "x", "max_output_tokens": 1e999}',
                b'{"input": "x", "text": {"format": {"type": "json_schema"}}}',
            ]
            for body in odd:
                reply = await place.client.post(PATH, content=body, headers=headers)
                assert reply.status_code == 400 and reply.json()["error"]["message"], body
        assert [record["status"] for record in place.records()] == ["refused"] * len(odd)

    run(main())


def test_warnings_are_in_header_reply_and_record(tmp_path: Path) -> None:
    async def main() -> None:
        backend = ChatBackend()
        backend.warnings = [{"param": "seed", "message": "has no effect"}]
        async with running_gateway(tmp_path, backend) as place:
            whole = await respond(place, temprature=1)
            streamed = await respond(place, temprature=1, stream=True)
            for reply, response in ((whole, whole.json()), (streamed, events_of(streamed.text)[-1]["response"])):
                assert reply.headers["x-tonle-warnings"] == "2; temprature, seed"
                assert [warning["param"] for warning in response["warnings"]] == ["temprature", "seed"]
            assert whole.headers["x-tonle-backend"] == "b0"
            strict = await respond(place, temprature=1, headers={"x-tonle-strict": "1"})
            assert strict.status_code == 400 and "temprature" not in backend.requests[0]

    run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_cached_as_those_of_chat(tmp_path: Path, *, stream: bool) -> None:
    async def main() -> None:
        backend = ChatBackend()
        async with running_gateway(tmp_path, backend) as place:
            replies = [
                await respond(place, temperature=0, stream=stream, metadata={"n": str(number)}) for number in range(2)
            ]
            assert [reply.headers["x-cache"] for reply in replies] == ["miss", "hit"] and len(backend.requests) == 1
            found = [events_of(reply.text)[-1]["response"] if stream else reply.json() for reply in replies]
            assert found[0]["output"][0]["content"] == found[1]["output"][0]["content"]
            assert found[0]["id"] != found[1]["id"] and [each["metadata"]["n"] for each in found] == ["0", "1"]
            assert num_stored(place) == 2
            assert (await respond(place, temperature=0, stream=stream, use_cache=False)).headers["x-cache"] == "bypass"
        assert [record["status"] for record in place.records()] == ["ok", "cached", "ok"]

    run(main())


def test_the_whole_conversation_is_charged_for(tmp_path: Path) -> None:
    async def main() -> None:
        backend = ChatBackend()
        async with running_gateway(tmp_path, backend) as place:
            made = await place.post("/admin/keys", {"name": "a", "tokens_per_minute": 4000})
            key = made.json()["key"]
            first = await respond(place, key=key, input="x" * 8000, max_output_tokens=10)
            assert first.status_code == 200
            # 2,000 tokens by estimate were settled to 16. The next request reserves the conversation again.
            second = await respond(
                place, key=key, input="y" * 12000, max_output_tokens=10, previous_response_id=first.json()["id"]
            )
            assert second.status_code == 429, "2,000 and 3,000 tokens of prompt are more than 4,000"
            third = await respond(
                place, key=key, input="y" * 4000, max_output_tokens=10, previous_response_id=first.json()["id"]
            )
            assert third.status_code == 200

    run(main())


def test_a_conversation_has_its_place_in_the_memory_of_requests(tmp_path: Path) -> None:
    async def main() -> None:
        limits = {"request_memory_bytes": 200_000, "max_body_bytes": 100_000}
        async with running_gateway(tmp_path, ChatBackend(), **limits) as place:
            first = (await respond(place, input="x" * 60_000)).json()
            place.gateway.server.held.num_bytes += 150_000  # as if others held it
            full = await respond(place, previous_response_id=first["id"])
            assert full.status_code == 503 and "all the memory" in full.json()["error"]["message"]
            place.gateway.server.held.num_bytes -= 150_000
            second = await respond(place, input="y" * 60_000, previous_response_id=first["id"])
            assert second.status_code == 200 and place.gateway.server.held.num_bytes == 0
            long = await respond(place, previous_response_id=second.json()["id"])
            assert long.status_code == 400 and "more than max_body (100000)" in long.json()["error"]["message"]

    run(main())


def test_truncation_leaves_out_the_oldest_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        backend = ChatBackend()
        async with running_gateway(tmp_path, backend) as place:
            turns: list[Any] = []
            for number in range(6):
                turns += [
                    {"role": "user", "content": f"q{number} " + "x" * 400},
                    {"role": "assistant", "content": f"a{number}"},
                ]
            turns.append({"role": "user", "content": "last"})
            unknown = await respond(place, input=turns, truncation="auto")
            assert "context length of this model is not known" in unknown.json()["warnings"][0]["message"]
            entry = place.gateway.pool.backends[0].models["m"]
            monkeypatch.setattr(entry, "max_model_len", 400)
            reply = await respond(place, input=turns, instructions="Rule.", truncation="auto", max_output_tokens=100)
            assert reply.json()["truncation"] == "auto"
            assert reply.json()["warnings"][0]["message"] == "oldest messages left out: 8"
            sent = backend.requests[-1]
            assert [message["content"][:2] for message in sent["messages"]] == ["Ru", "q4", "a4", "q5", "a5", "la"]
            assert sent["truncate_prompt_tokens"] == -1
            whole = await respond(place, input=turns)
            assert "warnings" not in whole.json() and len(backend.requests[-1]["messages"]) == 13

    run(main())


def test_without_a_store(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, ChatBackend(), response_store=None) as place:
            plain = (await respond(place)).json()
            assert plain["store"] is False and "warnings" not in plain
            asked = (await respond(place, store=True)).json()
            assert asked["warnings"][0]["param"] == "store" and "not stored" in asked["warnings"][0]["message"]
            refused = await respond(place, previous_response_id=plain["id"])
            assert refused.status_code == 400
            assert "--response-store redis://HOST:6379/0" in refused.json()["error"]["message"]
            assert (await place.get(f"{PATH}/{plain['id']}", key=KEY)).status_code == 404

    run(main())


def test_two_gateways_share_responses_in_the_caches_redis(tmp_path: Path, redis: Store) -> None:
    async def main() -> None:
        backend = ChatBackend()
        async with (
            running_gateway(tmp_path / "1", backend, cache=redis.url) as one,
            running_gateway(tmp_path / "2", ChatBackend(), cache=None, response_store=redis.url) as other,
        ):
            first = (await respond(one, input="Hi")).json()
            streamed = await respond(other, input="And?", stream=True, previous_response_id=first["id"])
            second = events_of(streamed.text)[-1]["response"]
            third = await respond(one, input="Then?", previous_response_id=second["id"])
            assert third.status_code == 200
            assert [message["content"] for message in backend.requests[-1]["messages"]] == [
                "Hi",
                "Phnom Penh.",
                "And?",
                "Phnom Penh.",
                "Then?",
            ]
            assert (await other.get(f"{PATH}/{first['id']}", key=KEY)).json() == first
            assert (await other.get(f"{PATH}/{first['id']}", key=ADMIN)).status_code == 404
            redis.kill()
            unstored = (await respond(one, input="Hi")).json()
            assert unstored["status"] == "completed" and unstored["store"] is False
            assert "this response was not stored: redis://" in unstored["warnings"][0]["message"]
            lost = await respond(one, previous_response_id=first["id"])
            assert lost.status_code == 503 and lost.json()["error"]["code"] == "store_lost"

    run(main())


def test_paths_methods_and_metrics(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, ChatBackend()) as place:
            made = (await respond(place)).json()["id"]
            head = {"authorization": f"Bearer {KEY}"}
            statuses = {
                ("GET", f"{PATH}/{made}"): 200,
                ("GET", f"{PATH}/{made}?stream=true"): 400,
                ("GET", f"{PATH}/{made}/input_items"): 200,
                ("GET", f"{PATH}/{made}/input_items?order=up"): 400,
                ("GET", f"{PATH}/{made}/input_items?after=x"): 400,
                ("GET", f"{PATH}/{made}/other"): 404,
                ("POST", f"{PATH}/{made}/cancel"): 404,
                ("POST", f"{PATH}/{made}"): 405,
                ("POST", f"{PATH}/input_tokens"): 404,
                ("GET", f"{PATH}/"): 404,
                ("GET", f"{PATH}/resp_x%00%2F"): 404,
                ("GET", f"{PATH}/{made}/input_items?" + "&".join(["a=1"] * 50)): 400,
                ("GET", PATH): 405,
                ("DELETE", f"{PATH}/{made}"): 200,
            }
            for (method, path), status in statuses.items():
                reply = await place.client.request(method, path, headers=head)
                assert reply.status_code == status, (method, path, reply.text)
            assert (await place.client.get(f"{PATH}/{made}")).status_code == 401
            metrics = (await place.get("/metrics")).text
            assert 'path="/v1/responses/{id}"' in metrics and 'path="/v1/responses/{id}/input_items"' in metrics
            assert made not in metrics

    run(main())


@pytest.mark.parametrize("status", [200, 400])
def test_a_waiting_stream_is_kept_alive_before_it_begins(tmp_path: Path, status: int) -> None:
    async def main() -> None:
        backend = ChatBackend()
        backend.hang.clear()
        backend.status = status
        async with running_gateway(tmp_path, backend, keep_alive_s=0.02) as place:
            body, head = {"model": "m", "input": "Hi", "stream": True}, {"authorization": f"Bearer {KEY}"}
            async with place.client.stream("POST", PATH, json=body, headers=head) as reply:
                lines = aiter(reply.aiter_lines())
                assert (await anext(lines)).startswith(": ")
                backend.hang.set()
                kinds = [event["type"] for event in events_of("\n".join([line async for line in lines]))]
            assert kinds[:2] == ["response.created", "response.in_progress"]
            assert kinds[2:] == ["response.failed", "error"] if status == 400 else kinds[-1] == "response.completed"

    run(main())


def test_keys_of_one_tenant_share_responses(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            keys = [(await place.post("/admin/keys", {"name": name, "tenant": "t"})).json()["key"] for name in "ab"]
            made = (await respond(place, key=keys[0])).json()
            async with client_of(place, keys[1]) as other:
                assert (await other.responses.retrieve(made["id"])).output_text == "Phnom Penh."

    run(main())
