"""What a web page in a browser on this machine can do to a server without keys: nothing, unless the settings allow it."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.gateway.running_gateway import ADMIN, CHAT, JSON, KEY, RunningGateway, Upstream, run, running_gateway
from tonle.config.gateway import GatewayConfig
from tonle.errors import ConfigError

NO_KEYS = {"api_key": (), "admin_key": ()}
PAGE = {"host": "evil.example", "origin": "http://evil.example"}
BODY = b'{"name": "theirs", "scopes": ["admin"]}'


async def make_key(place: RunningGateway, headers: dict[str, str]) -> httpx.Response:
    return await place.client.post("/admin/keys", content=BODY, headers=headers)


FORGED: dict[str, tuple[dict[str, str], int]] = {  # headers of POST /admin/keys, and what is answered
    "as any page can": (PAGE | {"content-type": "text/plain"}, 403),
    "text": ({"content-type": "text/plain"}, 415),
    "a form": ({"content-type": "application/x-www-form-urlencoded"}, 415),
    "no type": ({}, 415),
    "a name of theirs that leads here": ({"host": "evil.example"} | JSON, 403),
    "and with its port": ({"host": "evil.example:8080"} | JSON, 403),
    "that begins like ours": ({"host": "localhost.evil.example"} | JSON, 403),
    "that begins like an address": ({"host": "127.0.0.1.evil.example"} | JSON, 403),
    "another origin": ({"origin": "http://evil.example"} | JSON, 403),
    "another port of this machine": ({"origin": "http://127.0.0.1:1"} | JSON, 403),
    "a sandboxed page": ({"origin": "null"} | JSON, 403),
    "no origin, but from another site": ({"sec-fetch-site": "cross-site"} | JSON, 403),
    "no origin, but from another port": ({"sec-fetch-site": "same-site"} | JSON, 403),
}


def test_no_page_can_manage_a_gateway_without_keys(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m"), **NO_KEYS) as place:
            for name, (headers, status) in FORGED.items():
                assert (await make_key(place, headers)).status_code == status, name
            listed = await place.client.get("/admin/keys")  # the owner is not locked out
            assert (listed.status_code, listed.json()["keys"]) == (200, [])

    run(main())


def test_nor_drain_its_backends_clear_its_cache_or_ask_its_models(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        async with running_gateway(tmp_path, upstream, **NO_KEYS) as place:
            for path in (
                "/admin/backends/b0/drain",
                "/admin/backends/b0/resume",
                "/cache/clear",
                CHAT,
                "/v1/completions",
            ):
                for headers in (PAGE, {"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}):
                    refused = await place.client.post(path, headers=headers)
                    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "foreign_page"), path
            revoked = await place.client.delete("/admin/keys/x", headers={"origin": "http://evil.example"})
            assert revoked.status_code == 403
            for path in ("/v1/models", "/admin/keys", "/metrics"):  # read through a name of theirs that leads here
                assert (await place.client.get(path, headers={"host": "evil.example"})).status_code == 403
            assert (await place.client.get("/admin/backends")).json()["backends"][0]["draining"] is False
        assert upstream.requests == []

    run(main())


def test_programs_and_our_own_pages_are_not_disturbed(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m"), **NO_KEYS, host="localhost") as place:
            netloc = place.url.removeprefix("http://")
            for headers in ({}, {"host": "localhost"}, {"host": "LOCALHOST:8080"}, {"host": "[::1]:8080"}, {"host": "10.1.2.3"},
                            {"host": "tonle.localhost"}, {"host": ""}, {"origin": place.url}, {"sec-fetch-site": "none"},
                            {"origin": place.url, "sec-fetch-site": "same-origin"},
                            {"origin": f"https://{netloc}"}):  # fmt: skip
                assert (await place.ask(key="", headers=headers)).status_code == 200, headers
            read = await place.client.get("/v1/models", headers={"origin": "http://evil.example"})
            assert read.status_code == 200 and "access-control-allow-origin" not in read.headers  # the browser keeps it
            assert (await place.client.post("/cache/clear")).status_code == 200

    run(main())


def test_settings_let_names_and_pages_in(tmp_path: Path) -> None:
    async def main() -> None:
        allowed = {"allowed_hosts": ("models.example",), "cors_origins": ("https://app.example", "null")}
        async with running_gateway(tmp_path, Upstream("m"), **NO_KEYS, **allowed) as place:
            for headers in ({"host": "Models.example:8080"}, {"origin": "https://app.example"}, {"origin": "null"}):
                assert (await place.ask(key="", headers=headers)).status_code == 200, headers
            preflight = await place.client.options(CHAT, headers={"origin": "https://app.example"})
            assert preflight.status_code == 204 and "access-control-allow-origin" in preflight.headers
            refused = await place.ask(key="", headers={"host": "other.example"})
            assert "--allowed-hosts other.example" in refused.json()["error"]["message"]
            refused = await place.ask(key="", headers={"origin": "https://other.example"})
            assert "--cors-origins https://other.example" in refused.json()["error"]["message"]
            read = await place.ask(key="", headers={"origin": "https://app.example", "content-type": "text/plain"})
            assert read.status_code == 415 and "access-control-allow-origin" in read.headers  # the page may know why

    run(main())


def test_with_keys_the_key_decides_and_json_is_still_required(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            assert (await place.ask(headers=PAGE)).status_code == 200
            assert (await place.ask(key="", headers=PAGE)).status_code == 401
            admin = {"authorization": f"Bearer {ADMIN}"}
            assert (await make_key(place, admin | {"content-type": "text/plain"})).status_code == 415
            for kind in ("application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"):
                assert (await make_key(place, admin | {"content-type": kind})).status_code == 201
            refused = await place.client.post(CHAT, content=b"{}", headers={"authorization": f"Bearer {KEY}"})
            assert refused.status_code == 415
            assert refused.json()["error"] == {
                "message": "send JSON, and say so: with the header Content-Type: application/json",
                "type": "invalid_request_error", "param": None, "code": "unsupported_media_type",
            }  # fmt: skip
        statuses = [(record["status"], record["http_status"]) for record in place.records()]
        assert statuses == [("ok", 200), ("refused", 401), ("refused", 415)]  # each has its record

    run(main())


def test_names_in_the_settings_count_on_every_server(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m"), allowed_hosts=("models.example",)) as place:
            assert (await place.ask(headers={"host": "models.example"})).status_code == 200
            assert (await place.ask(headers={"host": "other.example"})).status_code == 403
        async with running_gateway(tmp_path, Upstream("m"), **NO_KEYS, allowed_hosts=("*",)) as place:
            assert (await place.ask(key="", headers={"host": "other.example"})).status_code == 200

    run(main())


@pytest.mark.parametrize("host", ["http://models.example", "models.example:8080", "*.example", "a b"])
def test_names_that_are_none_are_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="without scheme and port"):
        GatewayConfig(allowed_hosts=(host,)).validate()


def test_room_for_less_than_one_request_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"request_memory \(1MiB\) is less than max_body \(8MiB\)"):
        GatewayConfig(request_memory_bytes=1024**2).validate()
