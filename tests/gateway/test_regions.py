"""Gateways as backends of gateways: the nearest region first, no loops, and whose request it is."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tests.gateway.running_gateway import ADMIN, KEY, RunningGateway, Upstream, run, running_gateway, until
from tonle.config.routing import BackendConfig

REGION, VIA = "x-tonle-region", "x-tonle-via"


async def add(place: RunningGateway, other: RunningGateway, name: str, region: str, *, key: str = KEY) -> None:
    """Have `place` use another gateway as a backend."""
    reply = await place.post("/admin/backends", {"url": other.url, "name": name, "region": region, "api_key": key})
    assert reply.status_code == 201, reply.text
    await until(lambda: place.gateway.pool.named(name).is_up, f"{name} is not probed")


@contextlib.asynccontextmanager
async def two_regions(
    folder: Path, eu: Upstream, us: Upstream, **settings: Any
) -> AsyncIterator[tuple[RunningGateway, RunningGateway]]:
    """Each with a server of its own, and each the other's backend."""
    async with (
        running_gateway(folder / "eu", eu, region="eu", **settings) as europe,
        running_gateway(folder / "us", us, region="us", **settings) as america,
    ):
        await add(europe, america, "america", "us")
        await add(america, europe, "europe", "eu")
        yield europe, america


def test_its_own_region_first_then_the_other_and_the_record_says_which(tmp_path: Path) -> None:
    async def main() -> None:
        eu, us = Upstream("m"), Upstream("m")
        async with two_regions(tmp_path, eu, us) as (europe, america):
            for _ in range(3):
                reply = await europe.ask()
                assert (reply.headers["x-tonle-backend"], reply.headers[REGION]) == ("b0", "eu")
            await europe.post("/admin/backends/b0/drain")
            reply = await europe.ask(headers={"x-request-id": "abc-123"})
            assert reply.status_code == 200 and reply.headers.get_list(REGION) == ["us"]
            assert reply.headers.get_list("x-tonle-backend") == ["america"]
            assert us.headers[0]["x-request-id"] == "abc-123"
            assert len(eu.requests) == 3 and len(us.requests) == 1
            shown = (await europe.get("/admin/backends")).json()["backends"]
            assert [(each["name"], each["kind"], each["region"]) for each in shown][1] == ("america", "tonle", "us")
        assert [record["route"]["region"] for record in europe.records()] == ["eu", "eu", "eu", "us"]
        assert [record["request_id"] for record in america.records()] == ["abc-123"]

    run(main())


def test_a_full_region_gives_way_and_all_full_ones_queue_at_the_nearest(tmp_path: Path) -> None:
    async def main() -> None:
        near, far, farther = Upstream("m"), Upstream("m"), Upstream("m")
        for upstream in (near, far, farther):
            upstream.hang.clear()

        def rows() -> tuple[BackendConfig, ...]:
            places = (("farther", farther, "ap"), ("far", far, "us"), ("near", near, None))
            return tuple(BackendConfig(url=each.url, name=name, region=region) for name, each, region in places)

        async with running_gateway(
            tmp_path, near, far, farther, backends=rows, region="eu", region_order=("us",), max_concurrent=1
        ) as place:
            asked = []
            for count, upstream in enumerate((near, far, farther), 1):
                asked.append(asyncio.create_task(place.ask(f"{count}")))
                await until(lambda upstream=upstream: len(upstream.requests) == 1, f"request {count} is elsewhere")
            asked.append(asyncio.create_task(place.ask("4")))
            await until(
                lambda: place.gateway.pool.named("near").gate.num_queued == 1, "it does not wait at the nearest"
            )
            for upstream in (near, far, farther):
                upstream.hang.set()
            replies = await asyncio.gather(*asked)
            assert [reply.headers[REGION] for reply in replies] == ["eu", "us", "ap", "eu"]
            explained = (await place.get(f"/v1/requests/{replies[1].headers['x-request-id']}/explain")).json()
            assert any("No backend of a nearer region had room" in each for each in explained["sentences"])

    run(main())


def test_two_gateways_that_lead_to_each_other_do_not_loop(tmp_path: Path) -> None:
    async def main() -> None:
        eu, us = Upstream("m"), Upstream("m")
        async with two_regions(tmp_path, eu, us) as (europe, america):
            await europe.post("/admin/backends/b0/drain")
            await america.post("/admin/backends/b0/drain")
            reply = await europe.ask()
            assert reply.status_code == 503
            assert "is a gateway that the request has passed" in reply.text or "no healthy backend" in reply.text
            assert VIA not in reply.headers  # a caller that is no gateway need not know
            await america.gateway.pool.probe()
        assert len(europe.records()) == 1 and len(america.records()) == 1  # one try, no storm

    run(main())


def test_a_request_that_comes_back_is_refused_in_words(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m"), gateway_id="here") as place:
            reply = await place.ask(headers={VIA: "there, here"})
            assert reply.status_code == 508 and reply.json()["error"]["code"] == "loop_detected"
            assert "there → here → here" in reply.text
            many = ",".join(f"gw{number}" for number in range(16))
            assert (await place.ask(headers={VIA: many})).status_code == 508
            assert (await place.ask(headers={VIA: "there, " + "%" * 500})).status_code == 200

    run(main())


def test_a_loop_that_the_gateways_cannot_see_ends_at_once(tmp_path: Path) -> None:
    """A backend that was never probed tells no name: the header ends it."""

    async def main() -> None:
        eu = Upstream("m")
        async with running_gateway(tmp_path / "eu", eu) as europe:
            body = {
                "url": europe.url,
                "name": "myself",
                "api_key": KEY,
                "kind": "openai",
                "models": ["m", "only-there"],
            }
            assert (await europe.post("/admin/backends", body)).status_code == 201
            found = europe.gateway.pool.named("myself")
            await until(lambda: found.last_probe, "not probed")
            found.gateway_id = None  # as before the first probe
            reply = await europe.ask(model="only-there")
            assert reply.status_code == 508
        assert len(europe.records()) == 2

    run(main())


def test_each_of_many_gateways_is_asked_once_when_all_are_out(tmp_path: Path) -> None:
    async def main() -> None:
        servers = [Upstream("m") for _ in range(4)]
        async with contextlib.AsyncExitStack() as stack:
            places = [
                await stack.enter_async_context(
                    running_gateway(tmp_path / f"{number}", server, region=f"r{number}", retries=10)
                )
                for number, server in enumerate(servers)
            ]
            for number, place in enumerate(places):
                for other, there in enumerate(places):
                    if other != number:
                        await add(place, there, f"g{other}", f"r{other}")
            for place in places:
                await place.post("/admin/backends/b0/drain")
            assert (await places[0].ask()).status_code == 503
            await places[3].post("/admin/backends/b0/resume")
            reply = await places[0].ask()
            assert reply.status_code == 200 and reply.headers[REGION] == "r3"
        asked = [len(place.records()) for place in places]
        assert all(count <= 2 for count in asked), asked  # each at most once per request

    run(main())


def test_gateways_do_not_tell_each_other_of_a_model_that_is_gone(tmp_path: Path) -> None:
    async def main() -> None:
        eu, us = Upstream("m"), Upstream("n")
        async with two_regions(tmp_path, eu, us) as (europe, america):
            assert {entry["id"] for entry in (await europe.get("/v1/models")).json()["data"]} == {"m", "n"}
            us.models = ["o"]
            for _ in range(3):
                await america.gateway.pool.probe()
                await europe.gateway.pool.probe()
            for place in (europe, america):
                assert {entry["id"] for entry in (await place.get("/v1/models")).json()["data"]} == {"m", "o"}

    run(main())


def test_whose_request_it_is_is_known_behind_a_gateways_key_and_cannot_be_feigned(tmp_path: Path) -> None:
    async def main() -> None:
        eu, us = Upstream("other"), Upstream("m", owned_by="vllm")
        async with (
            running_gateway(tmp_path / "eu", eu, region="eu") as europe,
            running_gateway(tmp_path / "us", us, region="us") as america,
        ):
            made = await america.post("/admin/keys", {"name": "europe", "scopes": ["models", "gateway"]})
            await add(europe, america, "america", "us", key=made.json()["key"])
            assert europe.gateway.pool.named("america").warning is None
            keys = [(await europe.post("/admin/keys", {"name": name})).json()["key"] for name in ("alice", "bob")]
            for key in (*keys, keys[0]):
                assert (await europe.ask(f"for {key}", key=key)).status_code == 200
            salts = [request["cache_salt"] for request in us.requests]
            assert salts[0] == salts[2] != salts[1]
            # A caller's own header says nothing, and a gateway's cannot name an owner of ours.
            await america.ask("mine", key=KEY)
            await america.ask("mine too", key=KEY, headers={"x-tonle-salt": "someone"})
            own = america.gateway.ring.find(KEY)
            assert own is not None
            await america.ask("feigned", key=made.json()["key"], headers={"x-tonle-salt": own.owner})
            mine, mine_too, feigned = (request["cache_salt"] for request in us.requests[3:])
            assert mine == mine_too != feigned

    run(main())


def test_a_gateway_behind_a_plain_key_is_told_what_it_lacks(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            running_gateway(tmp_path / "eu", Upstream("other")) as europe,
            running_gateway(tmp_path / "us", Upstream("m", owned_by="vllm")) as america,
        ):
            await add(europe, america, "america", "us")
            found = europe.gateway.pool.named("america")
            assert found.kind == "tonle" and found.warning is not None and "scope gateway" in found.warning
            assert re.fullmatch("[0-9a-f]{16}", found.gateway_id or "")
            listed = await america.get("/v1/models", key=ADMIN)
            assert listed.headers["x-tonle-gateway"] == found.gateway_id

    run(main())
