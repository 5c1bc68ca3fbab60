"""`GET /v1/requests/{id}/explain` of a gateway: each way a request can end, who may see it, and what backends add."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.gateway.running_gateway import ADMIN, KEY, RunningGateway, Upstream, rows, run, running_gateway, until
from tonle.config.routing import BackendConfig
from tonle.edge.exchange import Exchange
from tonle.gateway import explain_page
from tonle.observe.request_log import RequestLog

ENGINE = {
    "queue_s": 0.4,
    "waits": [{"why": "prompts", "seconds": 0.4}],
    "behind": [{"prompt_tokens": 6100, "seconds": 0.4, "request_id": "long"}],
    "prefill_s": 0.1,
    "cached_tokens": 4,
    "computed_tokens": 3,
    "num_chunks": 1,
    "missed": {"tail": 3},
    "decode_s": 0.2,
    "num_steps": 3,
}


class Telling(Upstream):
    """A Tonle server that explains its requests with what a test has written down."""

    def __init__(self) -> None:
        super().__init__("m", owned_by="tonle")
        self.told, self.told_status = msgspec.json.encode({"engine": ENGINE}), 200
        self.answers = asyncio.Event()
        self.answers.set()
        self.asked: list[tuple[str, dict[str, str]]] = []

    async def _handle(self, exchange: Exchange) -> None:
        if not exchange.path.endswith("/explain"):
            await super()._handle(exchange)
            return
        self.asked.append((exchange.path, exchange.headers))
        await self.answers.wait()
        exchange.reply(self.told, status=self.told_status)


def remembered(place: RunningGateway) -> RequestLog:
    observed = place.gateway.observed
    assert observed is not None
    return observed.request_log


async def explained(place: RunningGateway, request_id: str, *, key: str = ADMIN) -> dict[str, Any]:
    await until(lambda: remembered(place).find(request_id), f"{request_id} is not remembered")
    reply = await place.get(f"/v1/requests/{request_id}/explain", key=key)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


async def ask(place: RunningGateway, request_id: str, text: str = "hello", **fields: Any) -> httpx.Response:
    return await place.ask(text, headers={"x-request-id": request_id}, **fields)


async def ask_slow(place: RunningGateway, upstream: Upstream, request_id: str, **fields: Any) -> httpx.Response:
    """The backend takes longer than anything this machine may do meanwhile: the sentences are about it."""
    upstream.hang.clear()
    asking = asyncio.create_task(ask(place, request_id, **fields))
    await until(lambda: upstream.requests, "it never came")
    await asyncio.sleep(1.0)
    upstream.hang.set()
    return await asking


def check(found: dict[str, Any], request_id: str, *spans: str) -> str:
    """It adds up. Its first sentence."""
    assert (found["object"], found["id"], found["request"]["id"]) == ("request.explanation", request_id, request_id)
    assert sum(span["seconds"] for span in found["spans"]) == pytest.approx(found["total_s"])
    assert found["total_s"] == found["request"]["total_s"] > 0
    names = [span["name"] for span in found["spans"]]  # on a slow machine even the gateway's own work stands out
    assert [name for name in names if name in spans or name != "gateway queue"] == list(spans)
    first: str = found["sentences"][0]
    return first


async def new_key(place: RunningGateway, name: str, **fields: Any) -> str:
    secret: str = (await place.post("/admin/keys", {"name": name, **fields})).json()["key"]
    return secret


def test_answers_and_refusals_add_up(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m", owned_by="vllm")
        async with running_gateway(tmp_path, upstream) as place:
            assert (await ask_slow(place, upstream, "whole", temperature=0)).status_code == 200
            found = await explained(place, "whole")
            check(found, "whole", "accept", "decode", "deliver")
            assert any("for its whole answer of 3 tokens" in said for said in found["sentences"]), found["sentences"]
            assert (await ask(place, "hit", temperature=0)).headers["x-cache"] == "hit"
            assert check(await explained(place, "hit"), "hit", "accept", "deliver").startswith(
                "Answered from the response"
            )
            await ask(place, "stream", stream=True, use_cache=False)
            found = await explained(place, "stream")
            several = "decode" in [span["name"] for span in found["spans"]]  # its words may all have come at once
            check(found, "stream", "accept", "prefill", *(["decode"] if several else []), "deliver")
            assert (await ask(place, "nobody", key="wrong")).status_code == 401
            assert "(invalid_api_key)" in check(await explained(place, "nobody"), "nobody", "accept")
            assert (await ask(place, "unknown", model="other")).status_code == 404
            assert "no such model" in check(await explained(place, "unknown"), "unknown", "accept")
            limited = await new_key(place, "limited", requests_per_minute=1)
            assert (await ask(place, "first", key=limited)).status_code == 200
            assert (await ask(place, "second", key=limited)).status_code == 429
            first = check(await explained(place, "second"), "second", "accept")
            assert first.startswith("Refused with status 429 after ")
            assert first.endswith(": its key may make 1 requests per minute (rate_limit_exceeded).")

    run(main())


def test_the_id_of_an_answer(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            await ask(place, "req-5a0c3f9be1d2")
            await ask(place, "mine")
            await ask(place, "chatcmpl-mine")
            for name, of in (
                ("chatcmpl-5a0c3f9be1d2", "req-5a0c3f9be1d2"), ("chatcmpl-req-5a0c3f9be1d2", "req-5a0c3f9be1d2"),
                ("cmpl-mine", "mine"), ("chatcmpl-mine", "chatcmpl-mine"),
            ):  # fmt: skip
                await explained(place, of)
                reply = await place.get(f"/v1/requests/{name}/explain", key=ADMIN)
                assert reply.status_code == 200 and reply.json()["id"] == of, name
            assert (await place.get("/v1/requests/other-mine/explain", key=ADMIN)).status_code == 404

    run(main())


def test_an_id_that_others_use_again_leads_to_ones_own_request(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            other = await new_key(place, "other")
            assert (await ask(place, "same", key=KEY)).status_code == 200
            mine = (await explained(place, "same", key=KEY))["request"]["key_id"]
            assert (await ask(place, "same", key=other)).status_code == 200
            assert (await ask(place, "same", key="wrong")).status_code == 401
            await until(lambda: len(remembered(place)) == 3, "not all are remembered")
            assert (await explained(place, "same", key=KEY))["request"]["key_id"] == mine
            theirs = (await explained(place, "same", key=other))["request"]
            assert theirs["key"] == "other" and theirs["status"] == "ok"
            assert (await explained(place, "same", key=ADMIN))["request"]["http_status"] == 401, "the newest"

    run(main())


def test_a_backend_is_not_asked_for_an_id_that_another_key_used_there_since(tmp_path: Path) -> None:
    """Not every backend heeds salts: it would tell of the other key's request."""

    async def main() -> None:
        upstream = Telling()
        async with running_gateway(tmp_path, upstream, cache=None) as place:
            other = await new_key(place, "other")
            for key in (KEY, other):
                assert (await ask(place, "same", key=key)).status_code == 200
            await until(lambda: len(remembered(place)) == 2, "not all are remembered")
            mine = await explained(place, "same", key=KEY)
            assert not upstream.asked and mine["engine"] is None
            assert any("had a later request with this id" in said for said in mine["sentences"])
            assert (await explained(place, "same", key=other))["engine"] is not None

    run(main())


def test_a_gateway_is_told_of_the_caller_that_it_asks_for(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m"), cache=None) as place:
            key = await new_key(place, "gateway", scopes=["models", "gateway", "dashboard"])
            for salt, stream in (("a", True), ("b", False)):
                headers = {"x-request-id": "same", "x-tonle-salt": salt}
                assert (await place.ask(key=key, headers=headers, stream=stream)).status_code == 200
            await until(lambda: len(remembered(place)) == 2, "not all are remembered")
            told = {}
            for salt in ("a", "b", "c", ""):
                headers = {"authorization": f"Bearer {key}"} | ({"x-tonle-salt": salt} if salt else {})
                reply = await place.client.get("/v1/requests/same/explain", headers=headers)
                told[salt] = reply.json()["request"]["stream"] if reply.status_code == 200 else reply.status_code
            assert told == {"a": True, "b": False, "c": 404, "": False}

    run(main())


def test_a_caller_that_leaves_the_queue(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        upstream.hang.clear()
        async with running_gateway(tmp_path, upstream, max_concurrent=1, cache=None) as place:
            gate = place.gateway.pool.backends[0].gate
            ahead = asyncio.create_task(ask(place, "ahead"))
            await until(lambda: upstream.requests, "the first request has not arrived")
            behind = asyncio.create_task(ask(place, "behind"))
            await until(lambda: gate.num_queued == 1, "the second is not queued")
            behind.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await behind
            first = check(await explained(place, "behind"), "behind", "accept", "gateway queue")
            assert first.startswith("The caller left after ") and first.endswith("while it waited in the gateway.")
            upstream.hang.set()
            assert (await ahead).status_code == 200
            check(await explained(place, "ahead"), "ahead", "accept", "decode", "deliver")

    run(main())


def test_a_hedge(tmp_path: Path) -> None:
    async def main() -> None:
        slow, other = Upstream("m"), Upstream("m")
        slow.hang.clear()
        options = {"hedge_after_s": 0.05, "prefix_affinity": False, "cache": None}
        async with running_gateway(tmp_path, slow, other, **options) as place:
            assert (await ask(place, "hedged", stream=True)).headers["x-tonle-backend"] == "b1"
            found = await explained(place, "hedged")
            said = "Another backend had not begun in time, so b1 was asked too, and answered first."
            assert said in found["sentences"]
            assert sum(span["seconds"] for span in found["spans"]) == pytest.approx(found["total_s"])
            slow.hang.set()

    run(main())


def test_failures_and_retries(tmp_path: Path) -> None:
    async def main() -> None:
        broken, good = Upstream("m"), Upstream("m")
        broken.status = 500
        options = {"prefix_affinity": False, "cache": None, "breaker_failures": 100}
        async with running_gateway(tmp_path, broken, good, **options) as place:
            assert (await ask(place, "retried")).headers["x-tonle-backend"] == "b1"
            found = await explained(place, "retried")
            check(found, "retried", "accept", "gateway queue", "decode", "deliver")
            assert any(said.startswith("b0 failed on this request") and said.endswith("b1 was asked next.")
                       for said in found["sentences"]), found["sentences"]  # fmt: skip
            good.status = 500
            assert (await ask(place, "failed")).status_code == 500
            found = await explained(place, "failed")
            assert found["sentences"][0].startswith("Failed at b")
            check(found, "failed", "accept", "gateway queue", "send")

    run(main())


def test_who_may_see_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            mine, mate = [await new_key(place, name, tenant="team") for name in ("mine", "mate")]
            stranger = await new_key(place, "stranger")
            watcher = await new_key(place, "watcher", scopes=["dashboard"])
            scraper = await new_key(place, "scraper", scopes=["metrics"])
            assert (await ask(place, "r1", key=mine)).status_code == 200
            shown = {key: (await explained(place, "r1", key=key))["request"]["key"] for key in (mine, mate, watcher)}
            assert shown == {mine: "mine", mate: "", watcher: "mine"}
            assert (await explained(place, "r1"))["request"]["key"] == "mine"
            replies = {
                name: await place.get(f"/v1/requests/{name}/explain", key=stranger) for name in ("r1", "none", "a%20b")
            }
            assert {reply.status_code for reply in replies.values()} == {404}
            told = {name: reply.json()["error"] for name, reply in replies.items()}
            assert told["r1"]["code"] == "request_not_found"
            assert told["r1"]["message"].replace("'r1'", "'none'") == told["none"]["message"], (
                "it tells that there is one"
            )
            assert "the 1 that this server remembers: it keeps the last 5,000" in told["none"]["message"]
            assert "restarts" in told["none"]["message"] and "X-Request-Id" in told["none"]["message"]
            assert (await place.get("/v1/requests/r1/explain", key=scraper)).status_code == 403
            assert (await place.client.get("/v1/requests/r1/explain")).status_code == 401
            assert (await place.post("/v1/requests/r1/explain", {})).status_code == 405

    run(main())


def test_the_backend_that_answered_is_asked(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Telling()
        row = {"backends": lambda: (BackendConfig(url=upstream.url, name="r0", api_key="for-r0"),)}
        async with running_gateway(tmp_path, upstream, cache=None, **row) as place:
            other = await new_key(place, "b")
            assert (await ask(place, "long", key=other)).status_code == 200
            assert (await ask(place, "short", stream=True)).status_code == 200
            await until(lambda: remembered(place).find("short"), "it is not remembered")
            mine, all_of_it = await explained(place, "short", key=KEY), await explained(place, "short")
            path, headers = upstream.asked[-1]
            assert path == "/v1/requests/short/explain" and headers["authorization"] == "Bearer for-r0"
            assert headers["x-tonle-salt"] == upstream.headers[-1]["x-tonle-salt"], "it cannot tell whose request it is"
            waits = [
                next(said for said in found["sentences"] if "waited behind" in said) for found in (mine, all_of_it)
            ]
            assert waits[0].endswith("waited behind a 6,100-token prompt of another key.")
            assert waits[1].endswith("waited behind a 6,100-token prompt of key b (long).")
            assert mine["engine"]["behind"][0]["request_id"] is None
            assert all_of_it["engine"]["behind"][0]["request_id"] == "long"
            assert sum(span["seconds"] for span in mine["spans"]) == pytest.approx(mine["total_s"])
            assert mine["engine"]["cached_tokens"] == 4

    run(main())


def test_a_backend_that_tells_nothing_of_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        upstream = Telling()
        async with running_gateway(tmp_path, upstream, cache=None) as place:
            await ask(place, "r1", stream=True)

            async def last() -> str:
                found = await explained(place, "r1")
                assert found["engine"] is None
                assert sum(span["seconds"] for span in found["spans"]) == pytest.approx(found["total_s"])
                sentence: str = found["sentences"][-1]
                return sentence

            wrong = {b"<html>": "cannot be read", b'{"engine": {"queue_s": -1}}': "cannot be read",
                     b'{"engine": null}': "", b'{"more": ' + b"[" * 200_000: "cannot be read",
                     b" " * 300_000: "could not be asked"}  # fmt: skip
            for body, said in wrong.items():
                upstream.told = body
                assert said in await last()
            upstream.told = b"{}"
            await ask(place, "again")
            await ask(place, "again")
            await until(lambda: len(remembered(place)) == 3, "not all are remembered")
            older = remembered(place).newest(2)[1]
            found = (await place.get(f"/dashboard/api/requests/again?number={older.number}")).json()
            assert any("had a later request with this id" in said for said in found["explanation"]["sentences"])
            for status, said in {404: "does not remember", 403: "the api_key", 500: "(status 500)"}.items():
                upstream.told_status = status
                assert said in await last()
            monkeypatch.setattr(explain_page, "ASK_S", 0.2)
            upstream.answers.clear()
            assert "could not be asked" in await last()
            upstream.answers.set()

    run(main())


def test_other_servers_are_not_asked(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Telling()
        row = {"backends": lambda: rows(upstream, kind="vllm")}
        async with running_gateway(tmp_path, upstream, cache=None, **row) as place:
            await ask_slow(place, upstream, "r1", stream=True)
            found = await explained(place, "r1")
            assert not upstream.asked and found["engine"] is None
            assert any("until the first token of b0" in said for said in found["sentences"]), found["sentences"]

    run(main())


def test_without_keys_all_may_ask(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m"), api_key=(), admin_key=()) as place:
            await ask(place, "r1", key="")
            await until(lambda: remembered(place).find("r1"), "it is not remembered")
            reply = await place.client.get("/v1/requests/r1/explain")
            assert reply.status_code == 200 and reply.json()["request"]["key_id"] == "anonymous"

    run(main())
