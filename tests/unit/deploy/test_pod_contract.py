"""Our server, started as the rendered container says, does what its platform expects: probes, name, metrics, drain."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.checkpoints import save_folder
from tests.unit.cli.terminal import COMMAND, DEADLINE_S, environment
from tests.unit.deploy.matrix import Case, workload_of
from tonle.config.cache_dir import cache_dir
from tonle.deploy.document import Document
from tonle.edge.listening import bind


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mnt") / "models"
    save_folder("llama", folder)
    return folder


def server_of(kind: str) -> tuple[Document, Document]:
    """Its container, and the pod that it is in."""
    workload = workload_of({}, {"name": "mine", "storage_uri": "pvc://models/tiny-1M", "parameters": "1M"})
    documents = {document["kind"]: document["spec"] for document in Case("", kind, workload).documents}
    if kind == "kserve":
        return documents["ServingRuntime"]["containers"][0], documents["InferenceService"]["predictor"]
    spec = documents["LLMInferenceService" if kind == "llmisvc" else "Deployment"]["template"]
    pod = spec.get("spec", spec)
    return pod["containers"][0], pod


def filled_in(text: str, model: Path, cache: Path) -> str:
    """What the platform puts in place of its templates and volumes; TLS is off, as KServe has it by default."""
    text = re.sub(r"\{\{ if .*? \}\}.*?\{\{ else \}\}(.*?)\{\{ end \}\}", r"\1", text.replace("{{.Name}}", "mine"))
    return text.replace("/mnt/models", str(model)).replace("/cache", str(cache))


@contextmanager
def started(container: Document, model: Path, cache: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    assert container["command"] == ["tonle", "serve"]
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    args = [filled_in(arg, model, cache) for arg in container["args"]]
    own = container["ports"][0]["containerPort"]
    assert f"--port={own}" in args and "--host=0.0.0.0" in args
    args = [arg.replace(f"--port={own}", f"--port={port}").replace("0.0.0.0", "127.0.0.1") for arg in args]
    variables = {each["name"]: filled_in(each["value"], model, cache) for each in container["env"]}
    variables["TONLE_CACHE_DIR"] = str(
        cache_dir()
    )  # with the kernels of this machine: compiling them takes half a minute
    process = subprocess.Popen(
        [*COMMAND, "serve", *args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=environment() | variables, cwd="/",
    )  # fmt: skip
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.communicate()


def probe(url: str, container: Document, name: str) -> int:
    """The status of a probe; 0 while nothing listens."""
    handler = container[name]["httpGet"]
    try:
        return httpx.get(url + handler["path"], timeout=container[name]["timeoutSeconds"]).status_code
    except httpx.TransportError:
        return 0


def wait_until_started(process: subprocess.Popen[str], url: str, container: Document) -> set[tuple[int, int]]:
    """What the probes for alive and ready said meanwhile."""
    deadline, seen = time.monotonic() + DEADLINE_S, set()
    while probe(url, container, "startupProbe") != 200:
        assert process.poll() is None and time.monotonic() < deadline
        seen.add((probe(url, container, "livenessProbe"), probe(url, container, "readinessProbe")))
        time.sleep(0.05)
    return seen


def stream(url: str, tokens: int) -> Any:
    body = {"prompt": "hello", "max_tokens": tokens, "stream": True, "ignore_eos": True}
    return httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60)


@pytest.mark.parametrize(("kind", "name"), [("kserve", "mine"), ("llmisvc", "tiny-1M")])
def test_a_pod(kind: str, name: str, model: Path, tmp_path: Path) -> None:
    container, pod = server_of(kind)
    with started(container, model, tmp_path) as (process, url):
        assert (200, 503) in wait_until_started(process, url, container), (
            "alive while it loads the model, and not ready"
        )
        assert probe(url, container, "readinessProbe") == probe(url, container, "livenessProbe") == 200
        assert [entry["id"] for entry in httpx.get(f"{url}/v1/models").json()["data"]] == [name]
        assert f'vllm:num_requests_waiting{{model_name="{name}"}}' in httpx.get(f"{url}/metrics").text
        with stream(url, 60) as reply:
            lines = (line.removeprefix("data: ") for line in reply.iter_lines() if line)
            json.loads(next(lines))
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert rest[-1] == "[DONE]", "a request that runs is finished"
        process.communicate(timeout=pod["terminationGracePeriodSeconds"])
        assert process.returncode == 0
        assert time.monotonic() - began < pod["terminationGracePeriodSeconds"]
