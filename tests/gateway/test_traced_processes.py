"""A gateway process and a server process, one collector: one connected trace per request, and the same ids in both logs."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.fakes.checkpoints import save_folder
from tests.fakes.otlp_collector import Collector, Span, running_collector
from tests.fakes.server import Server, tonle_gateway, tonle_serve
from tonle.protocol.random_ids import random_hex

CHAT = "/v1/chat/completions"
CALLER = "00f067aa0ba902b7"
ENGINE = ["queue", "prefill", "decode"]
SECRET = "Tonle Sap"  # in every prompt


@dataclass
class House:
    collector: Collector
    replica: Server
    gateway: Server

    def ask(self, trace_id: str, key: str = "key", **fields: Any) -> tuple[int, bytes]:
        """The status and the body."""
        connection = http.client.HTTPConnection(self.gateway.url.removeprefix("http://"), timeout=60)
        body = {"model": "m", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 6, "ignore_eos": True}
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}", "x-request-id": f"id-{trace_id}",
                   "traceparent": f"00-{trace_id}-{CALLER}-01"}  # fmt: skip
        connection.request("POST", CHAT, json.dumps(body | fields), headers)
        reply = connection.getresponse()
        status, text = reply.status, reply.read()
        connection.close()
        return status, text

    def trace(self, trace_id: str, count: int) -> list[Span]:
        """All spans of it: there are `count`."""
        self.collector.wait(lambda: len(self.collector.trace(trace_id)) >= count, f"there are less than {count} spans")
        spans = self.collector.trace(trace_id)
        assert len(spans) == count
        return spans


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("house")
    save_folder("llama", folder / "tiny")
    with pytest.MonkeyPatch.context() as patch, running_collector() as collector:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        patch.setenv("XDG_STATE_HOME", str(folder))
        own = ("--otlp-endpoint", collector.url, "--log-json", "--history-db", "memory")
        size = ("--served-model-name", "m", "--kv-cache-memory", "64MiB", "--max-num-seqs", "4", "--device", "cpu")
        with (
            tonle_serve(folder / "tiny", *size, *own) as replica,
            tonle_gateway("--backend", replica.url, "--api-key", "key", "--log-level", "debug", *own) as gateway,
        ):
            yield House(collector, replica, gateway)


def new_trace() -> str:
    return random_hex(16)


def check_chain(spans: list[Span]) -> dict[str, Span]:
    """Caller → gateway's server → its client → replica's server → engine, by name; each inside its parent's time."""
    found = {f"{span.service.removeprefix('tonle-')} {span.kind} {span.name}": span for span in spans}
    asked, sent = found[f"gateway server POST {CHAT}"], found["gateway client chat m"]
    served = found[f"serve server POST {CHAT}"]
    assert (asked.parent_id, sent.parent_id, served.parent_id) == (CALLER, asked.span_id, sent.span_id)
    engine = [span for span in spans if span.kind == "internal"]
    engine.sort(key=lambda span: span.start_ns)
    assert [span.name for span in engine] == ENGINE and {span.parent_id for span in engine} == {served.span_id}
    for outer, inner in ((asked, sent), (served, engine[0]), (served, engine[2])):
        assert outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns
    assert engine[0].end_ns == engine[1].start_ns and engine[1].end_ns == engine[2].start_ns
    return {"asked": asked, "sent": sent, "served": served} | {span.name: span for span in engine}


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_is_one_trace_through_both_processes(house: House, stream: bool) -> None:
    trace_id = new_trace()
    status, body = house.ask(trace_id, stream=stream, temperature=0.25)
    assert status == 200, body
    chain = check_chain(house.trace(trace_id, 6))
    for span in (chain["asked"], chain["sent"], chain["served"]):
        assert span.attributes["gen_ai.usage.output_tokens"] == 6
        assert span.attributes["gen_ai.request.temperature"] == 0.25
        assert span.attributes["gen_ai.response.finish_reasons"] == ["length"]
        assert span.attributes["http.response.status_code"] == 200 and not span.failed
    assert chain["sent"].attributes["server.port"] == int(house.replica.url.rpartition(":")[2])
    seconds = sum(chain[name].seconds for name in ENGINE)
    assert 0 < seconds <= chain["served"].seconds <= chain["asked"].seconds
    told = chain["served"].attributes
    assert told["gen_ai.latency.time_in_model_decode"] == pytest.approx(chain["decode"].seconds, abs=1e-3)
    assert told["gen_ai.request.id"] == f"id-{trace_id}"
    assert chain["prefill"].attributes["tonle.prefill.computed_tokens"] > 0  # where the time went, as the engine tells
    assert chain["decode"].attributes["tonle.decode.steps"] > 0
    assert sum(chain["queue"].attributes.values()) == pytest.approx(chain["queue"].seconds, abs=1e-3)


def test_a_cached_answer_and_a_refusal_end_at_the_gateway(house: House) -> None:
    first, second, refused, wrong = (new_trace() for _ in range(4))
    assert house.ask(first, temperature=0)[0] == 200
    assert house.ask(second, temperature=0)[0] == 200
    assert house.ask(refused, key="wrong")[0] == 401
    assert house.ask(wrong, model="none")[0] == 404
    check_chain(house.trace(first, 6))
    (hit,), (refusal,), (unknown,) = (house.trace(trace_id, 1) for trace_id in (second, refused, wrong))
    assert (hit.service, hit.attributes["tonle.cache"]) == ("tonle-gateway", "hit")
    assert refusal.attributes["http.response.status_code"] == 401 and refusal.attributes["error.type"]
    assert unknown.attributes["http.response.status_code"] == 404
    assert {span.parent_id for span in (hit, refusal, unknown)} == {CALLER}


def test_the_replicas_own_refusal_is_in_the_trace(house: House) -> None:
    trace_id = new_trace()
    assert house.ask(trace_id, temperature=-1)[0] == 400
    spans = {(span.service, span.kind): span for span in house.trace(trace_id, 3)}
    assert spans["tonle-gateway", "client"].failed and not spans["tonle-gateway", "server"].failed
    assert spans["tonle-serve", "server"].attributes["http.response.status_code"] == 400


def test_both_logs_name_the_request_and_its_trace(house: House) -> None:
    trace_id = new_trace()
    assert house.ask(trace_id)[0] == 200
    for server in (house.gateway, house.replica):
        line = _line_about(server, trace_id)
        assert line["request_id"] == f"id-{trace_id}" and line["component"] == "http"
        assert (line["method"], line["path"], line["status"], line["completion_tokens"]) == ("POST", CHAT, 200, 6)
        assert line["ms"] > 0 and line["prompt_tokens"] > 0 and "problem" not in line
    refused = new_trace()
    house.ask(refused, key="wrong")
    line = _line_about(house.gateway, refused)
    assert line["status"] == 401 and line["problem"] and "prompt_tokens" not in line


def _line_about(server: Server, trace_id: str) -> dict[str, Any]:
    """The only one, which is written after the reply."""
    for _ in range(6000):
        lines = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]
        if found := [line for line in lines if line.get("trace_id") == trace_id and "method" in line]:
            (line,) = found
            return dict(line)
        time.sleep(0.02)
    raise AssertionError(f"no line has the trace {trace_id}")


def test_nothing_of_a_prompt_is_sent_to_the_collector(house: House) -> None:
    assert house.collector.bodies and not any(SECRET.encode() in body for body in house.collector.bodies)
