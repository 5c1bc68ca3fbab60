"""The gateway's log: one line per failed request that says who failed and why; callers cannot inject lines."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.running_gateway import CHAT, KEY, RunningGateway, Upstream, read_records, run, running_gateway

Ask = Callable[[RunningGateway, Upstream], Awaitable[object]]


def lines(caplog: pytest.LogCaptureFixture, request_id: str) -> list[tuple[str, str]]:
    found = [(record.levelname, record.getMessage()) for record in caplog.records]
    return [(level, message) for level, message in found if request_id in message]


def the_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, upstream: Upstream, ask: Ask, **settings: Any
) -> tuple[str, str]:
    caplog.set_level(logging.INFO, logger="tonle")

    async def main() -> None:
        async with running_gateway(tmp_path, upstream, **settings) as place:
            await ask(place, upstream)

    run(main())
    (line,) = lines(caplog, "id id-1")
    assert "\n" not in line[1]
    return line


def asking(**fields: Any) -> Ask:
    headers = {"x-request-id": "id-1", **fields.pop("headers", {})}
    return lambda place, _: place.ask(headers=headers, **fields)


async def ask_the_dead(place: RunningGateway, upstream: Upstream) -> None:
    await upstream.kill()
    await place.ask(headers={"x-request-id": "id-1"})


def test_a_stream_that_breaks_off_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    upstream = Upstream("m")
    upstream.break_after = 2
    level, line = the_line(tmp_path, caplog, upstream, asking(stream=True))
    assert level == "WARNING" and line.startswith(f"POST {CHAT} 200 ")
    assert ", broken off, id id-1: backend b0: the answer of b0 broke off: connection closed" in line


def test_a_stream_that_ends_with_the_backends_own_error_is_one_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    upstream = Upstream("m")
    upstream.stream_error = "the engine died"
    level, line = the_line(tmp_path, caplog, upstream, asking(stream=True))
    assert level == "WARNING" and line.endswith(", broken off, id id-1: backend b0: the engine died")
    (record,) = read_records(tmp_path / "audit")
    assert record["status"] == "failed", "the caller has not got an answer, whatever the HTTP status was"


def test_a_stream_that_we_cut_off_is_one_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def stop_in_the_middle(place: RunningGateway, upstream: Upstream) -> None:
        body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
        headers = {"authorization": f"Bearer {KEY}", "x-request-id": "id-1"}
        async with place.client.stream("POST", CHAT, json=body, headers=headers) as reply:
            pieces = reply.aiter_text()
            await anext(pieces)
            place.gateway.server.end_requests()
            await place.gateway.stop()
            async for _ in pieces:
                pass
        assert place.gateway.server.num_cut == 1, "each is counted once"

    upstream = Upstream("m")
    upstream.pause_after = 2
    level, line = the_line(tmp_path, caplog, upstream, stop_in_the_middle, drain_s=0.1)
    assert level == "WARNING" and line.endswith(", broken off, id id-1: backend b0: the server is shutting down")


def test_a_backend_that_cannot_be_reached(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    level, line = the_line(tmp_path, caplog, Upstream("m"), ask_the_dead)
    assert level == "WARNING" and f"{CHAT} 502 " in line
    assert "id id-1: backend b0: no answer from b0: connection" in line


@pytest.mark.parametrize(("status", "wanted"), [(500, "WARNING"), (503, "WARNING"), (400, "INFO"), (422, "INFO")])
def test_a_backends_own_refusal(tmp_path: Path, caplog: pytest.LogCaptureFixture, status: int, wanted: str) -> None:
    upstream = Upstream("m")
    upstream.status = status
    level, line = the_line(tmp_path, caplog, upstream, asking())
    assert level == wanted and f"{CHAT} {status} " in line and line.endswith("id id-1: backend b0: broken on purpose")


def test_a_deadline_that_passes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    upstream = Upstream("m")
    upstream.hang.clear()
    ask = asking(headers={"x-request-deadline-ms": "50"})
    level, line = the_line(tmp_path, caplog, upstream, ask)
    assert level == "WARNING" and f"{CHAT} 504 " in line and "backend b0: the request's deadline passed" in line


def test_nobody_well(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def ask(place: RunningGateway, _: Upstream) -> None:
        await place.post("/admin/backends/b0/drain")
        await place.ask(headers={"x-request-id": "id-1"})

    level, line = the_line(tmp_path, caplog, Upstream("m"), ask)
    assert level == "WARNING" and line.endswith("id id-1: no healthy backend for m: b0 is being drained")


@pytest.mark.parametrize("name", ["x\nWARNING forged", "x\r\u2028y\x1b[2J", "\u202eabc", "y" * 5000])
def test_a_callers_words_stay_on_their_line(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    level, line = the_line(tmp_path, caplog, Upstream("m"), asking(model=name))
    assert level == "INFO" and "404" in line and "id id-1: there is no model" in line
    assert line.isprintable() and len(line) < 600


def test_a_path_cannot_forge_lines_either(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def ask(place: RunningGateway, _: Upstream) -> None:
        await place.client.get("/a%0AINFO%20forged", headers={"x-request-id": "id-1"})

    level, line = the_line(tmp_path, caplog, Upstream("m"), ask)
    assert level == "INFO" and line.startswith("GET /a\\nINFO forged 404 ")


def test_refused_at_the_door(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def ask(place: RunningGateway, _: Upstream) -> None:
        headers = {"x-request-id": "id-1", "authorization": f"Bearer {KEY}"}
        await place.client.get("/admin/keys", headers=headers)

    level, line = the_line(tmp_path, caplog, Upstream("m"), ask)
    assert level == "INFO" and "403" in line and "this key may not see the dashboard" in line


def test_what_goes_well_and_health_checks_stay_quiet(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tonle")

    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            for stream in (False, True):
                await place.ask(stream=stream, headers={"x-request-id": "id-1"})
            await place.post("/admin/backends/b0/drain")
            not_ready = await place.client.get("/health/ready", headers={"x-request-id": "id-2"})
            assert not_ready.status_code == 503

    run(main())
    assert lines(caplog, "id id-1") == []
    assert lines(caplog, "id id-2") == [], "asked every second by machines"


def test_a_backend_that_wants_a_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    upstream = Upstream("m")
    upstream.locked = True

    async def main() -> None:
        async with running_gateway(tmp_path, upstream):
            pass

    run(main())
    assert "backend b0 is unhealthy: /v1/models answers 401; it needs a key: set the backend's api_key" in caplog.text
