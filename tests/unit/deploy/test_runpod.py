"""`tonle deploy render runpod`, and the worker: with a real server, and a stub of RunPod's SDK and of its API."""

from __future__ import annotations

import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.fakes.checkpoints import save_folder
from tests.unit.deploy.examples import ROOT, committed_and_rendered, files_of
from tonle.deploy.runpod_worker import request_of
from tonle.errors import ConfigError

# What RunPod's API (v2) takes. Fields of requests, required ones in upper case.
_CONTAINER = "IMAGE args disk env ports registry"
_ENDPOINT = f"NAME TYPE SCALING {_CONTAINER} gpu cpu dataCenterIds flashboot networkVolumes timeout workers"
FIELDS = {
    "network-volume.json": "NAME SIZE DATACENTER type",
    "pod-template.json": f"NAME {_CONTAINER} allowedCudaVersions category mounts public serverless startJupyter startSsh",
    "pod.json": "NAME templateId cloud cpu gpu dataCenterIds globalNetworking mounts startJupyter startSsh",
    "queue-endpoint.json": _ENDPOINT,
    "load-balancer-endpoint.json": _ENDPOINT,
}
GPU = {"model": "org/x-7B", "deploy": {"gpu": "L4", "hub_token_secret": "hub-token"}}


def bodies(folder: Path, **settings: Any) -> dict[str, dict[str, Any]]:
    files = files_of("runpod", folder, **settings)
    return {name: json.loads(file.text) for name, file in files.items() if name.endswith(".json")}


def test_the_example_is_what_is_rendered() -> None:
    committed, rendered = committed_and_rendered("runpod")
    assert committed == rendered


@pytest.mark.parametrize("settings", [{}, GPU, {"scale_on": "queue"}], ids=["cpu", "gpu", "queue"])
def test_fields_are_those_of_the_api(tmp_path: Path, settings: dict[str, Any]) -> None:
    settings = {"deploy": settings} if "scale_on" in settings else settings
    made = bodies(tmp_path, **settings)
    assert set(made) == set(FIELDS)
    for name, body in made.items():
        known = {word.lower(): word for word in FIELDS[name].split()}
        assert {field.lower() for field in body} <= set(known), name
        assert {word.lower() for word in known.values() if word.isupper()} <= {field.lower() for field in body}, name
        assert ("gpu" in body) + ("cpu" in body) == (name not in ("network-volume.json", "pod-template.json"))
    volume = made["network-volume.json"]
    assert 10 <= volume["size"] <= 4096
    for name in ("queue-endpoint.json", "load-balancer-endpoint.json"):
        body = made[name]
        counts_requests = body["scaling"]["type"] == "REQUEST_COUNT"
        assert set(body["scaling"]) == {"type", "requestCount" if counts_requests else "queueDelay"}
        assert body["type"] == "QUEUE" or counts_requests  # what RunPod asks of load balancers
        assert ("idleTimeout" in body["workers"]) == (body["type"] != "QUEUE" or not counts_requests)
        assert body["dataCenterIds"] == [volume["dataCenter"]]  # a volume cannot be reached from another one


def test_the_schema_of_the_api_agrees(tmp_path: Path) -> None:
    file = os.environ.get("RUNPOD_OPENAPI")
    if file is None:
        pytest.skip("set RUNPOD_OPENAPI to RunPod's openapi.json (v2)")
    components = json.loads(Path(file).read_text())["components"]
    kinds = {"network-volume": "NetworkVolume", "pod-template": "Template", "pod": "Pod"}
    for settings in ({}, GPU):
        for name, body in bodies(tmp_path, **settings).items():
            schema = f"#/components/schemas/Create{kinds.get(name.removesuffix('.json'), 'Endpoint')}Request"
            jsonschema.Draft202012Validator({"$ref": schema, "components": components}).validate(body)


def test_keys_are_references(tmp_path: Path) -> None:
    made = bodies(tmp_path, **GPU)
    assert made["pod-template.json"]["env"]["TONLE_API_KEY"] == "{{ RUNPOD_SECRET_tonle_api_key }}"
    for name in ("pod-template.json", "queue-endpoint.json", "load-balancer-endpoint.json"):
        assert made[name]["env"]["HF_TOKEN"] == "{{ RUNPOD_SECRET_hub_token }}"


def test_models_and_kernels_are_on_the_volume(tmp_path: Path) -> None:
    made = bodies(tmp_path)
    (mount,) = made["pod.json"]["mounts"]["network"]
    assert made["pod-template.json"]["env"]["TONLE_CACHE_DIR"] == mount["path"]
    for name in ("queue-endpoint.json", "load-balancer-endpoint.json"):
        assert made[name]["env"]["TONLE_CACHE_DIR"].startswith("/runpod-volume/")
        assert made[name]["env"]["XDG_STATE_HOME"].startswith("/cache/")  # workers share the volume


def test_the_load_balancer_asks_what_the_server_answers(tmp_path: Path) -> None:
    body = bodies(tmp_path)["load-balancer-endpoint.json"]
    assert body["env"]["HEALTH_CHECK_PATH"] == "/health/ready"
    assert f"--port={body['env']['PORT']}" in body["args"].split() and body["ports"] == [f"{body['env']['PORT']}/http"]


def test_a_worker_takes_as_many_jobs_as_the_engine_runs(tmp_path: Path) -> None:
    body = bodies(tmp_path, max_num_seqs=7)["queue-endpoint.json"]
    assert body["env"]["MAX_CONCURRENCY"] == "7" and "--max-num-seqs=7" in body["args"]
    assert body["args"].startswith("deploy runpod-worker")


def test_vllm_has_no_worker_for_the_queue(tmp_path: Path) -> None:
    made = bodies(tmp_path, model="org/x-7B", deploy={"engine": "vllm", "gpu": "H100", "gpus": 2})
    assert "queue-endpoint.json" not in made
    assert made["pod.json"]["gpu"] == {"id": "NVIDIA H100 80GB HBM3", "count": 2}
    assert "--tensor-parallel-size=2" in made["pod-template.json"]["args"]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"model": "org/x-7B", "deploy": {"gpu": "A10G"}}, "RunPod does not offer A10G; it offers: L4"),
        ({"model": "/srv/x-1B", "deploy": {"parameters": "1B"}}, "RunPod cannot read it"),
        ({"model": "org/x-1B", "deploy": {"storage_uri": "pvc://models/x"}}, "cannot be read by RunPod"),
        ({"model": "org/x-70B"}, "RunPod has no CPU machine"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        bodies(tmp_path, **settings)


# -- the script, against a stub of the API


@pytest.fixture
def api() -> Iterator[tuple[str, list[tuple[str, str | None, dict[str, Any]]]]]:
    """An address, and what was posted to it: path, Authorization, body. Each answer has an id."""
    posted: list[tuple[str, str | None, dict[str, Any]]] = []

    class Api(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            posted.append((self.path, self.headers["Authorization"], body))
            self.send_response(201)
            self.end_headers()
            self.wfile.write(json.dumps({"id": f"id-{len(posted)}"}).encode())

        def log_message(self, format: str, *arguments: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Api) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", posted
        server.shutdown()


def create(folder: Path, kind: str, **variables: str) -> subprocess.CompletedProcess[str]:
    for name, file in files_of("runpod", folder, **GPU).items():
        (folder / name).write_text(file.text)
    return subprocess.run(["bash", folder / "create.sh", kind], env={"PATH": os.environ["PATH"], **variables},
                          capture_output=True, text=True, check=False, timeout=60)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "paths"),
    [("pod", ["/network-volumes", "/templates", "/pods"]), ("queue-endpoint", ["/network-volumes", "/serverless"])],
)
def test_the_script_creates_it(tmp_path: Path, api: Any, kind: str, paths: list[str]) -> None:
    address, posted = api
    ended = create(tmp_path, kind, RUNPOD_API=address, RUNPOD_API_KEY="rp", IMAGE="docker.io/me/tonle:9")
    assert ended.returncode == 0, ended.stderr
    assert [path for path, _, _ in posted] == paths
    assert {key for _, key, _ in posted} == {"Bearer rp"}
    last = posted[-1][2]
    if kind == "pod":
        assert last["mounts"]["network"][0]["volumeId"] == "id-1" and last["templateId"] == "id-2"
        assert posted[1][2]["image"] == "docker.io/me/tonle:9"
    else:
        assert last["networkVolumes"] == ["id-1"] and last["image"] == "docker.io/me/tonle:9"


@pytest.mark.parametrize(
    ("kind", "variables", "message"),
    [
        ("pods", {}, "usage:"),
        ("pod", {"IMAGE": "docker.io/me/tonle:9"}, "RUNPOD_API_KEY"),
        ("pod", {"RUNPOD_API_KEY": "rp"}, "push it to a registry"),
    ],
)
def test_the_script_says_what_is_missing(tmp_path: Path, kind: str, variables: dict[str, str], message: str) -> None:
    ended = create(tmp_path, kind, **variables)
    assert ended.returncode != 0 and message in ended.stderr


# -- the worker


@pytest.mark.parametrize(
    ("job", "path", "body"),
    [
        ({"openai_route": "/v1/chat/completions", "openai_input": {"a": 1}}, "/v1/chat/completions", {"a": 1}),
        ({"openai_route": "/v1/models"}, "/v1/models", None),
        ({"openai_input": {"a": 1}}, "/v1/chat/completions", {"a": 1}),
        ({"messages": [], "sampling_params": {"n": 2}, "stream": True}, "/v1/chat/completions",
         {"messages": [], "n": 2, "stream": True}),
        ({"prompt": "x", "model": "m"}, "/v1/completions", {"prompt": "x", "model": "m"}),
    ],
)  # fmt: skip
def test_what_a_job_asks_for(job: dict[str, Any], path: str, body: dict[str, Any] | None) -> None:
    assert request_of(job) == (path, body)


@pytest.mark.parametrize(
    "job",
    [None, [], {}, {"openai_route": "/admin/keys"}, {"openai_route": "/v1/x HTTP/1.1\r\nHost: y"}, {"openai_input": "x"},
     {"openai_route": 7}, {"prompt": "x", "sampling_params": [1]}, {"openai_route": "/v1/../admin/keys"}],
)  # fmt: skip
def test_a_job_that_asks_for_nothing_we_have(job: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        request_of(job)


SDK = '''
"""A stub of RunPod's SDK: runs jobs as its loop does (generators, aggregation, errors), from the lines of stdin."""
import asyncio, inspect, json, sys

class serverless:
    def start(config):
        assert set(config) == {"handler", "concurrency_modifier", "return_aggregate_stream"}
        assert inspect.isasyncgenfunction(config["handler"]) and config["return_aggregate_stream"] is True
        print(json.dumps({"concurrency": config["concurrency_modifier"](1)}), flush=True)
        asyncio.run(loop(config["handler"]))

async def run(handler, job):
    result = {"id": job["id"], "output": [], "streamed": 0}
    pieces = handler(job)
    async for piece in pieces:
        if isinstance(piece, dict) and piece.get("error"):
            result = {"id": job["id"], "error": str(piece["error"])}
            break
        result["output"].append(piece)
        result["streamed"] += 1
        if job.get("cancel"):
            await pieces.aclose()
            break
    print(json.dumps(result), flush=True)

async def loop(handler):
    while line := await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline):
        await asyncio.gather(*(run(handler, job) for job in json.loads(line)))
'''
CHAT = {"messages": [{"role": "user", "content": "hello ភាសា"}], "max_tokens": 5}


class Worker:
    def __init__(self, folder: Path, **variables: str) -> None:
        (folder / "sdk").mkdir()
        (folder / "sdk" / "runpod.py").write_text(SDK)
        paths = [str(folder / "sdk"), str(ROOT / "src"), *sys.path]
        self.log = folder / "worker.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tonle", "deploy", "runpod-worker", str(folder / "tiny"), "--device", "cpu", "--log-json"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "MAX_CONCURRENCY": "5", **variables},
            )  # fmt: skip

    def line(self) -> dict[str, Any]:
        """The next one of the SDK's: the server's are not JSON of ours."""
        assert self.process.stdout is not None
        while text := self.process.stdout.readline():
            if text.startswith((b'{"concurrency"', b'{"id"')):
                return json.loads(text)  # type: ignore[no-any-return]
        raise AssertionError(self.log.read_text())

    def do(self, *jobs: dict[str, Any]) -> dict[str, dict[str, Any]]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(jobs).encode() + b"\n")
        self.process.stdin.flush()
        return {result["id"]: result for result in (self.line() for _ in jobs)}


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    folder = tmp_path_factory.mktemp("worker")
    save_folder("llama", folder / "tiny")
    (folder / "file").touch()
    made = Worker(folder, TONLE_CACHE_DIR=str(folder / "file" / "cache"))  # a volume that cannot be written
    try:
        assert made.line() == {"concurrency": 5}
        yield made
    finally:
        if made.process.poll() is None:
            made.process.kill()
            made.process.wait()


def test_a_worker_answers_and_streams_several_jobs_at_once(worker: Worker) -> None:
    results = worker.do(
        {"id": "json", "input": {"openai_route": "/v1/chat/completions", "openai_input": CHAT}},
        {"id": "stream", "input": {"openai_route": "/v1/chat/completions", "openai_input": CHAT | {"stream": True}}},
        {"id": "short", "input": {"prompt": "hello", "sampling_params": {"max_tokens": 2}}},
        {"id": "models", "input": {"openai_route": "/v1/models"}},
    )
    (answer,) = results["json"]["output"]
    assert answer["usage"]["completion_tokens"] == 5
    events = results["stream"]["output"]
    assert events[-1] == "data: [DONE]\n\n" and results["stream"]["streamed"] == len(events) > 2
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert results["short"]["output"][0]["usage"]["completion_tokens"] == 2
    assert results["models"]["output"][0]["data"][0]["id"] == "tiny"


def test_a_worker_fails_a_job_with_the_reason(worker: Worker) -> None:
    results = worker.do(
        {"id": "bad", "input": {"messages": "hello"}},
        {"id": "odd", "input": {}},
        {"id": "path", "input": {"openai_route": "/v1/no"}},
    )
    assert results["bad"]["error"] == "HTTP 400: messages must be a list, not a string"
    assert "input must have" in results["odd"]["error"]
    assert results["path"]["error"].startswith("HTTP 404")


def test_a_cancelled_job_ends_on_the_server_too(worker: Worker) -> None:
    long = {"messages": CHAT["messages"], "sampling_params": {"max_tokens": 900, "ignore_eos": True}, "stream": True}
    assert worker.do({"id": "cut", "cancel": True, "input": long})["cut"]["streamed"] == 1
    assert (
        worker.do({"id": "next", "input": {"prompt": "x", "sampling_params": {"max_tokens": 1}}})["next"]["streamed"]
        == 1
    )
    for _ in range(2400):
        if re.search(r"cancel|closed|gone|hung up|499", worker.log.read_text()):
            return
        threading.Event().wait(0.05)
    raise AssertionError(worker.log.read_text())


def test_a_volume_that_cannot_be_written_is_told_and_not_used(worker: Worker) -> None:
    assert "models are fetched again by every worker" in worker.log.read_text()


def test_a_worker_ends_with_its_server(worker: Worker) -> None:
    children = Path(f"/proc/{worker.process.pid}/task/{worker.process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    assert worker.process.wait(120) != 0
    assert "so does this worker" in worker.log.read_text()
