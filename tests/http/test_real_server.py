"""`tonle serve` as users run it: processes, signals, death and bad manners."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.fakes.checkpoints import save_folder
from tests.fakes.server import Server, tonle_serve
from tests.http.serving import events
from tonle.bench import ScenarioOptions, run_scenarios

JSON = {"content-type": "application/json"}
SHORTER = {"prompt": "once", "max_tokens": 900, "ignore_eos": True, "temperature": 0}
LONG = {**SHORTER, "max_tokens": 30_000}  # compiled kernels make thousands in a second: it is seen to run all the same


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    save_folder("llama", path, max_position_embeddings=32_768)
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with tonle_serve(folder, "--max-num-seqs", "4", "--kv-cache-memory", "64MiB") as running:
        yield running


def raw(body: bytes) -> bytes:
    head = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return b"POST /v1/completions HTTP/1.1\r\n" + head.encode() + body


def idle(server: Server) -> bool:
    health = httpx.get(f"{server.url}/health").json()
    return "vllm:num_requests_running" in httpx.get(f"{server.url}/metrics").text and health["running"] == 0


def wait_for(condition: object, what: str) -> None:
    for _ in range(2400):
        if condition():  # type: ignore[operator]
            return
        time.sleep(0.05)
    raise AssertionError(what)


def test_a_killed_engine_fails_its_requests_at_once_and_comes_back(server: Server) -> None:
    first = server.engine_pid()
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(httpx.post, f"{server.url}/v1/completions", json=LONG, timeout=60) for _ in range(3)]
        wait_for(lambda: httpx.get(f"{server.url}/health").json()["running"] == 3, "they never ran")
        os.kill(first, signal.SIGKILL)
        replies = [future.result(120) for future in waiting]
    assert [reply.status_code for reply in replies] == [500, 500, 500]
    assert "SIGKILL" in replies[0].json()["error"]["message"]
    refused = httpx.post(f"{server.url}/v1/completions", json=LONG)
    assert refused.status_code == 503 and "retry-after" in refused.headers
    assert httpx.get(f"{server.url}/health/live").status_code == 200
    server.wait_ready()
    assert server.engine_pid() != first
    assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "hi"}, timeout=60).status_code == 200


def test_hanging_up_frees_the_work(server: Server) -> None:
    for stream in (True, False):
        body = httpx.Request("POST", f"{server.url}/v1/completions", json={**LONG, "stream": stream})
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(raw(body.content))
            wait_for(lambda: httpx.get(f"{server.url}/health").json()["running"] == 1, "it never ran")
        wait_for(lambda: idle(server), "it still runs")


def test_bad_manners_do_not_disturb_others(server: Server) -> None:
    """Malformed, oversized and hostile requests beside a good one, which gets its answer as if alone."""
    good = {"prompt": "hello", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
    alone = httpx.post(f"{server.url}/v1/completions", json=good, timeout=60).json()["choices"][0]["text"]
    bad: list[tuple[bytes, int]] = [
        (b"{", 400),
        (b"\xff\xfe{}", 400),
        (b"[]", 400),
        (b'{"prompt": 5}', 400),
        (b'{"prompt": "x", "temperature": -1}', 400),
        (b'{"prompt": "x", "max_tokens": 100000}', 400),
        (b'{"prompt": "' + b"x" * 40_000 + b'"}', 400),
        (b'{"prompt": "x", "model": "missing"}', 404),
        (b'{"prompt": [99999999]}', 400),
        (b'{"prompt": "x", "logit_bias": {"a": 1}}', 400),
        (b'{"prompt": "x", "n": 100000}', 400),
    ]
    results: list[str] = []

    def ask() -> None:
        results.append(httpx.post(f"{server.url}/v1/completions", json=good, timeout=60).json()["choices"][0]["text"])

    thread = threading.Thread(target=ask)
    thread.start()
    for content, status in bad:
        reply = httpx.post(f"{server.url}/v1/completions", content=content, headers=JSON, timeout=60)
        assert reply.status_code == status, (content[:60], reply.text)
        error = reply.json()["error"]
        assert error["message"] and set(error) == {"message", "type", "param", "code"}
    huge = httpx.post(f"{server.url}/v1/chat/completions", content=b"x" * 50_000_000, headers=JSON, timeout=60)
    assert huge.status_code == 413
    empty = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": []})
    assert empty.status_code == 400 and "messages" in empty.json()["error"]["message"]
    thread.join(60)
    assert results == [alone]


def test_the_scenarios_of_the_benchmark(server: Server) -> None:
    report = run_scenarios(server.url, ScenarioOptions(requests=5, sla_s=60, output_tokens=8))
    assert report.ok and report.notes == []
    assert [each.cache_hits for each in report.scenarios] == [0, 2, 0]


def test_a_client_that_never_reads_holds_nothing_up(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    body = httpx.Request("POST", "http://x", json={**SHORTER, "stream": True, "n": 2}).content
    with socket.create_connection((host, int(port))) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        sock.sendall(raw(body))
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "hi", "max_tokens": 20}, timeout=60)
        assert answer.status_code == 200
        wait_for(lambda: idle(server), "its tokens were never finished")


def test_sigterm_lets_running_requests_finish(folder: Path) -> None:
    body = {**SHORTER, "max_tokens": 2000, "stream": True, "stream_options": {"include_usage": True}}
    with tonle_serve(folder, "--kv-cache-memory", "64MiB") as server:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as reply:
            pieces = reply.iter_text()
            text = next(pieces)
            server.process.send_signal(signal.SIGTERM)
            *_, last, done = events(text + "".join(pieces))
        assert done == "[DONE]" and last["usage"]["completion_tokens"] == 2000
        assert server.process.wait(120) == 0


def test_a_broken_model_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\0" * 20)
    with pytest.raises(AssertionError, match=r"broken\.gguf"), tonle_serve(broken):
        pass


@pytest.mark.model
def test_the_default_model_answers_the_question_of_the_readme(default_server: Server) -> None:
    """Whose tokens are clear choices: rounding of activations (docs/quantization.md) may turn one that is nearly a tie."""
    url = f"{default_server.url}/v1/chat/completions"
    question = {"messages": [{"role": "user", "content": "What is the capital of Cambodia?"}], "temperature": 0}
    reply = httpx.post(url, json=question, timeout=120).json()
    assert reply["choices"][0]["message"]["content"] == "The capital of Cambodia is Phnom Penh."
    with httpx.stream("POST", url, json={**question, "stream": True}, timeout=120) as s:
        assert s.read().decode().rstrip().endswith("data: [DONE]")
