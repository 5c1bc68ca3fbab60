"""Two gateways in front of the same backends, with keys and limits on a real Redis or PostgreSQL."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.stores import Store
from tests.gateway.running_gateway import ADMIN, CHAT, KEY, RunningGateway, Upstream, rows, run, running_gateway, until
from tests.gateway.test_process import BODY, Slow, gateway, slow
from tonle.errors import ConfigError
from tonle.gateway.discovery import added_backends

__all__ = ["slow"]  # a fixture

PATIENT: dict[str, Any] = {"store_timeout_s": 120.0, "state_lease_s": 3600.0}


@contextlib.asynccontextmanager
async def two(
    folder: Path, store: Store, upstream: Upstream, **settings: Any
) -> AsyncIterator[tuple[RunningGateway, RunningGateway]]:
    settings = {"state_db": store.url, **PATIENT, **settings}
    for name in ("one", "two"):
        (folder / name).mkdir(exist_ok=True)
    async with running_gateway(folder / "one", upstream, **settings) as one, \
            running_gateway(folder / "two", backends=lambda: rows(upstream), **settings) as other:  # fmt: skip
        yield one, other


async def made(place: RunningGateway, **limits: int) -> dict[str, Any]:
    """A key with these limits, made through the admin API."""
    reply = await place.post("/admin/keys", {"name": "alice", "limits": limits})
    assert reply.status_code == 201, reply.text
    key: dict[str, Any] = reply.json()
    return key


async def until_status(place: RunningGateway, key: str, status: int) -> httpx.Response:
    for _ in range(900):
        reply = await place.ask(key=key)
        if reply.status_code == status:
            return reply
        await asyncio.sleep(0.1)
    raise AssertionError(f"still {reply.status_code}: {reply.text}")


def test_a_backend_added_here_is_known_there_and_both_are_one_gateway(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(added_backends, "FOLLOW_S", 0.05)

    async def main() -> None:
        extra = Upstream("n")
        await extra.start()
        async with two(tmp_path, store, Upstream("m")) as (one, other):
            added = await one.post("/admin/backends", {"url": extra.url, "name": "extra", "api_key": "k"})
            assert added.status_code == 201 and "k" not in added.json().values()
            await until(lambda: (found := other.gateway.pool.find("extra")) and found.is_up, "it is not known there")
            assert (await other.ask(model="n")).headers["x-tonle-backend"] == "extra"
            names = {(await place.get("/v1/models")).headers["x-tonle-gateway"] for place in (one, other)}
            assert len(names) == 1  # a request that has passed one of them has passed both
            auth = {"authorization": f"Bearer {ADMIN}"}
            changed = await other.client.patch("/admin/backends/extra", json={"weight": 4}, headers=auth)
            assert changed.status_code == 200
            await until(lambda: one.gateway.pool.named("extra").row.weight == 4, "the change is not seen here")
            assert (await other.client.delete("/admin/backends/extra", headers=auth)).status_code == 202
            await until(lambda: one.gateway.pool.find("extra") is None, "it is still here")
        await extra.stop()

    run(main())


def test_a_key_made_here_works_there_and_is_revoked_everywhere(tmp_path: Path, store: Store) -> None:
    async def main() -> None:
        async with two(tmp_path, store, Upstream("m")) as (one, other):
            key = await made(one)
            assert (await one.ask(key=key["key"])).status_code == 200
            await until_status(other, key["key"], 200)
            gone = await other.client.delete(f"/admin/keys/{key['id']}", headers={"authorization": f"Bearer {ADMIN}"})
            assert gone.json()["revoked"]
            assert (await other.ask(key=key["key"])).status_code == 401
            await until_status(one, key["key"], 401)
            missing = await one.client.delete("/admin/keys/key-x", headers={"authorization": f"Bearer {ADMIN}"})
            assert missing.status_code == 404

    run(main())


def test_requests_at_once_through_two_doors(tmp_path: Path, store: Store) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        upstream.hang.clear()
        async with two(tmp_path, store, upstream, cache=None) as places:
            key = (await made(places[0], max_concurrent=3))["key"]
            upstream.hang.set()
            await until_status(places[1], key, 200)
            upstream.hang.clear()
            before = len(upstream.requests)
            asking = [asyncio.create_task(places[index % 2].ask(key=key)) for index in range(12)]
            for _ in range(900):
                if sum(task.done() for task in asking) == 9 and len(upstream.requests) == before + 3:
                    break
                await asyncio.sleep(0.1)
            upstream.hang.set()
            statuses = sorted(reply.status_code for reply in await asyncio.gather(*asking))
            assert statuses == [200] * 3 + [429] * 9
            assert len(upstream.requests) == before + 3
            # One after the other through one gateway: a slot is free as soon as its answer was read.
            assert [(await places[0].ask(key=key)).status_code for _ in range(10)] == [200] * 10

    run(main())


def test_a_day_is_used_up_for_all(tmp_path: Path, store: Store) -> None:
    async def main() -> None:
        async with two(tmp_path, store, Upstream("m")) as (one, other):
            key = await made(one, tokens_per_day=10)
            await until_status(other, key["key"], 200)  # uses 10
            refused = await until_status(one, key["key"], 429)
            assert "per day" in refused.json()["error"]["message"] and int(refused.headers["retry-after"]) >= 1
            await other.gateway.limiter.settlements.ended(key["id"])  # type: ignore[union-attr]
            listed = (await one.get("/admin/keys")).json()["keys"]
            assert [entry["tokens_today"] for entry in listed] == [10]
        async with two(tmp_path, store, Upstream("m")) as (one, _):  # and after a restart
            assert (await one.ask(key=key["key"])).status_code == 429

    run(main())


def test_refuse_when_the_server_is_gone_and_go_on_when_it_is_back(tmp_path: Path, store: Store) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        async with two(tmp_path, store, upstream, cache=None) as (one, other):
            free, limited = await made(one), await made(one, max_concurrent=1, tokens_per_day=1000)
            assert (await one.ask(key=limited["key"])).status_code == 200
            await until_status(other, limited["key"], 200)
            upstream.hang.clear()
            await other.gateway.limiter.settlements.ended(limited["id"])  # type: ignore[union-attr]
            running = asyncio.create_task(one.ask(key=limited["key"]))
            await until(lambda: len(upstream.requests) == 3, "it never came")
            store.kill()
            upstream.hang.set()
            assert (await running).status_code == 200  # what runs is not disturbed
            for place in (one, other):
                refused = await place.ask(key=limited["key"])
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_lost")
                assert "cannot be reached" in refused.json()["error"]["message"]
                assert int(refused.headers["retry-after"]) >= 1
                assert (await place.ask(key=free["key"])).status_code == 200  # no limits, nothing to count
            assert "tonle:state_up 0.0" in (await one.get("/metrics")).text
            assert (await one.client.get("/health")).json()["shared_state"] == "lost"
            assert (await one.post("/admin/keys", {"name": "x"})).status_code == 503
            await store.start()
            for place in (one, other):
                await until_status(place, limited["key"], 200)
            assert "tonle:state_up 1.0" in (await one.get("/metrics")).text
            # Answers of 10 tokens: two before, which a crash may forget; one that ended meanwhile; two after.
            for place in (one, other):
                await place.gateway.limiter.settlements.ended(limited["id"])  # type: ignore[union-attr]
            used = {entry["id"]: entry["tokens_today"] for entry in (await other.get("/admin/keys")).json()["keys"]}
            assert 30 <= used[limited["id"]] <= 50
        assert {record["status"] for record in one.records()} == {"ok", "refused"}

    run(main())


def test_serve_when_the_server_is_gone(tmp_path: Path, store: Store) -> None:
    async def main() -> None:
        settings = {"cache": None, "state_on_loss": "serve"}
        async with two(tmp_path, store, Upstream("m"), **settings) as (one, other):
            key = await made(one, requests_per_minute=2)
            assert (await one.ask(key=key["key"])).status_code == 200
            store.kill()
            statuses = [(await one.ask(key=key["key"])).status_code for _ in range(3)]
            assert statuses == [200, 200, 429]  # a minute of its own, and no more
            await store.start()
            for _ in range(900):
                if other.gateway.limiter.lost is None and one.gateway.limiter.lost is None:  # type: ignore[union-attr]
                    break
                await asyncio.sleep(0.1)
            for _ in range(900):  # what the two answers used is reported when the server is back
                (listed,) = (await other.get("/admin/keys")).json()["keys"]
                if listed["tokens_today"] >= 20:
                    return
                await asyncio.sleep(0.1)
            raise AssertionError(listed)

    run(main())


def test_a_gateway_does_not_start_without_its_keys(tmp_path: Path, store: Store) -> None:
    async def main() -> None:
        store.kill()
        with pytest.raises(ConfigError, match=r"cannot use state_db.*127\.0\.0\.1"):
            async with two(tmp_path, store, Upstream("m")):
                pass
        await store.start()

    run(main())


def test_a_killed_gateways_slots_come_back(tmp_path: Path, redis: Store, slow: str) -> None:
    """Two processes; the first is killed while it holds the key's only slot."""
    (tmp_path / "other").mkdir()
    flags = ("--state-db", redis.url, "--max-concurrent-per-key", "1", "--state-lease", "8s", "--store-timeout", "60s")
    with gateway(tmp_path, slow, *flags) as (first, first_url), \
            gateway(tmp_path / "other", slow, *flags) as (_, url):  # fmt: skip
        headers = {"authorization": "Bearer secret"}
        with contextlib.suppress(httpx.TransportError), \
                httpx.stream("POST", first_url + CHAT, json=BODY, headers=headers, timeout=60) as reply:  # fmt: skip
            pieces = reply.iter_text()
            assert "one" in next(pieces)
            refused = httpx.post(url + CHAT, json=BODY, headers=headers, timeout=60)
            assert refused.status_code == 429 and "1 requests at once" in refused.text
            first.kill()
            first.wait()
        Slow.go_on.set()
        for _ in range(600):
            status = httpx.post(url + CHAT, json=BODY, headers=headers, timeout=60).status_code
            if status == 200:
                return
            assert status == 429
            time.sleep(0.1)
        raise AssertionError("its slot never came back")


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
def test_keys_by_hand_on_a_server(tmp_path: Path, store: Store) -> None:
    settings = tmp_path / "tonle.yaml"
    settings.write_text(f"state_db: {store.url}\nbackends: [{{url: http://127.0.0.1:1}}]\n")

    def keys(*words: str) -> str:
        command = [sys.executable, "-m", "tonle", "keys", *words, "--config", str(settings)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        return done.stdout

    async def main() -> None:
        secret = (await asyncio.to_thread(keys, "create", "--name", "bob", "--tokens-per-day", "1000")).strip()
        async with two(tmp_path, store, Upstream("m")) as (one, other):
            assert (await one.ask(key=secret)).status_code == 200
            listed = await asyncio.to_thread(keys, "list")
            assert "bob" in listed and "tokens_per_day=1000" in listed and secret not in listed
            (key_id,) = re.findall(r"key-[0-9a-f]{10}", listed)
            await asyncio.to_thread(keys, "revoke", key_id)
            for place in (one, other):
                await until_status(place, secret, 401)

    run(main())


def test_gateways_that_start_together_make_the_tables_once(tmp_path: Path, store: Store) -> None:
    async def main() -> None:
        for name in "abcdef":
            (tmp_path / name).mkdir()
        upstream = Upstream("m")
        await upstream.start()
        async with contextlib.AsyncExitStack() as stack:
            towns = [
                stack.enter_async_context(
                    running_gateway(tmp_path / name, backends=lambda: rows(upstream), state_db=store.url, **PATIENT)
                )
                for name in "abcdef"
            ]
            places = await asyncio.gather(*towns)
            salts = {place.gateway._pipeline.salt_secret for place in places}
            assert len(salts) == 1  # prefixes cached by backends are found whichever gateway asks
            assert [(await place.ask(key=KEY)).status_code for place in places] == [200] * 6
        await upstream.stop()

    run(main())
