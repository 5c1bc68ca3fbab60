"""Backends that are added, changed and removed while the gateway runs: by an admin, and by a file."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.running_gateway import ADMIN, KEY, RunningGateway, Upstream, run, running_gateway, until
from tonle.config.discovery import DiscoveryConfig, FileDiscovery

AUTH = {"authorization": f"Bearer {ADMIN}"}


async def started(*models: str, **fields: Any) -> Upstream:
    upstream = Upstream(*models, **fields)
    await upstream.start()
    return upstream


async def listed(place: RunningGateway) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in (await place.get("/admin/backends")).json()["backends"]}


async def patch(place: RunningGateway, name: str, body: dict[str, Any]) -> httpx.Response:
    return await place.client.patch(f"/admin/backends/{name}", json=body, headers=AUTH)


async def delete(place: RunningGateway, name: str) -> httpx.Response:
    return await place.client.delete(f"/admin/backends/{name}", headers=AUTH)


async def until_gone(place: RunningGateway, name: str) -> None:
    await until(lambda: place.gateway.pool.find(name) is None, f"{name} is still there")


def test_a_backend_that_is_added_answers_and_is_there_after_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        first, second = Upstream("m"), await started("n")
        async with running_gateway(tmp_path, first) as place:
            assert (await place.ask(model="n")).status_code == 404
            reply = await place.post("/admin/backends", {"url": second.url, "name": "extra", "weight": 2})
            assert reply.status_code == 201 and reply.json()["source"] == "admin" and "state.db" in reply.json()["kept"]
            await until(lambda: (found := place.gateway.pool.find("extra")) and found.is_up, "it is not probed")
            answer = await place.ask(model="n")
            assert answer.status_code == 200 and answer.headers["x-tonle-backend"] == "extra"
            assert (await patch(place, "extra", {"weight": 5})).json()["weight"] == 5
        async with running_gateway(tmp_path, Upstream("m")) as place:  # it is known and probed before the first request
            assert (await place.ask(model="n")).headers["x-tonle-backend"] == "extra"
            assert (await listed(place))["extra"]["weight"] == 5
            gone = await delete(place, "extra")
            assert gone.status_code == 202 and gone.json()["leaving"]
            await until_gone(place, "extra")
            assert (await place.ask(model="n")).status_code == 503  # missing, not unknown: it may come back
        async with running_gateway(tmp_path, Upstream("m")) as place:
            assert list(await listed(place)) == ["b0"]
        await second.stop()

    run(main())


def test_what_cannot_be_added_changed_or_removed_is_refused_with_the_reason(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            for body, status, words in (
                ({"name": "x"}, 400, "url"),
                ({"url": "http://127.0.0.1:1", "wieght": 2}, 400, "wieght"),
                ({"url": "http://127.0.0.1:1", "weight": 0}, 400, "weight"),
                ({"url": "ftp://127.0.0.1:1"}, 400, "must look like"),
                ({"url": "http://127.0.0.1:1", "kv_events": "tcp://127.0.0.1:1"}, 400, "only those are listened to"),
                ({"url": "http://[::1:8000"}, 400, "not a valid URL"),
                (
                    {"url": "http://127.0.0.1:1", "name": "c", "api_key_env": "TONLE_NOT_SET"},
                    400,
                    "TONLE_NOT_SET is not set",
                ),
                ({"url": "http://127.0.0.1:1", "name": "c", "api_key": "line\nbreak"}, 400, "line break"),
                ({"url": "http://127.0.0.1:1", "name": "b0"}, 409, "there is a backend b0 already, from settings"),
            ):
                reply = await place.post("/admin/backends", body)
                assert reply.status_code == status and words in reply.text, reply.text
            assert (await place.post("/admin/backends", {"url": "http://127.0.0.1:1"}, key=KEY)).status_code == 403
            assert (await patch(place, "b0", {"url": "http://elsewhere"})).status_code == 400
            assert (await patch(place, "none", {"weight": 1})).status_code == 404
            dear = await patch(place, "b0", {"price_per_hour": 1e308})
            assert dear.status_code == 400 and "price_per_hour must be at most 1000000000" in dear.text
            assert (await delete(place, "none")).status_code == 404
            assert list(await listed(place)) == ["b0"]
            assert place.gateway._state is not None  # nothing of it is kept for the next start, either
            assert await place.gateway._state.backends.all_backends() == []

    run(main())


def test_a_backend_like_another_keeps_the_key_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TONLE_TEST_KEY", "from-the-environment")

    async def main() -> None:
        url = "http://127.0.0.1:1"
        async with running_gateway(tmp_path, Upstream("m")) as place:
            await place.post(
                "/admin/backends", {"url": url, "name": "old", "api_key_env": "TONLE_TEST_KEY", "weight": 3}
            )
            await place.post("/admin/backends?like=old", {"url": url, "name": "own", "api_key": "its-own"})
            await place.post("/admin/backends?like=old", {"url": url, "name": "same"})
            rows = {name: place.gateway.pool.named(name).row for name in ("own", "same")}
            assert (rows["own"].api_key, rows["own"].api_key_env, rows["own"].weight) == ("its-own", None, 3)
            assert (rows["same"].api_key, rows["same"].api_key_env) == (None, "TONLE_TEST_KEY")

    run(main())


def test_the_last_backend_may_start_a_gateway_that_has_no_other(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = await started("m")
        async with running_gateway(tmp_path, Upstream("other")) as place:
            await place.post("/admin/backends", {"url": upstream.url, "name": "kept"})
        async with running_gateway(tmp_path) as place:
            assert (await place.ask()).headers["x-tonle-backend"] == "kept"
        await upstream.stop()

    run(main())


def test_a_change_of_a_backend_from_the_settings_takes_effect_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        slow = Upstream("m")
        async with running_gateway(tmp_path, slow, max_concurrent=1) as place:
            slow.hang.clear()
            asked = [asyncio.create_task(place.ask(f"{number}")) for number in range(3)]
            await until(
                lambda: len(slow.requests) == 1 and place.gateway.pool.named("b0").gate.num_queued == 2, "not queued"
            )
            reply = (await patch(place, "b0", {"max_concurrent": 3})).json()
            assert "restarted" in reply["kept"]
            await until(lambda: len(slow.requests) == 3, "the queue did not move")
            slow.hang.set()
            assert [reply.status_code for reply in await asyncio.gather(*asked)] == [200] * 3

    run(main())


def test_a_removed_backend_finishes_what_it_has_and_gets_nothing_new(tmp_path: Path) -> None:
    async def main() -> None:
        leaving, staying = Upstream("m"), Upstream("m")
        async with running_gateway(tmp_path, leaving, staying, prefix_affinity=False) as place:
            leaving.pause_after = 1
            (await patch(place, "b1", {"draining": True})).raise_for_status()
            streaming = asyncio.create_task(place.ask(stream=True))
            await until(lambda: len(leaving.requests) == 1, "it was not sent")
            await patch(place, "b1", {"draining": False})
            assert (await delete(place, "b0")).status_code == 202
            assert (await delete(place, "b0")).status_code == 409
            replies = await asyncio.gather(*(place.ask(f"{number}") for number in range(8)))
            assert {reply.headers["x-tonle-backend"] for reply in replies} == {"b1"}
            shown = (await listed(place))["b0"]
            assert shown["leaving"] and shown["running"] == 1 and not shown["available"]
            leaving.resume.set()
            assert "[DONE]" in (await streaming).text
            await until_gone(place, "b0")
            assert len(leaving.requests) == 1

    run(main())


def test_requests_that_wait_for_a_removed_backend_go_to_another(tmp_path: Path) -> None:
    async def main() -> None:
        leaving, other = Upstream("m"), await started("m")
        leaving.hang.clear()
        async with running_gateway(tmp_path, leaving, max_concurrent=1, backend_drain_s=0.3) as place:
            asked = [asyncio.create_task(place.ask(f"{number}")) for number in range(4)]
            await until(lambda: place.gateway.pool.named("b0").gate.num_queued == 3, "they do not wait")
            await place.post("/admin/backends", {"url": other.url, "name": "other"})
            await until(lambda: place.gateway.pool.named("other").is_up, "not probed")
            await delete(place, "b0")
            replies = await asyncio.gather(
                *asked
            )  # also the one that was sent: its time at b0 ends, and nothing has begun
            assert [(reply.status_code, reply.headers["x-tonle-backend"]) for reply in replies] == [(200, "other")] * 4
            assert len(leaving.requests) == 1 and len(other.requests) == 4
            await until_gone(place, "b0")
        assert [record["route"]["left"] for record in place.records() if record["route"]] == [["b0"]] * 4
        await other.stop()

    run(main())


def test_requests_that_wait_for_the_only_backend_are_finished_by_it(tmp_path: Path) -> None:
    async def main() -> None:
        only = Upstream("m")
        only.hang.clear()
        async with running_gateway(tmp_path, only, max_concurrent=1) as place:
            asked = [asyncio.create_task(place.ask(f"{number}")) for number in range(4)]
            await until(lambda: place.gateway.pool.named("b0").gate.num_queued == 3, "they do not wait")
            await delete(place, "b0")
            assert (await place.ask("late")).status_code == 503
            only.hang.set()
            assert [reply.status_code for reply in await asyncio.gather(*asked)] == [200] * 4
            await until_gone(place, "b0")

    run(main())


def test_a_stream_is_ended_with_a_reason_when_its_backends_time_is_over(tmp_path: Path) -> None:
    async def main() -> None:
        leaving = Upstream("m")
        leaving.pause_after = 1
        async with running_gateway(tmp_path, leaving, backend_drain_s=0.1) as place:
            streaming = asyncio.create_task(place.ask(stream=True))
            await until(lambda: len(leaving.requests) == 1, "it was not sent")
            await until(lambda: place.gateway.pool.named("b0").gate.num_inside == 1, "it is not there")
            await asyncio.sleep(0)
            await delete(place, "b0")
            text = (await streaming).text
            assert "backend removed" in text and "Phnom" in text
            await until_gone(place, "b0")

    run(main())


def test_a_file_of_backends_is_followed(tmp_path: Path) -> None:
    async def main() -> None:
        one, two = await started("m"), await started("n")
        file = tmp_path / "backends.yaml"

        def write(text: str) -> None:
            (tmp_path / "new").write_text(text)
            (tmp_path / "new").rename(file)

        write(json.dumps([{"url": one.url, "name": "one"}]))
        source = DiscoveryConfig(file=FileDiscovery(path=str(file), interval_s=0.02))
        async with running_gateway(tmp_path, discovery=(source,)) as place:
            assert (await place.ask()).headers["x-tonle-backend"] == "one"
            write(f"- {{url: '{one.url}', name: one, weight: 3}}\n- {{url: '{two.url}', name: two}}\n")
            await until(lambda: (found := place.gateway.pool.find("two")) and found.is_up, "two is not there")
            assert (await place.ask(model="n")).headers["x-tonle-backend"] == "two"
            found = await listed(place)
            assert found["one"]["weight"] == 3 and found["one"]["sent"] == 1  # the same one as before
            refused = await delete(place, "one")
            assert refused.status_code == 409 and "would bring it back" in refused.text
            write("- {url: [")
            await until(lambda: place.gateway._discovery and place.gateway._discovery.problems, "no problem is seen")
            sources = (await place.get("/admin/backends")).json()["sources"]
            assert "YAML" in next(each["problem"] for each in sources if each["name"].startswith("file"))
            assert (await place.ask()).status_code == 200  # nothing was removed
            write("[]")
            await until(lambda: not place.gateway.pool.backends, "they are still there")
        for upstream in (one, two):
            await upstream.stop()

    run(main())


def test_one_name_from_two_sources_is_taken_once_and_metrics_follow(tmp_path: Path) -> None:
    async def main() -> None:
        one, two = Upstream("m"), await started("m")
        file = tmp_path / "backends.json"
        file.write_text(json.dumps([{"url": two.url, "name": "b0"}, {"url": two.url, "name": "found"}]))
        source = DiscoveryConfig(file=FileDiscovery(path=str(file), interval_s=0.02))
        async with running_gateway(tmp_path, one, discovery=(source,)) as place:
            found = await listed(place)
            assert {name: row["source"].split()[0] for name, row in found.items()} == {
                "b0": "settings",
                "found": "file",
            }
            assert 'tonle:backend_up{backend="found"} 1.0' in (await place.get("/metrics")).text
            file.write_text("[]")
            await until_gone(place, "found")
            assert 'backend="found"' not in (await place.get("/metrics")).text
        await two.stop()

    run(main())
