"""Which backend answers, what it is sent, and what happens when it does not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Literal

import pytest

from tests.gateway.running_gateway import JSON, KEY, Upstream, rows, run, running_gateway, until
from tonle.config.gateway import GatewayConfig
from tonle.config.routing import ArmConfig, BackendConfig, ExperimentConfig, ShadowConfig
from tonle.errors import ConfigError


def test_a_request_goes_to_who_has_the_model_under_any_of_its_names(tmp_path: Path) -> None:
    async def main() -> None:
        one, two = Upstream("m"), Upstream("n")
        async with running_gateway(tmp_path, one, two, aliases=(("nick", "n"),)) as place:
            assert (await place.ask(model="m")).headers["x-tonle-backend"] == "b0"
            assert (await place.ask(model="nick")).headers["x-tonle-backend"] == "b1"
            assert two.requests[0]["model"] == "n"
            listed = (await place.get("/v1/models")).json()["data"]
            assert [entry["id"] for entry in listed] == ["m", "n", "nick"]
            assert (await place.ask(model=None)).status_code == 400

    run(main())


def test_the_callers_own_bytes_arrive_where_nothing_must_change(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        async with running_gateway(tmp_path, upstream) as place:
            await place.ask(future_field={"a": [1, None]}, top_p=0.25)
            assert upstream.requests[0]["future_field"] == {"a": [1, None]}
            assert "authorization" not in upstream.headers[0]
            assert "cache_salt" not in upstream.requests[0]

    run(main())


def test_callers_may_not_set_salts_or_transfers(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m", owned_by="vllm")
        async with running_gateway(tmp_path, upstream) as place:
            theirs = {"cache_salt": "theirs", "kv_transfer_params": {"do_remote_prefill": True}}
            mine = await place.ask(
                **theirs, ec_transfer_params={"a": 1}, vllm_xargs={"kv_transfer_params": "x", "y": 1}
            )
            names = ["cache_salt", "kv_transfer_params", "ec_transfer_params", "vllm_xargs.kv_transfer_params"]
            assert mine.headers["x-tonle-warnings"] == f"4; {', '.join(names)}"
            assert [warning["param"] for warning in mine.json()["warnings"]] == names
            await place.ask(key="admin-for-tests")
            twice = b'{"model":"m","messages":[],"cache_salt":"theirs","cache_salt":null}'
            await place.client.post(
                "/v1/chat/completions", content=twice, headers=JSON | {"authorization": f"Bearer {KEY}"}
            )
        first, second, third = upstream.requests
        assert first["vllm_xargs"] == {"y": 1}
        assert not {"kv_transfer_params", "ec_transfer_params"} & set(first)
        assert first["cache_salt"] not in ("theirs", second["cache_salt"])  # one per key, and not the caller's
        assert third["cache_salt"] == first["cache_salt"]

    run(main())


def test_a_failing_backend_is_replaced_before_the_first_byte(tmp_path: Path) -> None:
    async def main() -> None:
        good, bad = Upstream("m"), Upstream("m")
        bad.status = 500
        async with running_gateway(tmp_path, good, bad, prefix_affinity=False, breaker_failures=3, cache=None) as place:
            replies = [await place.ask(f"question {index}") for index in range(10)]
            assert [reply.status_code for reply in replies] == [200] * 10
            assert len(bad.requests) == 3  # then the breaker left it alone
            states = {entry["name"]: entry for entry in (await place.get("/admin/backends")).json()["backends"]}
            assert states["b1"]["breaker"] == "open" and not states["b1"]["available"]
        assert [record["route"].get("failed") for record in place.records()].count(["b1"]) == 3
        assert len(place.records()) == 10

    run(main())


def test_killing_one_of_two_loses_nobody_who_had_not_begun(tmp_path: Path) -> None:
    async def main() -> None:
        one, two = Upstream("m"), Upstream("m")
        one.hang.clear()
        two.hang.clear()
        async with running_gateway(tmp_path, one, two, prefix_affinity=False) as place:
            asking = [
                asyncio.create_task(place.ask(f"question {index}", stream=bool(index % 2))) for index in range(20)
            ]
            await until(lambda: len(one.requests) + len(two.requests) == 20, "not all were sent")
            assert one.requests and two.requests
            await one.kill()
            two.hang.set()
            replies = await asyncio.gather(*asking)
            assert [reply.status_code for reply in replies] == [200] * 20
            assert all("Penh" in reply.text for reply in replies)
        assert {record["status"] for record in place.records()} == {"ok"}
        assert len(place.records()) == 20

    run(main())


def test_when_nobody_is_left_the_caller_is_told_who_and_when_to_come_back(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        async with running_gateway(tmp_path, upstream) as place:
            await upstream.kill()
            reply = await place.ask()
            assert reply.status_code == 502 and "b0" in reply.json()["error"]["message"]
            await place.gateway.pool.probe()
            reply = await place.ask()
            assert reply.status_code == 503 and int(reply.headers["retry-after"]) >= 1
            assert "connection refused" in reply.json()["error"]["message"]
            assert (await place.get("/health")).status_code == 503

    run(main())


def test_long_prompts_go_to_long_backends(tmp_path: Path) -> None:
    async def main() -> None:
        short, long = Upstream("m"), Upstream("m")

        def backends() -> tuple[BackendConfig, ...]:
            return (BackendConfig(url=short.url, name="short", length="short"),
                    BackendConfig(url=long.url, name="long", length="long"))  # fmt: skip

        async with running_gateway(tmp_path, short, long, backends=backends, length_threshold=100) as place:
            assert (await place.ask("x" * 200)).headers["x-tonle-backend"] == "short"
            assert (await place.ask("x" * 800)).headers["x-tonle-backend"] == "long"
        assert [record["route"]["why"] for record in place.records()] == ["length", "length"]

    run(main())


def test_prompts_that_begin_alike_stay_together(tmp_path: Path) -> None:
    async def main() -> None:
        ups = [Upstream("m") for _ in range(3)]
        async with running_gateway(tmp_path, *ups, cache=None) as place:
            homes = []
            for topic in range(6):
                begin = f"topic {topic} " * 60
                names = {(await place.ask(begin + str(index))).headers["x-tonle-backend"] for index in range(4)}
                assert len(names) == 1
                homes += names
            assert len(set(homes)) > 1
        assert {record["route"]["why"] for record in place.records()} == {"prefix"}

    run(main())


def test_load_wins_over_affinity(tmp_path: Path) -> None:
    async def main() -> None:
        ups = [Upstream("m") for _ in range(2)]
        for upstream in ups:
            upstream.hang.clear()
        async with running_gateway(tmp_path, *ups, cache=None) as place:
            asking = [asyncio.create_task(place.ask("the same beginning " * 30 + str(index))) for index in range(40)]
            await until(lambda: sum(len(upstream.requests) for upstream in ups) == 40, "not all were sent")
            assert min(len(upstream.requests) for upstream in ups) >= 10
            for upstream in ups:
                upstream.hang.set()
            await asyncio.gather(*asking)

    run(main())


def test_experiments_are_sticky_and_on_record(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("old", "new")
        arms = (ArmConfig(name="control", weight=1, model="old"), ArmConfig(name="canary", weight=1, model="new"))
        experiment = ExperimentConfig(name="e", model="public", arms=arms)
        async with running_gateway(tmp_path, upstream, experiments=(experiment,), cache=None) as place:
            for user in range(12):
                for _ in range(2):
                    assert (await place.ask(model="public", user=f"user-{user}")).status_code == 200
            listed = (await place.get("/v1/models")).json()["data"]
            assert "public" in [entry["id"] for entry in listed]
        sent = [(body["user"], body["model"]) for body in upstream.requests]
        assert len(set(sent)) == 12 and {model for _, model in sent} == {"old", "new"}
        for record in place.records():
            assert record["experiment"]["arm"] == {"old": "control", "new": "canary"}[record["route"]["model"]]

    run(main())


def test_an_arm_without_its_backend_is_named(tmp_path: Path) -> None:
    async def main() -> None:
        arms = tuple(ArmConfig(name=name, weight=1, backend=name) for name in ("b0", "b1"))
        experiment = ExperimentConfig(name="e", model="m", arms=arms)
        async with running_gateway(tmp_path, Upstream("m"), Upstream("m"), experiments=(experiment,)) as place:
            await place.post("/admin/backends/b1/drain")
            replies = [await place.ask(user=f"user-{user}") for user in range(12)]
            assert {reply.status_code for reply in replies} == {200, 503}
            told = "no healthy backend for m: the arm b1 of the experiment e names b1 alone; b1 is being drained"
            assert {reply.json()["error"]["message"] for reply in replies if not reply.is_success} == {told}

    run(main())


def test_shadows_follow_and_never_disturb(tmp_path: Path) -> None:
    async def main() -> None:
        upstream, dark = Upstream("m"), Upstream("dark", owned_by="vllm")
        dark.status = 500
        async with running_gateway(
            tmp_path, upstream, dark, shadows=(ShadowConfig(model="m", to_model="dark"),)
        ) as place:
            reply = await place.ask(stream=True, use_cache=False, cache_salt="theirs")
            assert reply.status_code == 200
            metrics = (await place.get("/metrics")).text
            assert shadow_count(metrics, "left_out") == 0 and shadow_count(metrics, "answered") == 0
            for _ in range(12_000):
                if shadow_count((await place.get("/metrics")).text, "failed") == 1:
                    break
                await asyncio.sleep(0.01)
            else:
                raise AssertionError("no shadow was sent")
        (copy,) = dark.requests
        assert copy["model"] == "dark" and copy["stream"] is False and "use_cache" not in copy
        assert len(copy["cache_salt"]) == 32  # the tenant's: copies share no prefixes either
        (record,) = place.records()  # one request, one record
        assert record["status"] == "ok" and record["route"]["backend"] == "b0"
        name = f"shadow-{reply.headers['x-request-id']}"
        assert record["route"]["shadow"] == {"backend": "b1", "model": "dark", "request_id": name}
        assert dark.headers[0]["x-request-id"] == name

    run(main())


def shadow_count(metrics: str, outcome: str) -> float:
    (line,) = [line for line in metrics.splitlines() if f'shadow_requests_total{{outcome="{outcome}"}}' in line]
    return float(line.rpartition(" ")[2])


def test_shadows_are_counted_by_outcome(tmp_path: Path) -> None:
    async def main() -> None:
        upstream, dark = Upstream("m"), Upstream("dark")
        async with running_gateway(
            tmp_path, upstream, dark, shadows=(ShadowConfig(model="m", to_model="dark"),)
        ) as place:
            assert (await place.ask()).status_code == 200
            await until(lambda: dark.requests and not place.gateway.shadows._tasks, "the copy never ended")
            await place.post("/admin/backends/b1/drain")
            assert (await place.ask("again")).status_code == 200
            metrics = (await place.get("/metrics")).text
            counts = {outcome: shadow_count(metrics, outcome) for outcome in ("answered", "failed", "left_out")}
            assert counts == {"answered": 1, "failed": 0, "left_out": 1}

    run(main())


@pytest.mark.parametrize("status", [200, 500])
def test_a_shadow_may_have_a_record_of_its_own(tmp_path: Path, status: int) -> None:
    async def main() -> None:
        upstream, dark = Upstream("m"), Upstream("dark")
        dark.status, dark.words = status, ["Siem", " Reap"]
        rows = (ShadowConfig(model="m", to_model="dark", record=True),)
        async with running_gateway(tmp_path, upstream, dark, shadows=rows) as place:
            assert (await place.ask(stream=True)).status_code == 200
            await until(
                lambda: place.gateway.trail is not None and not place.gateway.trail.num_open, "the copy never ended"
            )
        mine, copy = place.records()
        assert mine["output"] == "Phnom Penh." and "shadow_of" not in mine["route"]
        assert copy["route"]["why"] == "shadow" and copy["route"]["shadow_of"] == mine["request_id"]
        assert copy["request_id"] == mine["route"]["shadow"]["request_id"]
        assert (copy["key_id"], copy["http_status"]) == (mine["key_id"], status)
        assert (copy["status"], copy["output"]) == (("ok", "Siem Reap") if status == 200 else ("failed", None))

    run(main())


def test_prefill_and_decode_legs(tmp_path: Path) -> None:
    async def main() -> None:
        first, second = Upstream("m", owned_by="vllm"), Upstream("m", owned_by="vllm")
        first.kv_params = {"remote_engine_id": "e", "remote_block_ids": [1, 2], "do_remote_prefill": True}

        def backends() -> tuple[BackendConfig, ...]:
            return (BackendConfig(url=first.url, name="p", role="prefill"),
                    BackendConfig(url=second.url, name="d", role="decode"))  # fmt: skip

        async with running_gateway(tmp_path, first, second, backends=backends, prefill_threshold=50) as place:
            assert (await place.ask("short")).headers["x-tonle-backend"] == "d"
            assert not first.requests
            reply = await place.ask("long " * 100, stream=True, max_tokens=9)
            assert "Penh" in reply.text
        asked, then = first.requests[0], second.requests[1]
        assert (asked["max_tokens"], asked["stream"]) == (1, False)
        assert asked["kv_transfer_params"]["do_remote_decode"] is True
        assert asked["cache_salt"] == then["cache_salt"]  # neither leg may tell one tenant's prefixes to another
        assert then["kv_transfer_params"] == first.kv_params
        assert (then["max_tokens"], then["stream"]) == (9, True)
        assert first.headers[0]["x-request-id"] == second.headers[1]["x-request-id"]
        assert place.records()[1]["route"]["prefill"] == "p"

    run(main())


@pytest.mark.parametrize("status", [400, 500, 200])
def test_a_prefill_leg_that_fails_is_not_the_decoders_fault(tmp_path: Path, status: int) -> None:
    """200: an answer without `kv_transfer_params`."""

    async def main() -> None:
        first, second = Upstream("m", owned_by="vllm"), Upstream("m", owned_by="vllm")
        first.status = status

        def backends() -> tuple[BackendConfig, ...]:
            return (BackendConfig(url=first.url, name="p", role="prefill"),
                    BackendConfig(url=second.url, name="d", role="decode"))  # fmt: skip

        settings = {"prefill_threshold": 50, "breaker_failures": 2, "cache": None}
        async with running_gateway(tmp_path, first, second, backends=backends, **settings) as place:
            replies = [await place.ask("long " * 100) for _ in range(3)]
            prefiller, decoder = place.gateway.pool.backends
            assert (decoder.breaker.state, decoder.num_failed) == ("closed", 0)
            if status == 400:
                assert [reply.status_code for reply in replies] == [400] * 3
                assert "broken on purpose" in replies[0].text
                assert (prefiller.breaker.state, len(second.requests)) == ("closed", 0)
            else:
                assert [reply.status_code for reply in replies] == [200] * 3
                assert (prefiller.breaker.state, len(first.requests)) == ("open", 2)
                assert "kv_transfer_params" not in second.requests[0]
        if status != 400:
            assert place.records()[0]["route"]["failed"] == ["p"]

    run(main())


def test_a_backend_of_unknown_kind_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        known, unknown = Upstream("m", owned_by="vllm"), Upstream("m")
        async with running_gateway(tmp_path, known, unknown) as place:
            await place.gateway.pool.probe()
            states = (await place.get("/admin/backends")).json()["backends"]
            assert states[0]["warning"] is None
            assert "tenants share its prefix cache" in states[1]["warning"]

    run(main())
    assert caplog.text.count("tenants share its prefix cache") == 1


@pytest.mark.parametrize("kind", ["auto", "tonle"])
def test_a_replica_that_does_not_trust_salts_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: Literal["auto", "tonle"]
) -> None:
    async def main() -> None:
        trusting, other = Upstream("m", owned_by="tonle"), Upstream("m", owned_by="tonle")
        trusting.extra_headers = [("x-tonle-trust-salt", "1")]
        found = (trusting, other)
        async with running_gateway(tmp_path, *found, backends=lambda: rows(*found, kind=kind)) as place:
            await place.gateway.pool.probe()
            states = (await place.get("/admin/backends")).json()["backends"]
            assert states[0]["warning"] is None
            assert "tenants share its prefix cache" in states[1]["warning"]
            assert "--trust-salt" in states[1]["warning"]
            other.extra_headers = trusting.extra_headers  # restarted with the flag
            await place.gateway.pool.probe()
            assert (await place.get("/admin/backends")).json()["backends"][1]["warning"] is None

    run(main())
    assert caplog.text.count("tenants share its prefix cache") == 1


def test_a_kind_that_nobody_may_ask_for_must_be_set() -> None:
    with pytest.raises(ConfigError, match="set its kind"):
        GatewayConfig(backends=(BackendConfig(url="http://127.0.0.1:1"),), probe_interval_s=0.0).validate()
    GatewayConfig(backends=(BackendConfig(url="http://127.0.0.1:1", kind="openai"),), probe_interval_s=0.0).validate()


def test_a_drained_backend_finishes_and_gets_nothing_new(tmp_path: Path) -> None:
    async def main() -> None:
        one, two = Upstream("m"), Upstream("m")
        one.pause_after = two.pause_after = 1
        async with running_gateway(tmp_path, one, two, cache=None) as place:
            asking = asyncio.create_task(place.ask("running", stream=True))
            await until(lambda: one.requests or two.requests, "it never came")
            busy = one if one.requests else two
            name = "b0" if busy is one else "b1"
            assert (await place.post(f"/admin/backends/{name}/drain")).json()["draining"] is True
            one.resume.set()
            two.resume.set()
            assert "[DONE]" in (await asking).text
            for index in range(4):
                assert (await place.ask(f"{index}")).headers["x-tonle-backend"] != name
            assert len(busy.requests) == 1
            await place.post(f"/admin/backends/{name}/resume")
            assert (await place.get("/admin/backends")).json()["backends"][int(name[1])]["available"]
            assert (await place.post("/admin/backends/none/drain")).status_code == 404

    run(main())


def test_a_backends_own_key_is_sent_and_no_other(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        async with running_gateway(tmp_path, upstream, backends=lambda: rows(upstream, api_key="theirs")) as place:
            await place.ask()
        assert upstream.headers[0]["authorization"] == "Bearer theirs"

    run(main())
