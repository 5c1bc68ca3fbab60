"""A caller that hangs up pays for what was computed until then, wherever limits are counted; before sending, nothing."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.fakes.front import FakeFront
from tests.fakes.stores import postgres_store, wait_for
from tests.gateway.running_gateway import CHAT, RunningGateway, Upstream, running_gateway, until
from tests.gateway.test_several_gateways import PATIENT, made
from tests.http.serving import serving
from tonle.config.routing import BackendConfig
from tonle.edge.exchange import Exchange
from tonle.edge.listening import run

TEXT = "a" * 6396  # 1,600 tokens, estimated
ASKED = 50  # max_tokens


@pytest.fixture(params=["sqlite", "redis", "postgres"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Of a gateway that counts limits there."""
    if request.param == "sqlite":
        yield {"state_db": str(tmp_path / "state.db")}
    elif request.param == "redis":
        yield {"state_db": request.getfixturevalue("redis").url, **PATIENT}
    else:
        with postgres_store(*request.getfixturevalue("postgres")) as store:
            yield {"state_db": store.url, **PATIENT}


async def hang_up(place: RunningGateway, when: Callable[[], object], **asked: Any) -> httpx.Response | None:
    """Ask, and close the connection once `when` holds. The reply, if one came instead."""
    asking = asyncio.create_task(place.ask(**asked))
    await until(lambda: when() or asking.done(), "neither answered nor reached")
    if asking.done():
        return asking.result()
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking
    return None


async def used(place: RunningGateway, key_id: str, expected: int) -> None:
    """What the key has used today, once it is counted."""
    found: dict[str, int] = {}
    for _ in range(12_000):
        found = await place.gateway.limiter.used_today([key_id])
        if found.get(key_id, 0) == expected:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{found} instead of {expected}")


@contextlib.asynccontextmanager
async def limited(
    tmp_path: Path, upstream: Upstream, limits: dict[str, int], **settings: Any
) -> AsyncIterator[tuple[RunningGateway, str, str]]:
    """A gateway, and a key with these limits: its secret and its id."""
    async with running_gateway(tmp_path, upstream, **{"cache": None} | settings) as place:
        key = await made(place, **limits)
        yield place, key["key"], key["id"]


@pytest.mark.parametrize("stream", [True, False])
def test_hanging_up_before_the_first_byte_is_not_free(
    tmp_path: Path, settings: dict[str, Any], *, stream: bool
) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        upstream.hang.clear()
        async with limited(tmp_path, upstream, {"tokens_per_minute": 2000}, **settings) as (place, key, _):
            statuses = []
            for number in range(20):
                refused = await hang_up(
                    place, lambda before=number: len(upstream.requests) > before, text=TEXT, max_tokens=ASKED,
                    stream=stream, key=key,
                )  # fmt: skip
                statuses.append(None if refused is None else refused.status_code)
                if refused is None:
                    await until(lambda: upstream.num_hangups == len(upstream.requests), "the backend was not told")
                    await until(lambda: place.gateway.server.num_active == 0, "it is not settled")
            assert statuses == [None] + [429] * 19 and len(upstream.requests) == 1
            upstream.hang.set()

    run(main())


def test_requests_at_once_do_not_multiply_the_day(tmp_path: Path, settings: dict[str, Any]) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        upstream.hang.clear()
        async with limited(tmp_path, upstream, {"tokens_per_day": 1000}, **settings) as (place, key, key_id):
            asking = [asyncio.create_task(place.ask(f"{n}", max_tokens=1150, key=key)) for n in range(12)]
            await until(lambda: upstream.requests and sum(each.done() for each in asking) == 11, "more than one runs")
            upstream.hang.set()
            statuses = sorted(reply.status_code for reply in await asyncio.gather(*asking))
            assert statuses == [200] + [429] * 11 and len(upstream.requests) == 1
            await used(place, key_id, 10)
            assert (
                await place.ask("again", max_tokens=1150, key=key)
            ).status_code == 200  # what it did not use came back

    run(main())


def test_what_was_written_until_then_is_charged(tmp_path: Path, settings: dict[str, Any]) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        upstream.words = [f" word{number}" for number in range(40)]
        upstream.pause_after = 25
        async with limited(tmp_path, upstream, {"tokens_per_day": 10**6}, **settings) as (place, key, key_id):
            headers = {"authorization": f"Bearer {key}"}
            body = {"model": "m", "messages": [{"role": "user", "content": TEXT}], "stream": True}
            async with place.client.stream("POST", CHAT, json=body, headers=headers) as reply:
                async for line in reply.aiter_lines():
                    if "word24" in line:
                        break
            written = len("".join(upstream.words[:25])) // 4 + 1
            await used(place, key_id, 1600 + written)

    run(main())


def test_before_a_backend_is_asked_hanging_up_costs_nothing(tmp_path: Path, settings: dict[str, Any]) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        upstream.hang.clear()
        async with limited(tmp_path, upstream, {"tokens_per_minute": 20_000}, max_concurrent=1, **settings) as (
            place, key, key_id,
        ):  # fmt: skip
            gate = place.gateway.pool.backends[0].gate
            running = asyncio.create_task(place.ask(key=key, max_tokens=3))
            await until(lambda: upstream.requests, "it never came")
            for _ in range(20):
                assert await hang_up(place, lambda: gate.num_queued, text=TEXT, max_tokens=ASKED, key=key) is None
                await until(lambda: gate.num_queued == 0, "it is still queued")
            upstream.hang.set()
            assert (await running).status_code == 200
            await used(place, key_id, 10)

    run(main())


@contextlib.contextmanager
def deaf_port() -> Any:
    """An address that takes no more connections: whoever connects waits."""
    with socket.socket() as listener, contextlib.ExitStack() as fillers:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            filler = fillers.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


def test_while_connecting_hanging_up_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(port: int) -> None:
        row = BackendConfig(url=f"http://127.0.0.1:{port}", name="deaf", models=("m",), kind="openai")
        async with running_gateway(tmp_path, backends=lambda: (row,), probe_interval_s=0, cache=None) as place:
            key = await made(place, tokens_per_day=10**6)
            backend = place.gateway.pool.backends[0]
            assert await hang_up(place, lambda: backend.num_sent == 1, text=TEXT, key=key["key"]) is None
            await until(lambda: place.gateway.server.num_active == 0, "it is not settled")
            assert await place.gateway.limiter.used_today([key["id"]]) in ({}, {key["id"]: 0})

    with deaf_port() as port:
        run(main(port))


def test_a_deadline_that_passes_is_paid_for_like_a_hang_up(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        upstream.hang.clear()
        async with limited(tmp_path, upstream, {"tokens_per_minute": 2000}) as (place, key, key_id):
            headers = {"x-request-deadline-ms": "200"}
            late = await place.ask(TEXT, max_tokens=ASKED, stream=True, key=key, headers=headers)
            assert late.status_code == 504 and len(upstream.requests) == 1
            await used(place, key_id, 1600)
            assert (await place.ask(TEXT, max_tokens=ASKED, stream=True, key=key, headers=headers)).status_code == 429
            upstream.hang.set()

    run(main())


@pytest.mark.parametrize(
    ("token_s", "paid"), [(None, 1600 + ASKED), (1e9, 1600), (1e-9, 1600 + ASKED)], ids=["unknown", "slow", "fast"]
)
def test_of_a_whole_answer_what_was_written_is_told_by_the_time_it_took(
    tmp_path: Path, token_s: float | None, paid: int
) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        upstream.hang.clear()
        async with limited(tmp_path, upstream, {"tokens_per_day": 10**6}) as (place, key, key_id):
            place.gateway.pool.backends[0].gate.token_s = token_s
            assert await hang_up(place, lambda: upstream.requests, text=TEXT, max_tokens=ASKED, key=key) is None
            await used(place, key_id, paid)
            upstream.hang.set()

    run(main())


def test_how_long_a_token_takes_is_measured(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m"), cache=None) as place:
            gate = place.gateway.pool.backends[0].gate
            assert gate.token_s is None
            assert (await place.ask()).status_code == 200
            assert gate.token_s is not None and 0 < gate.token_s < 60

    run(main())


def test_waiting_for_an_identical_request_costs_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        upstream.hang.clear()
        async with limited(tmp_path, upstream, {"max_concurrent": 9}, cache="memory") as (place, key, key_id):
            first = asyncio.create_task(place.ask(TEXT, temperature=0, key=key))
            await until(lambda: upstream.requests, "it never came")
            active = lambda: place.gateway.server.num_active == 2  # noqa: E731
            assert await hang_up(place, active, text=TEXT, temperature=0, key=key) is None
            upstream.hang.set()
            assert (await first).status_code == 200
            await used(place, key_id, 10)

    run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_an_engine_in_this_process_tells_exactly(tmp_path: Path, *, stream: bool) -> None:
    front = FakeFront()
    front.stall_after = 5
    admin = {"authorization": "Bearer boss"}
    with serving(front, admin_key=("boss",), state_db=str(tmp_path / "state.db")) as url, \
            httpx.Client(base_url=url, headers=admin, timeout=60) as client:  # fmt: skip
        secret = client.post("/admin/keys", json={"name": "alice"}).json()["key"]
        raw = msgspec.json.encode({"messages": [{"role": "user", "content": "hi"}], "stream": stream})
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as line:
            head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {secret}\r\n"
            head += f"content-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
            line.sendall(head.encode() + raw)
            wait_for(lambda: front.submitted and front.submitted[0][0].usage.completion_tokens == 5, "it never wrote")
        prompt = front.submitted[0][0].usage.prompt_tokens
        wait_for(lambda: client.get("/admin/keys").json()["keys"][0]["tokens_today"] == prompt + 5, "not charged")


@pytest.mark.parametrize(
    ("path", "answer", "paid"),
    [
        ("/v1/responses", {"choices": [{"message": {"content": ""}}], "usage": {"prompt_tokens": 7, "completion_tokens": 5}}, 12),
        ("/v1/embeddings", {"data": [], "usage": {"prompt_tokens": 9, "total_tokens": 9}}, 9),
        ("/v1/rerank", {"results": []}, len('{"model":"m","input":"x"}') // 4 + 1),  # it does not count: estimated
        ("/tokenize", {"tokens": [1, 2, 3], "count": 3}, 0),
    ],
)  # fmt: skip
def test_answers_of_every_path_are_paid_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, answer: dict[str, Any], paid: int
) -> None:
    async def handle(upstream: Upstream, exchange: Exchange) -> None:
        listed = {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "x"}]}
        exchange.reply(msgspec.json.encode(listed if exchange.path == "/v1/models" else answer))

    monkeypatch.setattr(Upstream, "_handle", handle)

    async def main() -> None:
        async with limited(tmp_path, Upstream("m"), {"tokens_per_day": 10**6}) as (place, key, key_id):
            headers = {"authorization": f"Bearer {key}"}
            body = {"model": "m", "input": "x"}
            reply = await place.client.post(path, json=body, headers=headers)
            assert reply.status_code == 200
            await used(place, key_id, paid)

    run(main())
