"""Logging in, and what a cookie is good for: nothing that another site's page could ask for."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from tests.gateway.dashboard.pages import API, OWN, SAME, log_in, make_key, session
from tests.gateway.running_gateway import ADMIN, CHAT, JSON, KEY, RunningGateway, Upstream, run, running_gateway
from tonle.gateway.dashboard import failed_logins

CHAT_BODY = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def test_a_key_is_exchanged_for_a_cookie_that_scripts_cannot_read(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            assert (await place.client.get(f"{API}/session", headers=SAME)).json() == {"needs_login": True}
            reply = await log_in(place)
            assert (reply.status_code, reply.content) == (204, b"")
            token, *flags = reply.headers["set-cookie"].split("; ")
            assert re.fullmatch(r"tonle_session=[\w-]{43}", token)
            assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(flags) and "Secure" not in flags
            assert ADMIN not in str(reply.headers)
            seen = (await place.client.get(f"{API}/session", headers=SAME | {"cookie": token})).json()
            assert (seen["needs_login"], seen["can_admin"], seen["can_use_models"]) == (False, True, True)
            assert seen["key"]["name"] == "from the settings"
            assert seen["server"]["kind"] == "gateway" and seen["server"]["models"] == ["m"]
            assert seen["has"]["keys"] and seen["has"]["audit"] and not seen["has"]["experiments"]

    run(main())


def test_the_cookie_is_secure_where_a_trusted_proxy_speaks_https(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m"), trusted_proxies=("127.0.0.1",)) as place:
            reply = await log_in(place, **{"x-forwarded-proto": "https", "x-forwarded-for": "203.0.113.7"})
            assert "; Secure" in reply.headers["set-cookie"]
        async with running_gateway(tmp_path / "other", Upstream("m")) as place:  # any caller could say so
            assert "Secure" not in (await log_in(place, **{"x-forwarded-proto": "https"})).headers["set-cookie"]

    run(main())


def test_a_site_whose_name_leads_to_this_machine_is_not_the_page(tmp_path: Path) -> None:
    """A browser takes such a site and this server for one: it says that their requests come from the page itself."""
    theirs = {"host": "evil.example", "origin": "http://evil.example"}

    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            for _ in range(6):
                refused = await log_in(place, "guessed", **theirs)
                assert refused.status_code == 403, "else the wrong keys are counted, and the admin has to wait"
            assert "--allowed-hosts evil.example" in refused.json()["error"]["message"]
            for path in ("/dashboard", "/dashboard/static/app.js", f"{API}/session", f"{API}/live"):
                assert (await place.client.get(path, headers=theirs)).status_code == 403, path
            assert (await log_in(place)).status_code == 204
            assert (await place.client.get("/v1/models", headers=theirs)).status_code == 401, "other paths need a key"
        async with running_gateway(tmp_path / "open", Upstream("m"), host="0.0.0.0") as place:
            assert (await log_in(place, host="tonle.example")).status_code == 204, "others reach it by its name"

    run(main())


def test_behind_a_proxy_on_this_machine_the_public_name_is_allowed(tmp_path: Path) -> None:
    async def main() -> None:
        public = {"host": "tonle.example", "origin": "https://tonle.example", "x-forwarded-for": "203.0.113.7"}
        behind = {"trusted_proxies": ("127.0.0.1",)}
        async with running_gateway(tmp_path, Upstream("m"), **behind) as place:
            refused = await place.client.get("/dashboard", headers=public)
            assert refused.status_code == 403 and "--allowed-hosts tonle.example" in refused.text
        async with running_gateway(
            tmp_path / "named", Upstream("m"), allowed_hosts=("tonle.example",), **behind
        ) as place:
            assert (await place.client.get("/dashboard", headers=public)).status_code == 200
            assert (await log_in(place, **public)).status_code == 204

    run(main())


def test_the_session_is_the_key_on_every_path_and_no_more(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        async with running_gateway(tmp_path, upstream) as place:
            client, admin = place.client, await session(place) | OWN
            assert (await client.get("/v1/models", headers=admin)).status_code == 200
            assert (await client.post(CHAT, json=CHAT_BODY, headers=admin)).status_code == 200
            reader = await session(place, (await make_key(place, "dashboard"))["key"]) | OWN
            for path in (
                f"{API}/requests",
                f"{API}/history?range=300",
                "/admin/keys",
                "/admin/backends",
                "/admin/experiments",
            ):
                assert (await client.get(path, headers=reader)).status_code == 200, path
            for method, path in (
                ("POST", "/admin/keys"), ("DELETE", "/admin/keys/key-1"), ("POST", "/admin/backends/b0/drain"),
                ("POST", "/admin/experiments/e/stop"), ("POST", "/cache/clear"), ("POST", "/v1/load_lora_adapter"),
                ("POST", CHAT),
            ):  # fmt: skip
                refused = await client.request(method, path, json={}, headers=reader)
                assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden"), path
            seen = (await client.get(f"{API}/session", headers=reader)).json()
            assert (seen["can_admin"], seen["can_use_models"]) == (False, False)
            assert len(upstream.requests) == 1 and not place.gateway.pool.backends[0].draining
            # a key in the request wins over the cookie
            both = admin | {"authorization": f"Bearer {KEY}"}
            assert (await client.get("/admin/keys", headers=both)).status_code == 403
            assert (
                await client.get("/v1/models", headers=reader | {"authorization": "Bearer wrong"})
            ).status_code == 401

    run(main())


FOREIGN: dict[str, dict[str, str]] = {
    "another site": {"sec-fetch-site": "cross-site", "x-tonle-dashboard": "1"},
    "another port of this machine": {"sec-fetch-site": "same-site", "x-tonle-dashboard": "1"},
    "another origin": {"origin": "http://evil.example", "x-tonle-dashboard": "1"},
    "another port, by its origin": {"origin": "http://127.0.0.1:1", "x-tonle-dashboard": "1"},
    "a sandboxed page": {"origin": "null", "x-tonle-dashboard": "1"},
    "an origin that begins like ours": {"origin": "http://127.0.0.1.evil.example", "x-tonle-dashboard": "1"},
    "says nothing of itself": {"x-tonle-dashboard": "1"},
    "another page, by its address": {"referer": "http://evil.example/127.0.0.1", "x-tonle-dashboard": "1"},
    "the header in a form's place": {"sec-fetch-site": "cross-site"},
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_page_of_another_origin_can_do_nothing_with_the_cookie(tmp_path: Path, name: str) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        async with running_gateway(tmp_path, upstream) as place:
            headers = await session(place) | FOREIGN[name] | JSON
            for method, path in (
                ("POST", "/admin/keys"), ("POST", "/admin/backends/b0/drain"), ("POST", CHAT), ("POST", "/cache/clear"),
                ("POST", f"{API}/audit/verify"), ("GET", f"{API}/requests"), ("GET", f"{API}/live"), ("GET", "/admin/keys"),
                ("GET", f"{API}/session"), ("POST", f"{API}/logout"),
            ):  # fmt: skip
                refused = await place.client.request(method, path, content=b'{"name": "theirs"}', headers=headers)
                assert (refused.status_code, refused.json()["error"]["code"]) == (403, "foreign_page"), path
            assert upstream.requests == [] and not place.gateway.pool.backends[0].draining
            assert len(place.gateway.routes.dashboard._services.sessions) == 1

    run(main())


def test_what_changes_something_needs_the_header_of_the_dashboard(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            cookie = await session(place)
            refused = await place.client.post("/admin/backends/b0/drain", headers=cookie | SAME)
            assert refused.status_code == 403 and "X-Tonle-Dashboard: 1" in refused.json()["error"]["message"]
            typed = await place.client.post(
                "/admin/backends/b0/drain", headers=cookie | OWN | {"sec-fetch-site": "none"}
            )
            assert typed.status_code == 403
            assert (await place.client.post("/admin/backends/b0/drain", headers=cookie | OWN)).status_code == 200

    run(main())


def test_browsers_that_do_not_say_where_a_request_comes_from_name_the_page(tmp_path: Path) -> None:
    """Over plain HTTP from another machine there is no Sec-Fetch-Site."""

    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            cookie = await session(place)
            post = cookie | {"origin": place.url, "x-tonle-dashboard": "1"}
            assert (await place.client.post("/admin/backends/b0/drain", headers=post)).status_code == 200
            for headers in ({"referer": f"{place.url}/dashboard"}, {"origin": place.url}):
                assert (await place.client.get(f"{API}/requests", headers=cookie | headers)).status_code == 200
            no_origin = cookie | {"referer": f"{place.url}/dashboard", "x-tonle-dashboard": "1"}
            assert (await place.client.post("/admin/backends/b0/drain", headers=no_origin)).status_code == 403

    run(main())


def test_a_revoked_key_ends_its_sessions_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            made = await make_key(place, "admin")
            headers = await session(place, made["key"]) | OWN
            assert (await place.client.get(f"{API}/requests", headers=headers)).status_code == 200
            await place.client.delete(f"/admin/keys/{made['id']}", headers=headers)
            refused = await place.client.get(f"{API}/requests", headers=headers)
            assert refused.status_code == 401 and "log in again" in refused.json()["error"]["message"]
            told = (await place.client.get(f"{API}/session", headers=headers)).json()
            assert told == {"needs_login": True, "ended": "revoked"}
            assert (await log_in(place, made["key"])).status_code == 401

    run(main())


def test_a_session_of_a_server_before_is_told_to_have_ended(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            cookie = await session(place)
        async with running_gateway(tmp_path / "restarted", Upstream("m")) as place:
            told = (await place.client.get(f"{API}/session", headers=cookie | SAME)).json()
            assert told == {"needs_login": True, "ended": "unknown"}

    run(main())


def test_logging_out_ends_the_session_and_takes_the_cookie_away(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            cookie = await session(place)
            reply = await place.client.post(f"{API}/logout", headers=cookie | OWN)
            assert reply.status_code == 204 and "tonle_session=; " in reply.headers["set-cookie"]
            assert "Max-Age=0" in reply.headers["set-cookie"]
            assert (await place.client.get(f"{API}/requests", headers=cookie | OWN)).status_code == 401

    run(main())


def test_a_login_never_keeps_a_token_that_the_browser_brought(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            planted = {"cookie": "tonle_session=" + "A" * 43}
            reply = await log_in(place, **planted)
            own = reply.headers["set-cookie"].partition(";")[0]
            assert own != planted["cookie"]
            assert (await place.client.get(f"{API}/requests", headers=planted | OWN)).status_code == 401
            # and the session that the browser had ends
            again = await log_in(place, cookie=own)
            assert again.status_code == 204
            assert (await place.client.get(f"{API}/requests", headers={"cookie": own} | OWN)).status_code == 401

    run(main())


def stop_clock(place: RunningGateway) -> None:
    """The wait after wrong keys does not pass, however long a machine takes for the next one."""
    place.gateway.routes.dashboard._login._failed._clock = lambda: 0.0


def test_wrong_keys_are_refused_logged_and_slowed_down(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            stop_clock(place)
            for _ in range(failed_logins.FREE):
                refused = await log_in(place, "wrong")
                assert (refused.status_code, refused.json()["error"]["param"]) == (401, "key")
            late = await log_in(place, ADMIN)  # even with the right one
            assert late.status_code == 429 and int(late.headers["retry-after"]) >= 1

    run(main())
    assert "a wrong key was given at /dashboard by 127.0.0.1" in caplog.text and "wrong key number 5" in caplog.text


def test_who_may_not_log_in(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            refused = await log_in(place, KEY)  # scopes models and metrics
            assert refused.status_code == 403 and "scope dashboard or admin" in refused.json()["error"]["message"]
            assert "set-cookie" not in refused.headers
            for headers in ({"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "", "origin": "http://evil.example"}):
                foreign = await log_in(place, ADMIN, **headers)
                assert (foreign.status_code, foreign.json()["error"]["code"]) == (403, "foreign_page")
            bodies = (b"{", b"[]", b'{"key": 3}', b"{}", b'{"key": ""}', b'{"key": "k", "x": 1}', b'{"key": "\\ud800"}')
            for body in bodies:
                reply = await place.client.post(f"{API}/login", content=body, headers=OWN | JSON)
                assert reply.status_code in (400, 401), body
            form = await place.client.post(f"{API}/login", data={"key": ADMIN}, headers=OWN)
            assert form.status_code == 415
            large = await place.client.post(f"{API}/login", json={"key": "k" * 1_000_000}, headers=OWN)
            assert large.status_code == 413
            huge = await place.client.post(f"{API}/login", content=b"x" * 9_000_000, headers=OWN | JSON)
            assert huge.status_code == 413
            assert len(place.gateway.routes.dashboard._services.sessions) == 0

    run(main())


@pytest.mark.parametrize(
    "cookie",
    ["tonle_session=", "tonle_session", "xtonle_session=T", "a=b", "tonle_session=é", 'tonle_session="T"', ";;;=;"],
)
def test_cookies_that_are_no_session(tmp_path: Path, cookie: str) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            token = (await session(place))["cookie"].partition("=")[2]
            sent = {b"cookie": cookie.replace("T", token).encode("latin-1")}
            reply = await place.client.get(
                f"{API}/requests", headers=[*sent.items(), (b"sec-fetch-site", b"same-origin")]
            )
            assert reply.status_code == 401

    run(main())


def test_many_browsers_log_in_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            cookies = await asyncio.gather(*(session(place) for _ in range(20)))
            assert len({each["cookie"] for each in cookies}) == 20
            for cookie in cookies:
                assert (await place.client.get(f"{API}/requests", headers=cookie | OWN)).status_code == 200

    run(main())


def test_a_right_key_in_between_does_not_let_an_address_guess_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            stop_clock(place)
            own = (await make_key(place, "models"))["key"]
            found = [(await log_in(place, key)).status_code for key in ["wrong", "wrong", own, ADMIN] * 3]
            assert found == [401, 401, 403, 204] * 2 + [401, 429, 429, 429]

    run(main())
