"""The stream of events: at once, every second, for those who may, until the server stops."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.dashboard.pages import API, OWN, SAME, make_key, session
from tests.gateway.running_gateway import ADMIN, RunningGateway, Upstream, run, running_gateway, until
from tonle.gateway.dashboard import live

BEARER = {"authorization": f"Bearer {ADMIN}"}


async def events(stream: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    kind = ""
    async for line in stream.aiter_lines():
        if line.startswith("event: "):
            kind = line.removeprefix("event: ")
        elif line.startswith("data: "):
            assert kind == "second"
            yield json.loads(line.removeprefix("data: "))


def num_streams(place: RunningGateway) -> int:
    return len(place.gateway.routes.dashboard.live._streams)


def test_what_happens_is_told_within_a_second_or_two(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            async with place.client.stream("GET", f"{API}/live", headers=BEARER) as stream:
                assert stream.headers["content-type"] == "text/event-stream"
                assert stream.headers["cache-control"] == "no-store"
                found = events(stream)
                first = await anext(found)  # at once
                assert [each["name"] for each in first["backends"]] == ["b0"]
                assert first["sla"]["meets"] is True and first["alerts"] == first["firing"] == []
                place.gateway.alerts.fire("audit", "writing", "disk full")
                await place.ask(headers={"x-request-id": "req-seen"})
                await place.ask(model="unknown")
                rows: dict[str, dict[str, Any]] = {}
                errors: dict[str, int] = {}
                async for event in found:
                    rows |= {row["id"]: row for row in event["requests"]}
                    errors = event["errors"]
                    if len(rows) >= 2:
                        break
                assert (rows["req-seen"]["model"], rows["req-seen"]["backend"]) == ("m", "b0")
                assert (rows["req-seen"]["status"], rows["req-seen"]["completion_tokens"]) == ("ok", 3)
                assert errors == {"model_not_found": 1}
                assert [each["summary"] for each in event["firing"]] == ["disk full"]
                assert event["values"]["requests_per_s"] >= 0
            await until(lambda: num_streams(place) == 0, "the stream went on without its reader")
            observed = place.gateway.routes.dashboard._services.observed
            assert observed is not None and place.gateway.routes.dashboard.live._tell not in observed.sampler._listeners

    run(main())


def test_each_event_is_made_once_for_all_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bytes] = []

    def counted(*args: Any) -> bytes:
        made.append(original(*args))
        return made[-1]

    original = live._event
    monkeypatch.setattr(live, "_event", counted)

    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            observed, seconds = place.gateway.observed, list[Any]()
            assert observed is not None
            observed.sampler.listen(seconds.append)
            async with open_streams(place, 5) as streams:
                await asyncio.gather(*(read(stream) for stream in streams))
                assert len(made) <= 1 + len(seconds), "one event for each page"

    async def read(stream: httpx.Response) -> None:
        text = b""
        async for piece in stream.aiter_bytes():
            text += piece
            if text.count(b"\n\n") >= 3:
                return

    run(main())


@contextlib.asynccontextmanager
async def open_streams(place: RunningGateway, count: int) -> AsyncIterator[list[httpx.Response]]:
    async with contextlib.AsyncExitStack() as stack:
        streams = [place.client.stream("GET", f"{API}/live", headers=BEARER) for _ in range(count)]
        yield [await stack.enter_async_context(each) for each in streams]


def test_there_are_only_so_many_and_a_reader_who_does_not_read_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "MAX_STREAMS", 2)

    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            async with open_streams(place, 2):
                refused = await place.get(f"{API}/live")
                assert refused.status_code == 503 and refused.headers["retry-after"] == "10"
            await until(lambda: num_streams(place) == 0, "streams stay")
            head = await place.client.head(f"{API}/live", headers=BEARER)
            assert head.status_code == 200 and num_streams(place) == 0

    run(main())


def test_no_key_takes_all_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_OF_A_KEY", 2)

    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place, open_streams(place, 2):
            assert "with this key" in (await place.get(f"{API}/live")).text
            reader = (await make_key(place, "dashboard"))["key"]
            async with place.client.stream(
                "GET", f"{API}/live", headers={"authorization": f"Bearer {reader}"}
            ) as reply:
                assert reply.status_code == 200

    run(main())


def test_events_are_left_out_for_a_slow_reader(tmp_path: Path) -> None:
    class SlowReader:
        full, gone, written = True, None, b""
        headers, key = {"authorization": f"Bearer {ADMIN}"}, None

        def header(self, name: str) -> str:
            return self.headers.get(name, "")

        def write(self, piece: bytes) -> None:
            self.written += piece

    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            stream, reader = place.gateway.routes.dashboard.live, SlowReader()
            stream._streams.add(live._Stream(reader))  # type: ignore[arg-type]
            observed = stream._services.observed
            assert observed is not None
            stream._first()
            await until(lambda: observed.sampler.latest is not None, "no sample")
            assert observed.sampler.latest is not None
            stream._tell(observed.sampler.latest)
            assert reader.written == b""
            reader.full = False
            stream._tell(observed.sampler.latest)
            assert reader.written.count(b"event: second") == 1
            stream._streams.clear()

    run(main())


def test_a_stream_ends_with_its_session_or_its_key(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            made = await make_key(place, "dashboard")
            cookie = await session(place, made["key"])
            async with place.client.stream("GET", f"{API}/live", headers=cookie | SAME) as stream:
                assert (await place.client.post(f"{API}/logout", headers=cookie | OWN)).status_code == 204
                await ends(stream)
            headers = {"authorization": f"Bearer {made['key']}"}
            async with place.client.stream("GET", f"{API}/live", headers=headers) as stream:
                await place.client.delete(f"/admin/keys/{made['id']}", headers=BEARER)
                await ends(stream)

    run(main())


async def ends(stream: httpx.Response) -> None:
    """Raises `TimeoutError` if it goes on."""
    async with asyncio.timeout(120):
        async for _ in stream.aiter_raw():
            pass


def test_streams_end_when_the_server_stops(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m"), drain_s=30.0) as place:
            async with place.client.stream("GET", f"{API}/live", headers=BEARER) as stream:
                stopping = asyncio.create_task(place.gateway.stop())
                await ends(stream)
            await stopping
            assert place.gateway.server.num_cut == 0

    run(main())
