"""Another model answers when all backends of the one asked for are out."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.gateway.running_gateway import ADMIN, KEY, Upstream, run, running_gateway, until
from tonle.config.fallbacks import fallback_chains
from tonle.config.gateway import SETTINGS, GatewayConfig
from tonle.config.routing import BackendConfig
from tonle.errors import ConfigError

B_TO_A = (("b", ("a",)),)
HEADER = "x-tonle-fallback"


def test_a_answers_for_b_when_all_attempts_fail_and_says_so_everywhere(tmp_path: Path) -> None:
    async def main() -> None:
        b, second, a = Upstream("b"), Upstream("b"), Upstream("a")
        b.status = second.status = 500
        async with running_gateway(tmp_path, b, second, a, fallbacks=B_TO_A) as place:
            for stream in (False, True):
                reply = await place.ask(model="b", stream=stream)
                assert reply.status_code == 200 and reply.headers[HEADER] == "a"
                assert reply.headers["x-tonle-backend"] == "b2" and "Penh" in reply.text
            assert [request["model"] for request in a.requests] == ["a", "a"]
            assert 'tonle:gateway_fallbacks_total{fallback="a",model="b"} 2.0' in (await place.get("/metrics")).text
            explained = (await place.get(f"/v1/requests/{reply.headers['x-request-id']}/explain")).json()
            assert any(
                "No backend of b could answer, so a answered in its place" in each for each in explained["sentences"]
            )
            assert explained["request"]["fallback"] == "a"
            assert HEADER not in (await place.ask(model="a")).headers
        route = place.records()[0]["route"]
        assert (route["backend"], route["model"], route["fallback"]) == ("b2", "a", "a")
        assert set(route["failed"]) == {"b0", "b1"} and place.records()[0]["model"] == "b"

    run(main())


def test_a_stream_whose_head_has_left_says_it_in_a_comment(tmp_path: Path) -> None:
    async def main() -> None:
        b, a = Upstream("b"), Upstream("a")
        b.hang.clear()
        b.status = 500
        async with running_gateway(tmp_path, b, a, fallbacks=B_TO_A, retries=0, keep_alive_s=0.02) as place:
            body = {"model": "b", "messages": [{"role": "user", "content": "?"}], "stream": True}
            auth = {"authorization": f"Bearer {KEY}"}
            async with place.client.stream("POST", "/v1/chat/completions", json=body, headers=auth) as reply:
                lines = reply.aiter_lines()
                assert (await anext(lines)).startswith(": ")  # a comment, and with it the head
                b.hang.set()
                text = "\n".join([line async for line in lines])
            assert HEADER not in reply.headers and f": {HEADER} a\n" in text and "Penh" in text

    run(main())


@pytest.mark.parametrize("how", ["drained", "unreachable", "removed"])
def test_b_may_be_out_in_any_way(tmp_path: Path, how: str) -> None:
    async def main() -> None:
        b, a = Upstream("b"), Upstream("a")
        async with running_gateway(tmp_path, b, a, fallbacks=B_TO_A) as place:
            if how == "drained":
                await place.post("/admin/backends/b0/drain")
            elif how == "unreachable":
                await b.kill()
            else:
                await place.client.delete("/admin/backends/b0", headers={"authorization": f"Bearer {ADMIN}"})
                await until(lambda: place.gateway.pool.find("b0") is None, "it is still there")
            reply = await place.ask(model="b")
            assert reply.status_code == 200 and reply.headers[HEADER] == "a"

    run(main())


def test_a_model_that_no_backend_ever_had_falls_back_too(tmp_path: Path) -> None:
    async def main() -> None:
        a = Upstream("a")
        async with running_gateway(tmp_path, a, fallbacks=B_TO_A) as place:
            reply = await place.ask(model="b")
            assert reply.headers[HEADER] == "a"
            assert (await place.ask(model="c")).status_code == 404

    run(main())


def test_an_answer_of_a_is_not_kept_as_one_of_b(tmp_path: Path) -> None:
    async def main() -> None:
        b, a = Upstream("b"), Upstream("a")
        a.words = ["I", " am", " a"]
        b.status = 500
        async with running_gateway(tmp_path, b, a, fallbacks=B_TO_A, retries=0) as place:
            asked = {"model": "b", "temperature": 0}
            assert "I am a" in (await place.ask(**asked)).text
            b.status = 200
            reply = await place.ask(**asked)
            assert "Phnom" in reply.text and reply.headers["x-cache"] == "miss" and HEADER not in reply.headers
            assert (await place.ask(**asked)).headers["x-cache"] == "hit"

    run(main())


def test_identical_requests_at_once_all_get_an_answer_of_a(tmp_path: Path) -> None:
    async def main() -> None:
        b, a = Upstream("b"), Upstream("a")
        b.status = 500
        async with running_gateway(tmp_path, b, a, fallbacks=B_TO_A, breaker_failures=100) as place:
            replies = await asyncio.gather(*(place.ask(model="b", temperature=0) for _ in range(5)))
            assert [(reply.status_code, reply.headers[HEADER]) for reply in replies] == [(200, "a")] * 5

    run(main())


def test_a_key_that_may_not_use_a_is_not_sent_there(tmp_path: Path) -> None:
    async def main() -> None:
        b, a, c = Upstream("b"), Upstream("a"), Upstream("c")
        b.status = 500
        async with running_gateway(tmp_path, b, a, c, fallbacks=(("b", ("a", "c")),), retries=0) as place:
            made = (await place.post("/admin/keys", {"name": "only b", "models": ["b"]})).json()["key"]
            refused = await place.ask(model="b", key=made)
            assert refused.status_code == 500 and HEADER not in refused.headers
            made = (await place.post("/admin/keys", {"name": "b and c", "models": ["b", "c"]})).json()["key"]
            assert (await place.ask(model="b", key=made)).headers[HEADER] == "c"
            assert not a.requests

    run(main())


def test_what_is_the_callers_fault_or_a_full_queue_stays_with_b(tmp_path: Path) -> None:
    async def main() -> None:
        b, a = Upstream("b"), Upstream("a")
        async with running_gateway(
            tmp_path, b, a, fallbacks=B_TO_A, retries=0, max_concurrent=1, max_queued=0
        ) as place:
            b.status = 400
            assert (await place.ask(model="b")).status_code == 400
            b.status = 429
            assert (await place.ask(model="b")).status_code == 429
            b.status = 200
            b.hang.clear()
            running = asyncio.create_task(place.ask(model="b"))
            await until(lambda: len(b.requests) == 3, "it does not run")
            assert (await place.ask(model="b")).status_code == 429
            b.hang.set()
            assert (await running).status_code == 200 and not a.requests

    run(main())


def test_a_stream_that_has_begun_is_not_begun_again_by_another_model(tmp_path: Path) -> None:
    async def main() -> None:
        b, a = Upstream("b"), Upstream("a")
        b.break_after = 1
        async with running_gateway(tmp_path, b, a, fallbacks=B_TO_A) as place:
            text = (await place.ask(model="b", stream=True)).text
            assert "broke off" in text and not a.requests

    run(main())


def test_chains_are_followed_and_the_first_reason_is_told_if_all_are_out(tmp_path: Path) -> None:
    async def main() -> None:
        large, medium, small = Upstream("large"), Upstream("medium"), Upstream("small")
        large.status = medium.status = 503
        table = (("large", ("medium",)), ("medium", ("small",)))
        async with running_gateway(tmp_path, large, medium, small, fallbacks=table, retries=0) as place:
            reply = await place.ask(model="large")
            assert reply.headers[HEADER] == "small" and small.requests[0]["model"] == "small"
            for name in ("b0", "b1", "b2"):
                await place.post(f"/admin/backends/{name}/drain")
            refused = await place.ask(model="large")
            assert (
                refused.status_code == 503 and "b0 is being drained" in refused.text and HEADER not in refused.headers
            )

    run(main())


def test_the_table_can_be_replaced_while_it_runs(tmp_path: Path) -> None:
    async def main() -> None:
        b, a = Upstream("b"), Upstream("a")
        b.status = 500
        async with running_gateway(tmp_path, b, a, retries=0) as place:
            auth = {"authorization": f"Bearer {ADMIN}"}
            assert (await place.ask(model="b")).status_code == 500
            changed = await place.client.put("/admin/fallbacks", json={"fallbacks": {"b": ["a"]}}, headers=auth)
            assert changed.status_code == 200 and "restarted" in changed.json()["kept"]
            assert (await place.get("/admin/fallbacks")).json() == {"fallbacks": {"b": ["a"]}}
            assert (await place.ask(model="b")).headers[HEADER] == "a"
            loop = await place.client.put(
                "/admin/fallbacks", json={"fallbacks": {"b": ["a"], "a": ["b"]}}, headers=auth
            )
            assert loop.status_code == 400 and "b → a → b is a loop" in loop.text
            assert (await place.ask(model="b")).headers[HEADER] == "a"  # the old one stays

    run(main())


@pytest.mark.parametrize(
    ("table", "aliases", "said"),
    [
        ({"b": ["b"]}, {}, "b → b is a loop"),
        ({"b": ["a"], "a": ["c"], "c": ["b"]}, {}, "b → a → c → b is a loop"),
        ({"b": ["nick"]}, {"nick": "b"}, "b → nick is a loop"),
        ({"nick": ["a"], "a": ["b"]}, {"nick": "b"}, "nick → a → b is a loop"),
    ],
)
def test_loops_are_refused_at_start(table: dict[str, list[str]], aliases: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        fallback_chains(table, aliases)
    rows = tuple((name, tuple(others)) for name, others in table.items())
    with pytest.raises(ConfigError, match=said):
        GatewayConfig(
            backends=(BackendConfig(url="http://x"),), fallbacks=rows, aliases=tuple(aliases.items())
        ).validate()


def test_a_diamond_is_no_loop_and_each_is_tried_once() -> None:
    chains = fallback_chains({"a": ["b", "c"], "b": ["d"], "c": ["d", "e"]})
    assert chains["a"] == ("b", "d", "c", "e")


def test_many_ways_to_a_model_are_followed_once_and_a_chain_has_a_bound() -> None:
    layers = {f"{layer}{side}": [f"{layer + 1}a", f"{layer + 1}b"] for layer in range(60) for side in "ab"}
    assert len(fallback_chains(layers)["0a"]) == 120  # 2 to the power of 60 ways
    with pytest.raises(ConfigError, match="longer than 64"):
        fallback_chains({str(number): [str(number + 1)] for number in range(5000)})


def test_the_table_is_read_from_yaml_and_text() -> None:
    read = SETTINGS["fallbacks"].type.read
    assert read({"b": ["a"], "c": "a"}) == (("b", ("a",)), ("c", ("a",))) == read("{b: [a], c: a}")
    with pytest.raises(ValueError, match="must be models and those that answer"):
        read({"b": [1]})
