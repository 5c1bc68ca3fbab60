"""`tonle serve --frontends 2` as users run it: both answer, and what happens to whom when a process dies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes.checkpoints import save_folder
from tests.fakes.otlp_collector import Collector, running_collector
from tests.fakes.server import Server, tonle_serve
from tests.http.serving import events

SHORT = {"prompt": "once", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
LONG = {**SHORT, "max_tokens": 30_000, "stream": True}  # outlasts every test that does not wait for it
CONTEXT = 32_768  # of a model that takes it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    save_folder("llama", path, max_position_embeddings=CONTEXT)
    return path


@contextmanager
def two_frontends(folder: Path, *more: str) -> Iterator[Server]:
    flags = ["--frontends", "2", "--max-num-seqs", "4", "--kv-cache-memory", "64MiB", "--device", "cpu"]
    with tonle_serve(folder, *flags, *more) as server:
        wait_for(lambda: "is ready" in server.log.read_text(), "it never said that all are ready")
        yield server


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with running_collector() as running:
        yield running


@pytest.fixture(scope="module")
def server(folder: Path, collector: Collector) -> Iterator[Server]:
    with two_frontends(folder, "--otlp-endpoint", collector.url) as running:
        yield running


def wait_for(condition: Callable[[], bool], what: str) -> None:
    for _ in range(1200):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError(what)


def client_of(server: Server, pid: int) -> httpx.Client:
    """A client whose one connection leads to this front end."""
    for _ in range(200):  # the kernel decides; each try has an even chance
        client = httpx.Client(base_url=server.url, timeout=60)
        reply = client.get("/health/live")
        port = reply.extensions["network_stream"].get_extra_info("client_addr")[1]
        if any(line.raddr and line.raddr.port == port for line in psutil.Process(pid).net_connections()):
            return client
        client.close()
    raise AssertionError(f"no connection leads to process {pid}")


@contextmanager
def one_for_each(server: Server) -> Iterator[list[httpx.Client]]:
    with ExitStack() as stack:
        yield [stack.enter_context(closing(client_of(server, pid))) for pid in server.frontend_pids()]


@pytest.fixture
def clients(server: Server) -> Iterator[list[httpx.Client]]:
    """One for each front end; for one request at a time, or it opens a connection to who knows whom."""
    with one_for_each(server) as found:
        yield found


def begin(client: httpx.Client, stack: ExitStack, **fields: int) -> Iterator[str]:
    """A long stream, of which the first chunk has come. It ends when it is no longer held."""
    reply = stack.enter_context(client.stream("POST", "/v1/completions", json={**LONG, **fields}))
    assert reply.status_code == 200
    pieces = reply.iter_text()
    next(pieces)
    return pieces


def count(client: httpx.Client, name: str, **labels: str) -> float:
    families = text_string_to_metric_families(client.get("/metrics").text)
    found = [s for family in families for s in family.samples if s.name == name and labels.items() <= s.labels.items()]
    return sum(sample.value for sample in found)


def test_both_answer_alike_and_know_the_whole(server: Server, clients: list[httpx.Client]) -> None:
    finished = count(clients[0], "vllm:request_success_total", finished_reason="length")
    for client in clients:
        assert client.post("/v1/completions", json=SHORT).json()["usage"]["completion_tokens"] == 8
        with client.stream("POST", "/v1/completions", json={**SHORT, "stream": True}) as reply:
            *_, last, done = events(reply.read().decode())
        assert last["choices"][0]["finish_reason"] == "length" and done == "[DONE]"
    for client in clients:
        assert count(client, "vllm:request_success_total", finished_reason="length") == finished + 4
        assert count(client, "vllm:time_to_first_token_seconds_count") >= finished + 4
    assert len({client.get("/v1/models").text for client in clients}) == 1
    ages = [client.get("/health").json()["uptime_s"] for client in clients]
    assert ages[0] <= ages[1], "of the server, not of the process that answers"


def test_each_traces_its_own_requests(clients: list[httpx.Client], collector: Collector) -> None:
    for client, trace_id in zip(clients, ("a" * 32, "b" * 32), strict=True):
        headers = {"traceparent": f"00-{trace_id}-{'1' * 16}-01"}
        assert client.post("/v1/completions", json=SHORT, headers=headers).status_code == 200
    for trace_id in ("a" * 32, "b" * 32):
        collector.wait(lambda of=trace_id: len(collector.trace(of)) == 4, "a front end does not trace")  # type: ignore[misc]
        names = [span.name for span in sorted(collector.trace(trace_id), key=lambda span: span.start_ns)]
        assert names == ["POST /v1/completions", "queue", "prefill", "decode"]


def test_both_see_what_runs_and_hanging_up_frees_it(server: Server, clients: list[httpx.Client]) -> None:
    def healths() -> list[dict[str, float]]:
        return [watcher.get("/health").json() for watcher in watchers]

    for caller in clients:
        with one_for_each(server) as watchers:
            with ExitStack() as stack:
                held = begin(caller, stack)
                wait_for(lambda: [health["running"] for health in healths()] == [1, 1], "it is not seen")
                assert min(health["kv_usage"] for health in healths()) > 0
                assert next(held)
            wait_for(lambda: [health["running"] for health in healths()] == [0, 0], "it still runs")
            assert [health["kv_usage"] for health in healths()] == [0, 0]


def test_a_front_end_that_dies_takes_only_its_own_requests_with_it(server: Server, clients: list[httpx.Client]) -> None:
    before = server.frontend_pids()
    victim, other = clients
    finished = count(other, "vllm:request_success_total", finished_reason="length")
    with ExitStack() as stack:
        lost, kept = begin(victim, stack), begin(other, stack)
        os.kill(before[0], signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            list(lost)
        assert next(kept), "the other stream goes on"
        with closing(client_of(server, before[1])) as watcher:
            wait_for(lambda: watcher.get("/health").json()["running"] == 1, "its request still runs")
        assert next(kept)
    wait_for(lambda: len(server.frontend_pids()) == 2, "it did not come back")
    (successor,) = set(server.frontend_pids()) - set(before)
    with closing(client_of(server, successor)) as client:
        wait_for(lambda: client.get("/health/ready").status_code == 200, "it does not reach the engine")
        assert client.post("/v1/completions", json=SHORT).status_code == 200
        total = count(client, "vllm:request_success_total", finished_reason="length")
        assert total == finished + 1, "what the dead one counted stays"


def test_an_engine_that_dies_fails_the_requests_of_both_and_comes_back(
    server: Server, clients: list[httpx.Client]
) -> None:
    first = server.engine_pid()
    whole = {**LONG, "stream": False}
    with ThreadPoolExecutor() as pool, ExitStack() as stack:
        streams = [begin(client, stack) for client in clients]
        waiting = [pool.submit(httpx.post, f"{server.url}/v1/completions", json=whole, timeout=60) for _ in range(2)]
        wait_for(lambda: httpx.get(f"{server.url}/health", timeout=60).json()["running"] == 4, "they never ran")
        os.kill(first, signal.SIGKILL)
        assert [future.result(60).status_code for future in waiting] == [500, 500]
        for stream in streams:
            assert "the engine stopped" in "".join(stream)
    for client in clients:
        wait_for(lambda client=client: client.get("/health/ready").status_code == 200, "no engine")  # type: ignore[misc]
        assert client.post("/v1/completions", json=SHORT).status_code == 200
    assert server.engine_pid() != first


def test_sigterm_lets_both_finish(folder: Path) -> None:
    with two_frontends(folder) as server, one_for_each(server) as clients, ExitStack() as stack:
        streams = [begin(client, stack, max_tokens=2000) for client in clients]
        server.process.send_signal(signal.SIGTERM)
        for stream in streams:
            assert "".join(stream).endswith("data: [DONE]\n\n")
        assert server.process.wait(60) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")
        assert "Traceback" not in server.log.read_text()


def test_a_model_that_cannot_be_loaded_ends_it(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(AssertionError, match=r"Error: .*model\.safetensors"), two_frontends(tmp_path):
        pass


def test_nothing_outlives_the_parent(server: Server) -> None:
    """Last in this file: it takes the others' server with it."""
    children = [psutil.Process(pid) for pid in (server.engine_pid(), *server.frontend_pids())]
    server.process.kill()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
