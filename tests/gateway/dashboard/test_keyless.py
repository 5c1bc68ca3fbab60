"""A server without keys: its dashboard is for this machine, and for no web page but its own."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.fakes.front import FakeFront
from tests.gateway.dashboard.pages import API, SAME
from tests.gateway.running_gateway import Upstream, run, running_gateway
from tests.http.serving import serving
from tonle.replica.replica import ReplicaOptions

NO_KEYS = {"api_key": (), "admin_key": ()}

FOREIGN = {
    "another site": {"sec-fetch-site": "cross-site"},
    "another port": {"sec-fetch-site": "same-site"},
    "another origin": {"origin": "http://evil.example"},
    "a sandboxed page": {"origin": "null"},
    "a name of theirs that leads here": {"host": "evil.example", "sec-fetch-site": "same-origin"},
}


def test_a_gateway_without_keys_shows_it_to_this_machine(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m"), **NO_KEYS) as place:
            for headers in ({}, SAME, {"sec-fetch-site": "none"}):
                seen = (await place.client.get(f"{API}/session", headers=headers)).json()
                assert (seen["needs_login"], seen["key"], seen["can_admin"]) == (False, None, True)
                assert (await place.client.get(f"{API}/requests", headers=headers)).status_code == 200
            for name, headers in FOREIGN.items():
                for path in (f"{API}/session", f"{API}/requests", f"{API}/live", f"{API}/audit", "/admin/keys"):
                    refused = await place.client.get(path, headers=headers)
                    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "foreign_page"), (name, path)
                verify = await place.client.post(f"{API}/audit/verify", headers=headers)
                assert verify.status_code == 403, name
            login = await place.client.post(f"{API}/login", json={"key": "x"}, headers=SAME)
            assert login.status_code == 400 and "no keys" in login.json()["error"]["message"]

    run(main())


def test_it_is_closed_to_what_a_proxy_passes_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m"), **NO_KEYS) as place:
            for name in ("x-forwarded-for", "forwarded", "via", "x-forwarded-proto", "x-real-ip", "cf-connecting-ip"):
                refused = await place.client.get(f"{API}/requests", headers={name: "203.0.113.7"})
                assert refused.status_code == 403 and "--admin-key" in refused.json()["error"]["message"]

    run(main())


def test_once_there_is_a_key_it_is_needed(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            running_gateway(tmp_path, Upstream("m"), **NO_KEYS) as place,
            place.client.stream("GET", f"{API}/live") as stream,
        ):
            made = await place.client.post("/admin/keys", json={"name": "first", "scopes": ["admin"]})
            assert made.status_code == 201
            assert (await place.client.get(f"{API}/session")).json() == {"needs_login": True}
            assert (await place.client.get(f"{API}/requests")).status_code == 401
            await stream.aread()  # ends with the next event

    run(main())


def test_tonle_serve_without_keys() -> None:
    with serving(FakeFront()) as url, httpx.Client(base_url=url) as client:
        seen = client.get(f"{API}/session").json()
        assert seen["server"]["kind"] == "serve" and seen["server"]["models"] == ["scripted"]
        assert (seen["needs_login"], seen["can_admin"], seen["can_use_models"]) == (False, False, True)
        assert not seen["has"]["keys"] and not seen["has"]["adapters"] and not seen["can_load_adapters"]
        assert client.get(f"{API}/requests").json()["requests"] == []
        assert client.get("/admin/keys").status_code == 403
        for headers in FOREIGN.values():
            assert client.get(f"{API}/requests", headers=headers).status_code == 403


@pytest.mark.parametrize("path", ["", "/api/session", "/api/requests", "/api/live"])
def test_a_server_that_others_can_reach_needs_a_key(path: str, tmp_path: Path) -> None:
    """`serving` binds a loopback address; what counts is the setting."""
    with serving(FakeFront(), host="0.0.0.0") as url:
        reply = httpx.get(f"{url}/dashboard{path}")
        assert reply.status_code == 403 and "start it with --admin-key KEY" in reply.text.replace("\n", " ")
    with serving(FakeFront(), host="0.0.0.0", admin_key=("secret",), state_db=str(tmp_path / "keys.db")) as url:
        reply = httpx.head(f"{url}/dashboard{path}", headers={"authorization": "Bearer secret"})
        assert reply.status_code == 200


def test_several_front_ends_say_where_it_is(tmp_path: Path) -> None:
    with serving(FakeFront(), ReplicaOptions(metrics_dir=str(tmp_path))) as url:
        for path in ("", "/", "/api/session", "/api/live", "/static/app.js"):
            reply = httpx.get(f"{url}/dashboard{path}")
            assert reply.status_code == 501 and "tonle gateway --backend" in reply.json()["error"]["message"]
        assert httpx.post(f"{url}/dashboard/api/login", json={"key": "x"}).status_code == 501


def test_it_can_be_switched_off() -> None:
    with serving(FakeFront(), dashboard=False) as url:
        for path in ("", "/", "/api/session", "/api/live", "/static/app.js"):
            assert httpx.get(f"{url}/dashboard{path}").status_code == 404
