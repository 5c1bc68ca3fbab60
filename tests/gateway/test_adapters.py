"""LoRA adapters through a gateway: on all backends of a model or on none, routed by name, cached by content."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.running_gateway import ADMIN, KEY, RunningGateway, Upstream, rows, run, running_gateway, until
from tonle.config.routing import ArmConfig, BackendConfig, ExperimentConfig
from tonle.gateway.adapters import NO_KEYS_TO_LOAD

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
A, B = "a" * 64, "b" * 64
FOLDERS = {"/one": A, "/two": B, "/again": A}


def replica(*models: str) -> Upstream:
    """Tells digests, as a Tonle replica does."""
    upstream = Upstream(*(models or ("m",)), owned_by="tonle")
    upstream.digests = FOLDERS
    return upstream


async def load(place: RunningGateway, path: str = "/one", name: str = "khmer-qa", *, key: str = ADMIN,
               **fields: Any) -> httpx.Response:  # fmt: skip
    return await place.post(LOAD, {"lora_name": name, "lora_path": path, **fields}, key=key)


async def unload(place: RunningGateway, name: str = "khmer-qa") -> httpx.Response:
    return await place.post(UNLOAD, {"lora_name": name})


def why(reply: httpx.Response) -> str:
    return str(reply.json()["error"]["message"])


async def names(place: RunningGateway) -> list[str]:
    return [entry["id"] for entry in (await place.get("/v1/models")).json()["data"]]


def test_it_is_there_at_once_on_every_backend_and_gone_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        one, two, other = replica(), replica(), replica("unlike")
        async with running_gateway(tmp_path, one, two, other, aliases=(("public", "khmer-qa"),)) as place:
            assert (await load(place, key=KEY)).status_code == 403
            assert (await load(place)).status_code == 400, "there are two models"
            reply = await load(place, base_model="m")
            assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'khmer-qa' added successfully.")
            assert reply.headers["x-tonle-adapter"] == f"khmer-qa@sha256:{A}"
            assert one.adapters == two.adapters == {"khmer-qa": "/one"} and not other.changes
            entry = (await place.get("/v1/models/khmer-qa")).json()
            assert (entry["parent"], entry["digest"], entry["root"]) == ("m", A, "/one")
            assert (await place.get("/v1/models/khmer-qa", key=KEY)).json()["root"] == "m", "folders are for admins"
            for model in ("khmer-qa", "public"):
                answer = await place.ask(model=model)
                assert (answer.status_code, answer.headers["x-tonle-adapter"]) == (200, f"khmer-qa@sha256:{A}")
            stream = await place.ask(model="khmer-qa", stream=True)
            assert stream.headers["x-tonle-adapter"] == f"khmer-qa@sha256:{A}"
            assert "x-tonle-adapter" not in (await place.ask(model="m")).headers
            assert (await unload(place)).text == "Success: LoRA adapter 'khmer-qa' removed successfully."
            gone = await place.ask(model="khmer-qa")
            assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
            assert not one.adapters and not two.adapters and "khmer-qa" not in await names(place)
            assert (await unload(place)).status_code == 404
        digests = [(record["adapter"], record["adapter_digest"]) for record in place.records()]
        assert digests == [*[("khmer-qa", A)] * 3, (None, None), (None, None)]

    run(main())


def test_a_backend_that_cannot_load_it_leaves_it_nowhere(tmp_path: Path) -> None:
    async def main() -> None:
        one, two = replica(), replica()
        async with running_gateway(tmp_path, one, two) as place:
            two.refuse_change = LOAD
            refused = await load(place)
            assert refused.status_code == 400
            assert "b1: layers.3.mlp.up_proj.lora_B.weight" in why(refused) and "removed again from b0" in why(refused)
            assert not one.adapters and "khmer-qa" not in await names(place)
            two.refuse_change = ""
            two.status = 500
            await two.kill()
            refused = await load(place)
            assert refused.status_code == 502 and "b1: no answer" in why(refused) and not one.adapters

    run(main())


@pytest.mark.parametrize(
    ("answers", "status", "code"),
    [((403, 403), 403, "forbidden"), ((401, 403), 403, "forbidden"), ((400, 403), 400, "invalid_value"),
     ((413, 413), 400, "invalid_value"), ((403, 500), 502, None), ((429, 429), 502, None)],
)  # fmt: skip
def test_what_backends_refuse_alike_is_said_once(
    tmp_path: Path, answers: tuple[int, int], status: int, code: str | None
) -> None:
    async def main() -> None:
        one, two = replica(), replica()
        one.refuse_change = two.refuse_change = LOAD
        one.refuse_status, two.refuse_status = answers
        async with running_gateway(tmp_path, one, two) as place:
            refused = await load(place)
            assert refused.status_code == status
            assert code is None or refused.json()["error"]["code"] == code
            if answers[0] == answers[1]:
                assert why(refused).startswith("b0, b1: layers.3") and why(refused).count("layers.3") == 1

    run(main())


def test_a_backend_without_keys_is_not_said_to_need_one(tmp_path: Path) -> None:
    async def main() -> None:
        one = replica()
        one.refuse_change, one.refuse_status, one.refuse_words = LOAD, 403, NO_KEYS_TO_LOAD
        async with running_gateway(tmp_path, one) as place:
            assert why(await load(place)) == f"b0: {NO_KEYS_TO_LOAD}."
            one.refuse_words = "this key may not do that"
            assert "the backend's api_key here must be one with scope admin" in why(await load(place))

    run(main())


def test_the_same_folder_must_hold_the_same_on_every_backend(tmp_path: Path) -> None:
    async def main() -> None:
        one, two = replica(), replica()
        two.digests = {"/one": B}
        async with running_gateway(tmp_path, one, two) as place:
            refused = await load(place)
            assert refused.status_code == 400 and A in why(refused) and B in why(refused)
            assert not one.adapters and not two.adapters

    run(main())


def test_what_was_there_before_a_failed_replacement_is_restored(tmp_path: Path) -> None:
    async def main() -> None:
        one, two = replica(), replica()
        async with running_gateway(tmp_path, one, two) as place:
            await load(place)
            assert "already been loaded" in why(await load(place, "/two")) and one.adapters == {"khmer-qa": "/one"}
            two.refuse_change = LOAD
            refused = await load(place, "/two", load_inplace=True)
            assert refused.status_code == 400 and "restored on b0" in why(refused)
            assert one.adapters == two.adapters == {"khmer-qa": "/one"}
            two.refuse_change = UNLOAD
            refused = await unload(place)
            assert refused.status_code == 400 and "restored on b0" in why(refused)
            assert one.adapters == {"khmer-qa": "/one"}
            assert (await place.ask(model="khmer-qa")).status_code == 200
            two.refuse_change = ""
            replaced = await load(place, "/two", load_inplace=True)
            assert (replaced.status_code, replaced.text) == (
                200,
                "Success: LoRA adapter 'khmer-qa' replaced successfully.",
            )
            assert one.adapters == two.adapters == {"khmer-qa": "/two"}

    run(main())


def test_backends_that_lack_it_are_not_asked_for_it(tmp_path: Path) -> None:
    async def main() -> None:
        one, two = replica(), replica()
        async with running_gateway(tmp_path, one, two, prefix_affinity=False) as place:
            await load(place)
            two.adapters.clear()  # as after a restart
            await place.gateway.pool.probe()
            replies = [await place.ask(f"question {index}", model="khmer-qa") for index in range(6)]
            assert {reply.headers["x-tonle-backend"] for reply in replies} == {"b0"}
            assert (await load(place)).status_code == 400
            assert (await load(place, load_inplace=True)).status_code == 200, "loads it where it is missing"
            replies = [await place.ask(f"another {index}", model="khmer-qa") for index in range(6)]
            assert "b1" in {reply.headers["x-tonle-backend"] for reply in replies}
            two.adapters.clear()
            assert (await unload(place)).status_code == 200, "where it is gone already there is nothing to remove"

    run(main())


def test_an_unhealthy_backend_is_passed_over_and_named(tmp_path: Path) -> None:
    async def main() -> None:
        one, two = replica(), replica()
        async with running_gateway(tmp_path, one, two) as place:
            await two.kill()
            await place.gateway.pool.probe()
            reply = await load(place)
            assert reply.status_code == 200 and "Not asked, because unhealthy: b1" in reply.text
            await one.kill()
            await place.gateway.pool.probe()
            assert (await load(place, name="other")).status_code == 503

    run(main())


def test_vllm_behind_it_has_plain_replies_and_tells_no_digest(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m", owned_by="vllm")
        async with running_gateway(tmp_path, upstream) as place:
            reply = await load(place)
            assert reply.status_code == 200 and "x-tonle-adapter" not in reply.headers
            assert upstream.changes == [{"lora_name": "khmer-qa", "lora_path": "/one", "load_inplace": False}]
            for _ in range(2):
                answer = await place.ask(model="khmer-qa", temperature=0)
                assert (answer.status_code, answer.headers["x-cache"]) == (200, "bypass"), "it may be replaced unseen"
            assert (await place.ask(model="m", temperature=0)).headers["x-cache"] == "miss"
            assert (await unload(place)).status_code == 200
        assert [record["adapter"] for record in place.records()] == ["khmer-qa", "khmer-qa", None]
        assert {record["adapter_digest"] for record in place.records()} == {None}

    run(main())


def test_requests_that_wait_in_the_gateway_when_it_is_removed_are_answered(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = replica()
        async with running_gateway(tmp_path, upstream, max_concurrent=1) as place:
            await load(place)
            upstream.hang.clear()
            asked = [asyncio.create_task(place.ask(f"{index}", model="khmer-qa")) for index in range(4)]
            backend = place.gateway.pool.backends[0]
            await until(lambda: backend.gate.num_queued == 3, "they do not wait")
            removing = asyncio.create_task(unload(place))
            await until(lambda: "khmer-qa" in place.gateway.pool.withdrawn, "it is not being removed")
            assert (await place.ask(model="khmer-qa")).status_code == 404, "new requests do not find it"
            assert "khmer-qa" not in await names(place) and "khmer-qa" in upstream.adapters
            upstream.hang.set()
            assert [reply.status_code for reply in await asyncio.gather(*asked)] == [200] * 4
            assert (await removing).status_code == 200 and not upstream.adapters

    run(main())


def test_cached_answers_go_by_content(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = replica()
        async with running_gateway(tmp_path, upstream, probe_interval_s=600.0) as place:

            async def cached(**fields: Any) -> tuple[str, str]:
                reply = await place.ask(model="khmer-qa", temperature=0, **fields)
                return reply.headers["x-cache"], reply.headers["x-tonle-adapter"][-64:]

            await load(place)
            assert [await cached(), await cached(), await cached(stream=True), await cached(stream=True)] == [
                ("miss", A), ("hit", A), ("miss", A), ("hit", A),
            ]  # fmt: skip
            await load(place, "/two", load_inplace=True)
            assert [await cached(), await cached()] == [("miss", B), ("hit", B)]
            upstream.adapters["khmer-qa"] = "/again"  # behind the gateway's back; the same content as /one
            assert await cached(n=1) == ("miss", A), "the first answer that is computed tells it"
            backend = place.gateway.pool.backends[0]
            await until(lambda: backend.models["khmer-qa"].digest == A, "the list is not asked for again")
            assert await cached() == ("hit", A)
            await load(place, "/two", load_inplace=True)
            assert await cached(n=1) == ("miss", B), "what other content computed is not kept under the listed one"
        assert [record["adapter_digest"][0] for record in place.records()] == list("aaaabbaab")

    run(main())


def test_a_late_list_of_models_does_not_undo_a_newer_one(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = replica()
        async with running_gateway(tmp_path, upstream) as place:
            pool, backend = place.gateway.pool, place.gateway.pool.backends[0]
            send, held = backend.transport.send, asyncio.Event()

            async def slow(*args: Any, **options: Any) -> None:
                await send(*args, **options)
                await held.wait()

            backend.transport.send = slow  # type: ignore[method-assign]
            probe = asyncio.create_task(pool.probe())
            await asyncio.sleep(0.1)
            backend.transport.send = send  # type: ignore[method-assign]
            await load(place)
            held.set()
            await probe
            assert "khmer-qa" in backend.models

    run(main())


def test_models_of_a_row_bring_their_adapters(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = replica("m", "hidden")
        backends = lambda: rows(upstream, models=("m",))  # noqa: E731
        async with running_gateway(tmp_path, upstream, backends=backends) as place:
            assert (await load(place)).status_code == 200
            await place.gateway.pool.probe()
            assert await names(place) == ["m", "khmer-qa"]
            assert (await place.ask(model="khmer-qa")).status_code == 200

    run(main())


def test_experiments_and_keys_know_adapters(tmp_path: Path) -> None:
    arms = (ArmConfig(name="base", weight=1, model="m"), ArmConfig(name="tuned", weight=1, model="khmer-qa"))
    experiment = ExperimentConfig(name="ab", model="public", arms=arms)

    async def main() -> None:
        async with running_gateway(tmp_path, replica(), experiments=(experiment,)) as place:
            await load(place)
            key = (
                await place.post("/admin/keys", {"name": "x", "models": ["khmer-qa"], "requests_per_minute": 2})
            ).json()
            mine = [
                (await place.ask(model=model, key=key["key"])).status_code for model in ("m", "khmer-qa", "khmer-qa")
            ]
            assert mine == [404, 200, 429], "limits count what is let in; other models do not exist"
            for user in range(20):
                assert (await place.ask(model="public", user=f"u{user}")).status_code == 200
        seen = {(record["experiment"]["arm"], record["adapter"], record["adapter_digest"])
                for record in place.records() if record["experiment"]}  # fmt: skip
        assert seen == {("base", None, None), ("tuned", "khmer-qa", A)}

    run(main())


@pytest.mark.parametrize("model", ["/models/x", "https://host/x"])
def test_paths_and_urls_are_refused_here_too(tmp_path: Path, model: str) -> None:
    async def main() -> None:
        upstream = replica()
        async with running_gateway(tmp_path, upstream) as place:
            refused = await place.ask(model=model)
            assert refused.status_code == 400 and "path or URL" in why(refused) and not upstream.requests
            for body in ({"lora_name": model, "lora_path": "/one"}, {"lora_name": "m", "lora_path": "/one"}):
                assert (await place.post(LOAD, body)).status_code == 400
            assert not upstream.changes

    run(main())


def test_a_request_without_model_gets_the_base(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = replica()
        async with running_gateway(tmp_path, upstream) as place:
            await load(place)
            assert (await place.ask(model=None)).json()["model"] == "m"

    run(main())


def test_names_that_mean_something_else_are_refused(tmp_path: Path) -> None:
    async def main() -> None:
        one, other = replica("m"), replica("n")
        aliases = (("public", "m"),)
        async with running_gateway(tmp_path, one, other, aliases=aliases) as place:
            assert "is an alias" in why(await load(place, name="public", base_model="m"))
            assert (await load(place, base_model="public")).status_code == 200
            taken = await load(place, base_model="n")
            assert taken.status_code == 400 and "an adapter of m on b0" in why(taken)
            assert (await load(place, base_model="nothing")).status_code == 404
            assert (await unload(place, "m")).status_code == 400

    run(main())


def test_a_server_that_cannot_load_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m", owned_by="vllm")

        async def answer(exchange: Any) -> None:
            if exchange.path == "/v1/models":
                await Upstream._handle(upstream, exchange)
            else:
                exchange.reply(b'{"detail": "Not Found"}', status=404)

        upstream.server.handle = answer
        backends = lambda: (BackendConfig(url=upstream.url, name="v"),)  # noqa: E731
        async with running_gateway(tmp_path, upstream, backends=backends) as place:
            refused = await load(place)
            assert refused.status_code == 400 and "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in why(refused)

    run(main())
