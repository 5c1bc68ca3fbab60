"""`tonle gateway` and `tonle serve` as users run them: settings, signals, death and what is on record afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.checkpoints import save_folder
from tests.fakes.server import tonle_serve
from tests.gateway.running_gateway import CHAT, read_records

BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
AUTH = {"authorization": "Bearer secret"}


class Slow(BaseHTTPRequestHandler):
    """Streams a word, then waits until the test lets it go on."""

    protocol_version = "HTTP/1.1"
    go_on = threading.Event()

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._send(json.dumps({"data": [{"id": "m"}]}).encode(), "application/json")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        self._word("one")
        self.go_on.wait(120)
        with contextlib.suppress(OSError):
            self._word(" two")
            self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _word(self, word: str) -> None:
        chunk = {"id": "c", "choices": [{"index": 0, "delta": {"content": word}}]}
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())

    def _send(self, body: bytes, content_type: str) -> None:
        self.send_response(200)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def slow() -> Iterator[str]:
    Slow.go_on.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    Slow.go_on.set()
    server.shutdown()
    server.server_close()


@contextlib.contextmanager
def gateway(
    folder: Path, backend: str, *flags: str, open_files: int = 0
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A gateway configured by a file, in a process of its own. `open_files`: the most it may have."""
    settings = folder / "tonle.yaml"
    settings.write_text(
        f"port: 0\napi_key: [secret]\naudit_dir: {folder}/audit\nstate_db: {folder}/state.db\n"
        f"backends:\n  - url: {backend}\n    name: slow\n"
    )
    log = folder / f"log-{time.monotonic_ns()}"
    with log.open("wb") as output:
        limited = ["prlimit", f"--nofile={open_files}"] if open_files else []
        process = subprocess.Popen([*limited, sys.executable, "-m", "tonle", "gateway", "--config", str(settings), *flags],
                                   stdout=output, stderr=subprocess.STDOUT)  # fmt: skip
    try:
        for _ in range(2400):
            if found := re.search(r"http://127\.0\.0\.1:\d+(?=/v1)", log.read_text()):
                yield process, found.group()
                return
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        raise AssertionError(log.read_text())
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def verify(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "tonle", "audit", "verify", str(folder / "audit")],
                          capture_output=True, text=True, timeout=60, check=False)  # fmt: skip


def test_sigterm_lets_streams_finish(tmp_path: Path, slow: str) -> None:
    with gateway(tmp_path, slow) as (process, url):
        with httpx.stream("POST", url + CHAT, json=BODY, headers=AUTH, timeout=120) as reply:
            pieces = reply.iter_text()
            assert "one" in next(pieces)
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
            Slow.go_on.set()
            assert "[DONE]" in "".join(pieces)
        assert process.wait(120) == 0
    (record,) = read_records(tmp_path / "audit")
    assert (record["status"], record["output"]) == ("ok", "one two")
    assert verify(tmp_path).returncode == 0


def test_sigterm_cuts_off_what_takes_too_long(tmp_path: Path, slow: str) -> None:
    with gateway(tmp_path, slow, "--drain", "200ms") as (process, url):
        with httpx.stream("POST", url + CHAT, json=BODY, headers=AUTH, timeout=120) as reply:
            pieces = reply.iter_text()
            assert "one" in next(pieces)
            process.send_signal(signal.SIGTERM)
            assert "shutting down" in "".join(pieces)
        assert process.wait(120) == 0
    (record,) = read_records(tmp_path / "audit")
    assert (record["status"], record["output"]) == ("interrupted", "one")
    assert verify(tmp_path).returncode == 0


def test_a_killed_gateway_leaves_a_trail_that_verifies(tmp_path: Path, slow: str) -> None:
    with gateway(tmp_path, slow) as (process, url):
        refused = httpx.post(url + CHAT, json=BODY)
        assert refused.status_code == 401
        for _ in range(2400):
            if read_records(tmp_path / "audit"):
                break
            time.sleep(0.05)
        with contextlib.suppress(httpx.TransportError), \
                httpx.stream("POST", url + CHAT, json=BODY, headers=AUTH, timeout=120) as reply:  # fmt: skip
            pieces = reply.iter_text()
            assert "one" in next(pieces)
            os.kill(process.pid, signal.SIGKILL)
            assert "[DONE]" not in "".join(pieces)
        process.wait()
    Slow.go_on.set()
    with gateway(tmp_path, slow) as (process, url):
        assert "[DONE]" in httpx.post(url + CHAT, json=BODY, headers=AUTH, timeout=120).text
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    records = read_records(tmp_path / "audit")
    assert [record["status"] for record in records] == ["refused", "interrupted", "ok"]
    assert verify(tmp_path).returncode == 0


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="needs prlimit")
def test_callers_who_take_all_open_files_do_not_end_it(tmp_path: Path, slow: str) -> None:
    """More connections than it may have open files: by its own limit first, then by the kernel's."""
    Slow.go_on.set()
    with gateway(tmp_path, slow, open_files=256) as (process, url), contextlib.ExitStack() as stack:
        host, port = url.removeprefix("http://").split(":")

        def answers() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return httpx.post(url + CHAT, json=BODY, headers=AUTH, timeout=120).text.endswith("data: [DONE]\n\n")
            return False

        assert answers()
        for _ in range(600):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=120))
        assert answers()  # idle ones give way
        num_files = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
        assert num_files < 200
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (num_files, num_files))  # now none is free
        for _ in range(200):
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_connection((host, int(port)), timeout=120))
        assert process.poll() is None
        stack.close()
        for _ in range(2400):
            if answers():
                break
            time.sleep(0.05)
        else:
            raise AssertionError("it does not answer any more")
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    assert {record["status"] for record in read_records(tmp_path / "audit")} == {"ok"}


@pytest.mark.parametrize("half", [False, True], ids=["idle", "half-read"])
def test_sigterm_loses_no_request_of_a_connection_that_was_open(tmp_path: Path, slow: str, *, half: bool) -> None:
    """It was sent before the caller could know. Of many, none is reset."""
    Slow.go_on.set()
    body = json.dumps(BODY).encode()
    head = (f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n").encode()  # fmt: skip
    with gateway(tmp_path, slow) as (process, url), contextlib.ExitStack() as stack:
        host, port = url.removeprefix("http://").split(":")
        callers = [stack.enter_context(socket.create_connection((host, int(port)), timeout=120)) for _ in range(40)]
        for caller in callers:
            caller.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert caller.recv(65536).startswith(b"HTTP/1.1 200")
            caller.sendall(head + body[:-1] if half else b"")
        assert httpx.get(url + "/health/live").status_code == 200  # what came before was read
        process.send_signal(signal.SIGTERM)
        for caller in callers:
            caller.sendall(body[-1:] if half else head + body)
        for caller in callers:
            received = b""
            while piece := caller.recv(65536):
                received += piece
            assert received.startswith(b"HTTP/1.1 200") and b"[DONE]" in received  # and it was closed behind it
        assert process.wait(120) == 0
    assert [record["status"] for record in read_records(tmp_path / "audit")] == ["ok"] * 40


def test_settings_are_checked(tmp_path: Path) -> None:
    def said(text: str, *flags: str, **env: str) -> str:
        (tmp_path / "t.yaml").write_text(text)
        done = subprocess.run([sys.executable, "-m", "tonle", "gateway", "--config", str(tmp_path / "t.yaml"), *flags],
                              capture_output=True, text=True, timeout=60, check=False,
                              env={**os.environ, "TONLE_STATE_DB": str(tmp_path / "db"), **env})  # fmt: skip
        assert done.returncode == 1, done.stderr
        return done.stderr

    assert "did you mean backends?" in said("backend: []")
    assert "did you mean cache_max?" in said("cache_max_bytes: 1MiB")
    lacking = said("backends: [{url: http://x}, {name: two}]")
    assert "backends must be a list of backends, each with at least a url: entry 2 (two) lacks 'url'" in lacking
    assert "entry 1 has kind: 'vlm', which is not one of auto," in said("backends: [{url: http://x, kind: vlm}]")
    assert "unknown field 'weigth'" in said("backends: [{url: http://x, weigth: 3}]")
    assert "there is no backend" in said("port: 0")
    assert "must look like http://" in said("backends: [{url: somewhere}]")
    assert "open to anyone" in said("backends: [{url: http://127.0.0.1:1}]", "--host", "0.0.0.0")
    backend = "backends: [{url: http://127.0.0.1:1}]\n"
    out_of_reach = said(backend, "--cache", "off", TONLE_STATE_DB="postgresql://u:secret@127.0.0.1:1/x")
    assert "cannot use state_db" in out_of_reach and "127.0.0.1:1" in out_of_reach and "secret" not in out_of_reach


def test_keys_made_by_hand(tmp_path: Path, slow: str) -> None:
    def keys(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "tonle", "keys", *words, "--state-db", str(tmp_path / "state.db")],
                              capture_output=True, text=True, timeout=60, check=True)  # fmt: skip

    Slow.go_on.set()
    secret = keys("create", "--name", "alice", "--tokens-per-day", "1000").stdout.strip()
    with gateway(tmp_path, slow) as (_, url):
        headers = {"authorization": f"Bearer {secret}"}
        assert httpx.post(url + CHAT, json=BODY, headers=headers, timeout=120).status_code == 200
        listed = keys("list").stdout
        assert "alice" in listed and "tokens_per_day=1000" in listed and secret not in listed
        (key_id,) = re.findall(r"key-[0-9a-f]{10}", listed)
        keys("revoke", key_id)
        for _ in range(2400):
            if httpx.post(url + CHAT, json=BODY, headers=headers, timeout=120).status_code == 401:
                break
            time.sleep(0.05)
        else:
            raise AssertionError("a revoked key still works")
    assert "revoked" in keys("list").stdout


def test_tonle_serve_has_the_same_door(tmp_path: Path) -> None:
    model = tmp_path / "tiny"
    save_folder("llama", model)
    audit = tmp_path / "audit"
    with tonle_serve(model, "--kv-cache-memory", "64MiB", "--api-key", "secret", "--audit-dir", str(audit)) as server:
        body = {"prompt": "hello", "max_tokens": 5, "temperature": 0, "ignore_eos": True, "use_cache": True}
        assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 401
        whole = httpx.post(f"{server.url}/v1/completions", json=body, headers=AUTH, timeout=60)
        assert whole.status_code == 200 and whole.json()["usage"]["completion_tokens"] == 5
        assert {"x-queue-time", "x-prefill-time", "x-decode-time"} <= set(whole.headers)
        again = httpx.post(f"{server.url}/v1/completions", json=body, headers=AUTH, timeout=60)
        assert again.headers["x-cache"] == "hit" and again.json()["choices"] == whole.json()["choices"]
        stream = httpx.post(f"{server.url}/v1/completions", json=body | {"stream": True}, headers=AUTH, timeout=60)
        assert stream.text.endswith("data: [DONE]\n\n") and '"usage"' not in stream.text
        with httpx.stream("POST", f"{server.url}/v1/completions", headers=AUTH, timeout=60,
                          json=body | {"stream": True, "max_tokens": 900}) as reply:  # fmt: skip
            next(reply.iter_bytes())
        for _ in range(2400):
            health = httpx.get(f"{server.url}/health").json()
            if health["running"] == 0:
                break
            time.sleep(0.05)
        assert health["running"] == 0
        assert health["meets_sla"] is (
            health["latency_s"]["p95"] <= health["sla_target_p95_s"]
        )  # whatever this machine does
        assert httpx.get(f"{server.url}/v1/models", headers=AUTH).json()["data"][0]["max_model_len"] > 0
        metrics = httpx.get(f"{server.url}/metrics", headers=AUTH).text
        assert "vllm:num_requests_running" in metrics and "tonle:cache_hits_total" in metrics
        assert httpx.get(f"{server.url}/metrics").status_code == 401
        assert httpx.get(f"{server.url}/docs").status_code == 200
    statuses = [record["status"] for record in read_records(audit)]
    assert statuses == ["refused", "ok", "cached", "ok", "cancelled"]
