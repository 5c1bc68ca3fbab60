"""Who may do what: scopes, models per key, keys over the admin API, and a gateway with no keys at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gateway.running_gateway import ADMIN, KEY, Upstream, run, running_gateway
from tonle.config.routing import ArmConfig, ExperimentConfig
from tonle.errors import ConfigError
from tonle.gateway.routes import Routes

ROOT = Path(__file__).parents[2]


def test_the_life_of_a_key(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m", "n")) as place:
            made = (await place.post("/admin/keys", {"name": "alice", "models": ["m"]})).json()
            assert "digest" not in made
            assert (await place.ask(key=made["key"])).status_code == 200
            assert (await place.ask(key=made["key"], model="n")).status_code == 404
            listed = (await place.get("/v1/models", key=made["key"])).json()["data"]
            assert [entry["id"] for entry in listed] == ["m"]
            assert (await place.get("/v1/models/n", key=made["key"])).status_code == 404
            assert (await place.get("/v1/models/m", key=made["key"])).json()["id"] == "m"
            shown = (await place.get("/admin/keys")).json()["keys"]
            assert shown[0]["name"] == "alice" and shown[0]["tokens_today"] == 10 and made["key"] not in str(shown)
            gone = await place.client.delete(f"/admin/keys/{made['id']}", headers={"authorization": f"Bearer {ADMIN}"})
            assert gone.json()["revoked"]
            assert (await place.ask(key=made["key"])).status_code == 401

    run(main())


def test_a_key_that_may_ask_for_one_name_need_not_say_it(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m", "n")
        arms = (ArmConfig(name="a", weight=1, model="m"), ArmConfig(name="b", weight=0, model="n"))
        experiment = ExperimentConfig(name="test", model="trial", arms=arms)
        async with running_gateway(tmp_path, upstream, aliases=(("smol", "n"),), experiments=(experiment,)) as place:

            async def key_for(*models: str) -> str:
                made = await place.post("/admin/keys", {"name": "x", "models": models})
                return str(made.json()["key"])

            for name, model in (("smol", "n"), ("trial", "m"), ("n", "n")):
                reply = await place.ask(key=await key_for(name), model=None)
                assert (reply.status_code, upstream.requests[-1]["model"]) == (200, model), reply.text
            several = await place.ask(key=await key_for("smol", "m"), model=None)
            assert several.json()["error"]["message"] == "model is missing, and there are several: m, smol"
            anything = await place.ask(model=None)
            assert anything.json()["error"]["message"].endswith("several: m, n, smol, trial")
            nothing = await place.ask(key=await key_for("gone"), model=None)
            assert nothing.status_code == 404 and "this key" in nothing.json()["error"]["message"]
        assert [record["model"] for record in place.records()][:3] == ["smol", "trial", "n"]

    run(main())


def test_one_model_under_several_names_need_not_be_named(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        async with running_gateway(tmp_path, upstream, aliases=(("smol", "m"),)) as place:
            assert (await place.ask(model=None)).status_code == 200
        assert upstream.requests[0]["model"] == "m"

    run(main())


LIMITS = {
    "requests_per_minute": None, "tokens_per_minute": None, "max_concurrent": None, "tokens_per_day": None,
    "audio_seconds_per_minute": None, "images_per_minute": None,
}  # fmt: skip


@pytest.mark.parametrize(
    "body", [{"requests_per_minute": 60, "limits": {"tokens_per_day": 9}}, {"requests_per_minute": 60, "tokens_per_day": 9},
             {"limits": {"requests_per_minute": 60, "tokens_per_day": 9}}],
)  # fmt: skip
def test_limits_stand_beside_the_name_or_inside_limits(tmp_path: Path, body: dict[str, object]) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            made = await place.post("/admin/keys", {"name": "a", **body})
            assert (made.status_code, made.json()["limits"]) == (
                201, LIMITS | {"requests_per_minute": 60, "tokens_per_day": 9})  # fmt: skip

    run(main())


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"requests_per_minute": 60, "limits": {"requests_per_minute": 50}}, "requests_per_minute", "given twice"),
        ({"requests_per_minute": 0}, "requests_per_minute", "at least 1"),
        ({"limits": {"max_concurrent": -1}}, "max_concurrent", "at least 1"),
        ({"name": ""}, "name", "name"),
        ({"request_per_minute": 60}, "request_per_minute", "request_per_minute"),
    ],
)
def test_a_key_request_that_cannot_be_meant_is_refused(
    tmp_path: Path, body: dict[str, object], param: str, words: str
) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            refused = await place.post("/admin/keys", {"name": "a", **body})
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, param) and words in error["message"], error
            assert (await place.get("/admin/keys")).json()["keys"] == []

    run(main())


def test_limits_of_a_key_hold(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            wish = {"name": "bob", "limits": {"tokens_per_day": 10}}
            key = (await place.post("/admin/keys", wish)).json()["key"]
            assert (await place.ask(key=key)).status_code == 200
            refused = await place.ask(key=key)
            error = refused.json()["error"]
            assert refused.status_code == 429 and "per day" in error["message"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
            assert error["message"].endswith(f"; try again in {refused.headers['retry-after']} s")

    run(main())


@pytest.mark.parametrize(
    ("path", "scope"),
    [("/metrics", "metrics"), ("/admin/keys", "admin"), ("/admin/backends", "admin"), ("/v1/models", "models")],
)
def test_endpoints_are_guarded(tmp_path: Path, path: str, scope: str) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            unknown = await place.client.get(path)
            assert (unknown.status_code, unknown.headers["www-authenticate"]) == (401, "Bearer")
            assert (await place.get(path, key="wrong")).status_code == 401
            for name in ("models", "metrics", "admin"):
                made = await place.post("/admin/keys", {"name": name, "scopes": [name]})
                status = (await place.get(path, key=made.json()["key"])).status_code
                assert status == (200 if name in (scope, "admin") else 403), (path, name)

    run(main())


def test_a_path_that_is_not_there_comes_with_a_hint_that_is(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            refused = await place.get("/docs")
            message = refused.json()["error"]["message"]
            assert refused.status_code == 404 and "GET /v1/models" in message and "GET /docs" not in message
            assert (await place.get("/v1/models")).status_code == 200
            assert "docs/gateway.md" in message
            page = (ROOT / "docs" / "gateway.md").read_text()
            routes = place.gateway.server.handle
            assert isinstance(routes, Routes)
            for path in routes.paths:
                assert f"`{path}`" in page, f"docs/gateway.md does not tell of {path}"

    run(main())


def test_bad_wishes_are_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            for wish in ({}, {"name": "x", "scopes": ["everything"]}, {"name": "x", "limit": 3}):
                assert (await place.post("/admin/keys", wish)).status_code == 400
            assert (await place.post("/admin/keys", {"name": "x"}, key=KEY)).status_code == 403
            for wish, message in (
                (
                    {"name": "x", "scopes": ["models", "zz"]},
                    "scopes[1] must be one of admin, dashboard, gateway, metrics, models, priority",
                ),
                ({"name": "x", "limits": {"tokens": 3}}, "there is no field limits.tokens"),
                ({"scopes": []}, "name is missing"),
            ):
                assert (await place.post("/admin/keys", wish)).json()["error"]["message"] == message

    run(main())


def test_what_a_key_used_survives_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m"), tokens_per_day=10) as place:
            assert (await place.ask()).status_code == 200
        async with running_gateway(tmp_path, Upstream("m"), tokens_per_day=10) as place:
            assert (await place.ask()).status_code == 429

    run(main())


def test_without_keys_only_this_machine_may_call(tmp_path: Path) -> None:
    async def main() -> None:
        open_door = {"api_key": (), "admin_key": ()}
        async with running_gateway(tmp_path, Upstream("m"), **open_door) as place:
            assert (await place.client.post("/v1/chat/completions", json={"model": "m"})).status_code == 200
        with pytest.raises(ConfigError, match="open to anyone"):
            async with running_gateway(tmp_path, Upstream("m"), host="0.0.0.0", **open_door):
                pass

    run(main())
