"""One connected trace per request, as a collector receives it: from a gateway in this process, to scripted backends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.otlp_collector import Collector, Span, running_collector
from tests.gateway.running_gateway import CHAT, RunningGateway, Upstream, run, running_gateway, until
from tonle.config.routing import ShadowConfig

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{CALLER}-01"
SECRET = "what the caller wrote"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    # What is asserted about has been sent when a gateway has ended, however long that takes.
    monkeypatch.setattr("tonle.observe.otlp_sender.FLUSH_S", 120.0)
    with running_collector() as running:
        yield running


@contextlib.asynccontextmanager
async def traced(
    folder: Path, collector: Collector, *upstreams: Upstream, **settings: Any
) -> AsyncIterator[RunningGateway]:
    given = {"otlp_endpoint": collector.url, "history_db": "memory", "audit_dir": None, **settings}
    async with running_gateway(folder, *upstreams, **given) as place:
        yield place


def by_kind(spans: list[Span]) -> tuple[Span, list[Span]]:
    """The server's span, and those of what it sent, in order."""
    (server,) = [span for span in spans if span.kind == "server"]
    return server, sorted((span for span in spans if span.kind == "client"), key=lambda span: span.start_ns)


def parents(upstream: Upstream) -> list[str]:
    """The span ids that its requests came with."""
    return [headers["traceparent"].split("-")[2] for headers in upstream.headers]


def test_a_backend_that_died_is_a_span_beside_the_one_that_answered(tmp_path: Path, collector: Collector) -> None:
    async def main() -> None:
        dead, alive = Upstream("m"), Upstream("m")
        async with traced(tmp_path, collector, dead, alive, cache=None, prefix_affinity=False) as place:
            await dead.kill()
            for _ in range(8):  # which of the two is asked first is not settled
                reply = await place.ask(headers={"traceparent": PARENT, "tracestate": "vendor=1"})
                assert reply.status_code == 200
                if place.gateway.pool.backends[0].num_failed:
                    break
            last = alive.headers[-1]
        spans = collector.trace(TRACE)
        sent = [span for span in spans if span.attributes.get("error.type") == "connection refused"]
        (refused,) = sent
        (server,) = [span for span in spans if span.span_id == refused.parent_id]
        clients = sorted((span for span in spans if span.parent_id == server.span_id), key=lambda span: span.start_ns)
        assert [span.attributes["tonle.backend"] for span in clients] == ["b0", "b1"]
        assert [span.failed for span in clients] == [True, False] and not server.failed
        assert clients[1].attributes["http.request.resend_count"] == 1
        assert clients[1].attributes["server.port"] == int(alive.url.rpartition(":")[2])
        assert last["traceparent"] == f"00-{TRACE}-{clients[1].span_id}-01" and last["tracestate"] == "vendor=1"
        assert server.parent_id == CALLER and server.state == "vendor=1"
        assert all(server.start_ns <= span.start_ns <= span.end_ns <= server.end_ns for span in clients)

    run(main())


def test_a_hedge_is_a_span_too(tmp_path: Path, collector: Collector) -> None:
    async def main() -> None:
        one, two = Upstream("m"), Upstream("m")
        one.hang.clear()
        two.hang.clear()
        async with traced(
            tmp_path, collector, one, two, cache=None, prefix_affinity=False, hedge_after_s=0.02
        ) as place:
            task = asyncio.create_task(place.ask(stream=True, headers={"traceparent": PARENT}))
            await until(lambda: one.requests and two.requests, "no second backend was asked")
            two.hang.set()
            assert (await task).status_code == 200
            await until(lambda: one.num_hangups, "the loser still works on it")
        server, clients = by_kind(collector.trace(TRACE))
        assert {span.parent_id for span in clients} == {server.span_id} and len(clients) == 2
        ended = {span.attributes["tonle.backend"]: span.attributes.get("error.type") for span in clients}
        assert ended == {"b0": "cancelled", "b1": None}
        assert {span.span_id for span in clients} == {*parents(one), *parents(two)}

    run(main())


def test_a_trace_begins_where_there_is_none(tmp_path: Path, collector: Collector) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        async with traced(tmp_path, collector, upstream, cache=None) as place:
            await place.ask(SECRET, max_tokens=5, temperature=0.5, stop=[SECRET], headers={"x-request-id": "id-1"})
            await place.ask(headers={"traceparent": f"00-{'0' * 32}-{CALLER}-01", "tracestate": "vendor=1"})
        assert len({span.trace_id for span in collector.spans}) == 2
        server, clients = by_kind(collector.trace(upstream.headers[0]["traceparent"].split("-")[1]))
        assert server.parent_id == "" and [span.span_id for span in clients] == parents(upstream)[:1]
        assert "tracestate" not in upstream.headers[1]  # there is no trace that it could belong to
        asked = server.attributes
        assert (asked["gen_ai.request.id"], asked["gen_ai.request.max_tokens"]) == ("id-1", 5)
        assert (asked["gen_ai.request.temperature"], asked["gen_ai.response.finish_reasons"]) == (0.5, ["stop"])
        assert (asked["gen_ai.usage.input_tokens"], asked["gen_ai.usage.output_tokens"]) == (7, 3)
        assert clients[0].attributes["gen_ai.response.id"] == "chatcmpl-1"
        assert not any(text in body for body in collector.bodies for text in (SECRET.encode(), b"Penh"))

    run(main())


def test_a_refusal_is_a_span_without_a_send(tmp_path: Path, collector: Collector) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        async with traced(tmp_path, collector, upstream) as place:
            assert (await place.ask(key="wrong", headers={"traceparent": PARENT})).status_code == 401
        (span,) = collector.trace(TRACE)
        assert span.attributes["http.response.status_code"] == 401 and "error.type" in span.attributes
        assert not span.failed and span.parent_id == CALLER

    run(main())


def test_an_answer_from_the_cache_is_a_span_without_a_send(tmp_path: Path, collector: Collector) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        async with traced(tmp_path, collector, upstream) as place:
            await place.ask(temperature=0)
            await place.ask(temperature=0, headers={"traceparent": PARENT})
        (span,) = collector.trace(TRACE)
        assert span.attributes["tonle.cache"] == "hit" and len(upstream.requests) == 1

    run(main())


@pytest.mark.parametrize("flags", ["00", "02"])
def test_what_its_caller_does_not_record_is_passed_on_unchanged(
    tmp_path: Path, collector: Collector, flags: str
) -> None:
    async def main() -> None:
        upstream, parent = Upstream("m"), f"00-{TRACE}-{CALLER}-{flags}"
        async with traced(tmp_path, collector, upstream) as place:
            await place.ask(headers={"traceparent": parent, "tracestate": "vendor=1"})
        assert upstream.headers[0]["traceparent"] == parent and upstream.headers[0]["tracestate"] == "vendor=1"
        assert collector.spans == []
        ((own, count, _),) = collector.metrics["gen_ai.server.request.duration"]
        assert (own["gen_ai.request.model"], count) == ("m", 1)  # metrics count every request

    run(main())


def test_what_is_not_sampled_here_is_not_traced_elsewhere(tmp_path: Path, collector: Collector) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        async with traced(tmp_path, collector, upstream, otlp_sample=0.0) as place:
            await place.ask()
        _, trace_id, span_id, flags = upstream.headers[0]["traceparent"].split("-")
        assert (len(trace_id), len(span_id), int(flags, 16) & 1) == (32, 16, 0)
        assert collector.spans == []

    run(main())


def test_a_shadow_hangs_below_the_request_it_copies(tmp_path: Path, collector: Collector) -> None:
    async def main() -> None:
        one, two = Upstream("m"), Upstream("n")
        shadow = ShadowConfig(model="m", to_model="n", share=1.0)
        async with traced(tmp_path, collector, one, two, shadows=(shadow,)) as place:
            await place.ask(headers={"traceparent": PARENT})
            await until(lambda: two.requests, "no copy was sent")
        server, _ = by_kind(collector.trace(TRACE))
        assert parents(two) == [server.span_id]

    run(main())


def test_without_a_collector_the_callers_headers_go_on_as_they_are(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        sent = [{"traceparent": PARENT, "tracestate": "a=1, b=2"}, {"traceparent": "cc-what", "tracestate": "x"}, {}]
        async with running_gateway(tmp_path, upstream, cache=None) as place:
            for headers in sent:
                await place.ask(headers=headers)
        names = ("traceparent", "tracestate")
        assert [{name: got[name] for name in names if name in got} for got in upstream.headers] == sent

    run(main())


def test_a_collector_that_never_answers_holds_up_nothing(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes connections and says nothing: worse than a dead one."""
    monkeypatch.setattr("tonle.observe.otlp_sender.FLUSH_S", 0.3)

    async def main() -> None:
        async def swallow(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
            while await reader.read(65536):
                pass

        silent = await asyncio.start_server(swallow, "127.0.0.1", 0)
        host, port = silent.sockets[0].getsockname()
        async with running_gateway(
            tmp_path, Upstream("m"), cache=None, otlp_endpoint=f"http://{host}:{port}", history_db="memory"
        ) as place:
            replies: list[httpx.Response] = await asyncio.gather(*(place.ask() for _ in range(50)))
            assert {reply.status_code for reply in replies} == {200}
        silent.close()

    run(main())  # bounded


def test_every_path_that_runs_a_model_is_traced(tmp_path: Path, collector: Collector) -> None:
    async def main() -> None:
        async with traced(tmp_path, collector, Upstream("m"), cache=None) as place:
            for path in (CHAT, "/v1/messages", "/api/chat", "/v1/responses"):
                given = {"input": "hello", "messages": None} if path == "/v1/responses" else {"max_tokens": 5}
                reply = await place.ask(path=path, headers={"traceparent": PARENT}, **given)
                assert reply.status_code == 200, reply.text
        servers = [span for span in collector.trace(TRACE) if span.kind == "server"]
        assert [span.name for span in servers] == [
            f"POST {path}" for path in (CHAT, "/v1/messages", "/api/chat", "/v1/responses")
        ]
        assert {span.attributes["gen_ai.operation.name"] for span in servers} == {"chat"}

    run(main())
