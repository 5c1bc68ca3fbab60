"""Models, tokenize, health, metrics, docs."""

from __future__ import annotations

import re

import httpx
import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.fakes.front import BEGIN, FakeFront
from tests.http.serving import serving
from tonle import __version__
from tonle.config.serve import ServeConfig
from tonle.engine.messages import LoopStats
from tonle.errors import ModelError
from tonle.replica.api_catalog import ENTRIES, HealthReport
from tonle.replica.replica import ReplicaOptions
from tonle.replica.serve import build_server


def test_models(client: httpx.Client, front: FakeFront) -> None:
    body = client.get("/v1/models").json()
    assert body["object"] == "list" and [entry["id"] for entry in body["data"]] == ["scripted", "nickname"]
    assert body["data"][1] == {
        "id": "nickname", "object": "model", "created": front.created, "owned_by": "tonle", "root": "scripted",
        "parent": None, "max_model_len": 512,
    }  # fmt: skip
    assert client.get("/v1/models/scripted").json() == body["data"][0]
    assert client.get("/v1/models/other/model").json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("trust_salt", [True, False])
def test_the_list_of_models_tells_a_gateway_whether_salts_are_heeded(*, trust_salt: bool) -> None:
    with serving(FakeFront(), ReplicaOptions(trust_salt=trust_salt)) as url:
        assert ("x-tonle-trust-salt" in httpx.get(f"{url}/v1/models").headers) is trust_salt


def test_models_answer_for_readiness(client: httpx.Client, front: FakeFront) -> None:
    front.card = None
    assert client.get("/v1/models").status_code == 503


def test_tokenize(client: httpx.Client) -> None:
    assert client.post("/tokenize", json={"prompt": "ab"}).json() == {
        "tokens": [BEGIN, 97, 98], "count": 3, "max_model_len": 512,
    }  # fmt: skip
    body = {"prompt": "ab", "add_special_tokens": False, "return_token_strs": True, "model": "scripted", "x": 1}
    reply = client.post("/tokenize", json=body).json()
    assert reply["tokens"] == [97, 98] and reply["token_strs"] == ["a", "b"]
    assert reply["warnings"] == [{"param": "x", "message": "unknown field, ignored"}]


def test_tokenize_messages(client: httpx.Client, front: FakeFront) -> None:
    messages = [{"role": "user", "content": "hi"}]
    reply = client.post("/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()
    assert front.text.decode(reply["tokens"]) == "<user>hi\n"
    chat = client.post("/v1/chat/completions", json={"messages": messages}).json()
    count = client.post("/tokenize", json={"messages": messages}).json()["count"]
    assert count == chat["usage"]["prompt_tokens"], "what is counted is what is charged"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": []}),
        ("/tokenize", {"messages": []}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [258]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": ["a"]}),
    ],
)
def test_tokenize_refuses(client: httpx.Client, path: str, body: dict[str, object]) -> None:
    assert client.post(path, json=body).status_code == 400


def test_detokenize(client: httpx.Client, front: FakeFront) -> None:
    tokens = front.text.encode("ខ្មែរ")
    assert client.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": "<begin>ខ្មែរ"}
    assert client.post("/detokenize", json={"tokens": tokens, "skip_special_tokens": True}).json() == {"prompt": "ខ្មែរ"}
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_health(client: httpx.Client, front: FakeFront) -> None:
    front.stats = LoopStats(num_running=3, num_waiting=2, kv_usage=0.25)
    body = client.get("/health").json()
    assert set(body) <= set(HealthReport.__struct_fields__), "every field is on the docs page"
    msgspec.convert(body, HealthReport)
    assert body.pop("uptime_s") >= 0
    expected = {"status": "healthy", "reason": None, "model": "scripted", "running": 3, "waiting": 2, "kv_usage": 0.25}
    assert body | expected == body, "and whether latencies are within the target"
    assert body["meets_sla"] in (True, False) and body["latency_s"]["p95"] >= 0
    assert client.get("/health/ready").json() == {"status": "ready"}
    assert client.get("/health/live").status_code == 200


def test_unhealthy(client: httpx.Client, front: FakeFront) -> None:
    front.card = None
    assert client.get("/health/ready").json() == {"status": "not ready", "reason": "the model is still being loaded"}
    front.failure = ModelError("weights are missing")
    for path in ("/health", "/health/ready"):
        reply = client.get(path)
        assert reply.status_code == 503 and "weights are missing" in reply.json()["reason"]
    assert client.get("/health").json()["status"] == "unhealthy"
    assert client.get("/health/live").status_code == 200


def metric(client: httpx.Client, sample: str) -> float:
    found = re.search(rf"^{re.escape(sample)} (\S+)$", client.get("/metrics").text, re.MULTILINE)
    assert found is not None, sample
    return float(found.group(1))


def test_metrics_of_requests(client: httpx.Client) -> None:
    label = '{model_name="scripted"}'
    names = (
        "time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
        "request_prefill_time_seconds", "request_decode_time_seconds", "request_inference_time_seconds",
        "request_prompt_tokens", "request_generation_tokens", "request_time_per_output_token_seconds",
    )  # fmt: skip
    samples = [f"vllm:{name}_count{label}" for name in names]
    gaps = f"vllm:inter_token_latency_seconds_count{label}"
    stops = 'vllm:request_success_total{finished_reason="stop",model_name="scripted"}'
    http = 'tonle:http_requests_total{method="POST",path="/v1/completions",status="200"}'
    client.post("/v1/completions", json={"prompt": "a", "max_tokens": 99})
    before = {sample: metric(client, sample) for sample in (*samples, gaps, stops, http)}
    usage = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 99}).json()["usage"]
    for sample in (*samples, stops, http):
        assert metric(client, sample) == before[sample] + 1, sample
    assert metric(client, gaps) == before[gaps] + usage["completion_tokens"] - 1


def test_metrics_of_the_engine(client: httpx.Client, front: FakeFront) -> None:
    front.stats = LoopStats(
        num_running=3, num_waiting=2, kv_usage=0.25, prefix_queries=100, prefix_hits=40, num_preemptions=1,
        prompt_tokens=60, generation_tokens=7,
    )  # fmt: skip
    expected = {
        "num_requests_running": 3, "num_requests_waiting": 2, "kv_cache_usage_perc": 0.25,
        "prefix_cache_queries_total": 100, "prefix_cache_hits_total": 40, "num_preemptions_total": 1,
        "prompt_tokens_total": 100, "generation_tokens_total": 7,
    }  # fmt: skip
    for name, value in expected.items():
        assert metric(client, f'vllm:{name}{{model_name="scripted"}}') == value, name
    labels = 'block_size="16",cache_dtype="float32",model_name="scripted",num_gpu_blocks="64"'
    assert metric(client, f"vllm:cache_config_info{{{labels}}}") == 1


def test_metrics_formats(client: httpx.Client) -> None:
    assert client.get("/metrics").headers["content-type"].startswith("text/plain; version=")
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    reply = client.get("/metrics", headers=accept)
    assert reply.headers["content-type"].startswith("application/openmetrics-text") and reply.text.endswith("# EOF\n")


def test_openmetrics_can_be_read_and_keeps_the_names(client: httpx.Client) -> None:
    client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
    text = client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"}).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["vllm:request_success"].type == "counter" and families["vllm:request_success"].samples
    assert families["vllm:time_to_first_token_seconds"].type == "histogram"
    assert text.count("# EOF") == 1


def test_the_cache_of_a_server_without_keys_can_be_cleared(client: httpx.Client) -> None:
    body = {"prompt": "cache me", "max_tokens": 2, "temperature": 0, "use_cache": True}
    states = [client.post("/v1/completions", json=body).headers["x-cache"] for _ in range(2)]
    assert states == ["miss", "hit"]
    assert client.post("/cache/clear").json()["entries"] >= 1
    assert client.post("/v1/completions", json=body).headers["x-cache"] == "miss"
    refused = client.get("/admin/keys")
    assert refused.status_code == 403 and "--admin-key" in refused.json()["error"]["message"]


def test_a_deadline_that_passes_is_504(client: httpx.Client, front: FakeFront) -> None:
    front.stall_after = 0
    for stream in (False, True):
        body = {"prompt": "late", "max_tokens": 2, "stream": stream}
        reply = client.post("/v1/completions", json=body, headers={"x-request-deadline-ms": "150"})
        assert reply.status_code == 504 and reply.json()["error"]["code"] == "deadline_exceeded"
        assert front.cancelled.get(timeout=60)


def test_health_tells_the_engines_queue_from_its_work(client: httpx.Client, front: FakeFront) -> None:
    front.queue_s = 5.0
    for stream in (False, True):
        client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2, "stream": stream})
    sums = client.get("/metrics").text
    found = re.search(r"^tonle:gateway_queue_seconds_sum (\S+)$", sums, re.MULTILINE)
    assert found is not None and float(found.group(1)) >= 10


def test_version_and_head(client: httpx.Client) -> None:
    assert client.get("/version").json() == {"version": __version__}
    reply = client.head("/health/live")
    assert reply.status_code == 200 and reply.content == b""


def test_every_route_is_documented() -> None:
    server = build_server(FakeFront(), ServeConfig())  # type: ignore[arg-type]
    assert set(server.routes.patterns) == {entry.path for entry in ENTRIES}


def test_docs_page(client: httpx.Client) -> None:
    reply = client.get("/docs")
    assert reply.headers["content-type"].startswith("text/html")
    for entry in ENTRIES:
        assert entry.path in reply.text
    for field in (
        "repetition_penalty",
        "stream_options",
        "max_completion_tokens",
        "return_token_strs",
        "include_usage",
    ):
        assert f"<code>{field}</code>" in reply.text
    assert "<script" not in reply.text
    assert not re.search(r'(src|href)="(https?:)?//', reply.text), "nothing is loaded from elsewhere"
    hostile = client.get("/docs", headers={"host": "<script>"})
    assert "<script" not in hostile.text


def test_openapi(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    request = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    assert request["schema"] == {"$ref": "#/components/schemas/ChatRequest"}
    assert schemas["ChatRequest"]["required"] == ["messages"]
    references = set(re.findall(r'"#/components/schemas/(\w+)"', client.get("/openapi.json").text))
    assert references <= set(schemas)


def test_examples_in_the_docs_work(client: httpx.Client) -> None:
    for entry in ENTRIES:
        if entry.example is not None:
            reply = client.post(entry.path, json=entry.example)
            assert reply.status_code == 200 and "warnings" not in reply.json(), entry.path


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/api/v1/inference"])
def test_openapi_knows_that_answers_can_be_streams(client: httpx.Client, path: str) -> None:
    content = client.get("/openapi.json").json()["paths"][path]["post"]["responses"]["200"]["content"]
    assert set(content) == {"application/json", "text/event-stream"}
