"""Our server, started as the rendered container says, does what its platform expects: probes, name, metrics, drain."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.fakes.checkpoints import save_folder
from tests.unit.cli.terminal import COMMAND, DEADLINE_S, environment
from tests.unit.deploy.matrix import Case, workload_of
from tonle.bench.server_process import free_port
from tonle.config.cache_dir import cache_dir
from tonle.config.load_settings import load
from tonle.deploy.document import Document

STREAMS = 8  # that run when a pod is told to stop
TOKENS = 800  # of each


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mnt") / "models"
    save_folder("llama", folder)
    return folder


@dataclass(frozen=True)
class Pod:
    container: Document
    settings: Document  # beside it

    @property
    def grace_s(self) -> int:
        """From SIGTERM to SIGKILL: Kubernetes runs the preStop hook first, within the same grace period."""
        return int(self.settings["terminationGracePeriodSeconds"]) - self.pre_stop_s

    @property
    def pre_stop_s(self) -> int:
        return int(self.container["lifecycle"]["preStop"]["sleep"]["seconds"])


def pod_of(kind: str) -> Pod:
    workload = workload_of({}, {"name": "mine", "storage_uri": "pvc://models/tiny-1M", "parameters": "1M"})
    documents = {document["kind"]: document["spec"] for document in Case("", kind, workload).documents}
    if kind == "kserve":
        return Pod(documents["ServingRuntime"]["containers"][0], documents["InferenceService"]["predictor"])
    spec = documents["LLMInferenceService" if kind == "llmisvc" else "Deployment"]["template"]
    spec = spec.get("spec", spec)
    return Pod(spec["containers"][0], spec)


def filled_in(text: str) -> str:
    """What KServe puts in place of its templates; TLS is off, as it has it by default."""
    text = text.replace("{{.Name}}", "mine")
    return re.sub(r"\{\{ if .*? \}\}.*?\{\{ else \}\}(.*?)\{\{ end \}\}", r"\1", text)


def mounted(text: str, model: Path, cache: Path) -> str:
    """With the folders of this machine instead of the pod's volumes."""
    return text.replace("/mnt/models", str(model)).replace("/cache", str(cache))


@contextmanager
def started(container: Document, model: Path, cache: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    assert container["command"] == ["tonle", "serve"]
    assert container["args"][0] == "/mnt/models"
    port = free_port()
    args = [mounted(filled_in(arg), model, cache) for arg in container["args"]]
    own = container["ports"][0]["containerPort"]
    assert f"--port={own}" in args and "--host=0.0.0.0" in args
    args = [arg.replace(f"--port={own}", f"--port={port}").replace("0.0.0.0", "127.0.0.1") for arg in args]
    variables = {each["name"]: mounted(each["value"], model, cache) for each in container["env"]}
    # With the kernels of this machine: compiling them takes half a minute.
    variables["TONLE_CACHE_DIR"] = str(cache_dir())
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
    """The status of a probe, on a connection of its own as the kubelet makes it; 0 while nothing listens."""
    handler = container[name]["httpGet"]
    assert handler["port"] == container["ports"][0]["containerPort"]
    headers = {"Host": f"10.244.1.7:{handler['port']}", "User-Agent": "kube-probe/1.34", "Connection": "close"}
    try:
        timeout_s = container[name]["timeoutSeconds"]
        return httpx.get(url + handler["path"], headers=headers, timeout=timeout_s).status_code
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


class Streams:
    """Requests that run side by side, each on a connection of its own."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._pool = ThreadPoolExecutor(STREAMS)
        self._begun = threading.Semaphore(0)
        self._running = [self._pool.submit(self._read) for _ in range(STREAMS)]

    def _read(self) -> list[str]:
        body = {"prompt": "hello", "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=DEADLINE_S) as reply:
            lines = (line.removeprefix("data: ") for line in reply.iter_lines() if line)
            first = next(lines)
            self._begun.release()
            return [first, *lines]

    def wait_until_begun(self) -> None:
        for _ in range(STREAMS):
            assert self._begun.acquire(timeout=DEADLINE_S)

    @property
    def num_running(self) -> int:
        return sum(not each.done() for each in self._running)

    def results(self) -> list[list[str]]:
        found = [each.result(timeout=DEADLINE_S) for each in self._running]
        self._pool.shutdown()
        return found


@pytest.mark.parametrize(("kind", "name"), [("kubernetes", "tiny-1M"), ("kserve", "mine")])
def test_a_pod(kind: str, name: str, model: Path, tmp_path: Path) -> None:
    pod = pod_of(kind)
    container = pod.container
    with started(container, model, tmp_path) as (process, url):
        seen = wait_until_started(process, url, container)
        assert (200, 503) in seen, "alive while it loads the model, and not ready"
        assert probe(url, container, "readinessProbe") == probe(url, container, "livenessProbe") == 200
        assert [entry["id"] for entry in httpx.get(f"{url}/v1/models").json()["data"]] == [name]
        assert f'vllm:num_requests_waiting{{model_name="{name}"}}' in httpx.get(f"{url}/metrics").text

        streams = Streams(url)
        streams.wait_until_begun()
        assert streams.num_running == STREAMS
        process.send_signal(signal.SIGTERM)
        while probe(url, container, "readinessProbe") == 200:  # until the signal has arrived
            assert process.poll() is None
        assert probe(url, container, "readinessProbe") in (0, 503)
        with pytest.raises(httpx.ConnectError):  # nothing was sent, so that a proxy may send it to another pod
            httpx.post(f"{url}/v1/completions", json={"prompt": "late"})
        for events in streams.results():
            assert events[-1] == "[DONE]", "a request that runs is finished"
            reasons = [
                json.loads(event)["choices"][0]["finish_reason"] for event in events[:-1] if '"choices":[{' in event
            ]
            assert reasons[-1] == "length", "whole"
        process.communicate(timeout=120)
        assert process.returncode == 0


def test_llmisvc_starts_the_same_server() -> None:
    """It differs from the Deployment's in TLS, which is KServe's to switch on, and in a longer hook before SIGTERM."""
    ours, plain = pod_of("llmisvc"), pod_of("kubernetes")
    assert ours.container["command"] == plain.container["command"]
    assert ours.container["env"] == plain.container["env"]
    args = [filled_in(arg) for arg in ours.container["args"]]
    assert args == [*plain.container["args"], "--ssl-certfile=none", "--ssl-keyfile=none"]
    assert load({"ssl_certfile": "none", "ssl_keyfile": "none"}, environ={}).ssl_certfile is None
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        handler = dict(ours.container[name]["httpGet"])
        assert filled_in(handler.pop("scheme")) == "HTTP"
        assert handler == plain.container[name]["httpGet"]
    kserves_hook_s = 15
    assert ours.settings["terminationGracePeriodSeconds"] - kserves_hook_s == plain.grace_s
