"""`tonle rollout` against a real gateway and real backends, each a process of its own, under load: no request fails."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes import timed_backend
from tests.fakes.server import tonle_gateway
from tonle.bench.server_process import free_port

ADMIN = "admin-for-tests"
NAMES = ("a", "b", "c")
DEFAULTS = {"ttft_ms": 5.0, "fail_share": 0.0}


class Load:
    """Callers in a closed loop, each a stream after the other; what did not end well is kept."""

    def __init__(self, url: str, num_callers: int = 4) -> None:
        self.failures: list[str] = []
        self.num_answered = 0
        self._port = int(url.rpartition(":")[2])
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(num_callers)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(120)

    def _run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        while not self._stopping.is_set():
            status, text = ask(connection, "hello")
            if status == 200 and text.rstrip().endswith("[DONE]"):
                self.num_answered += 1  # more or less: it is only compared with 0
            else:
                self.failures.append(f"{status}: {text[-300:]}")


def ask(connection: http.client.HTTPConnection, words: str) -> tuple[int, str]:
    body = {"model": timed_backend.MODEL, "stream": True, "messages": [{"role": "user", "content": words}]}
    headers = {"content-type": "application/json", "authorization": f"Bearer {ADMIN}"}
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        reply = connection.getresponse()
        return reply.status, reply.read().decode()
    except (OSError, http.client.HTTPException) as error:
        connection.close()
        return 0, f"{type(error).__name__}: {error}"


class Stack:
    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder

    def backends(self) -> dict[str, dict[str, Any]]:
        reply = httpx.get(f"{self.url}/admin/backends", headers={"authorization": f"Bearer {ADMIN}"})
        return {each["name"]: each for each in reply.json()["backends"] if not each["leaving"]}

    def post(self, path: str) -> None:
        headers = {"authorization": f"Bearer {ADMIN}"}
        httpx.post(f"{self.url}/admin/backends/{path}", headers=headers).raise_for_status()

    def file(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def pids(self) -> dict[str, str]:
        return {name: self.file(name).with_suffix(".pid").read_text() for name in NAMES}

    def restart(self, *flags: str) -> str:
        """The command for `--restart`."""
        command = [sys.executable, "-m", "tests.fakes.timed_backend", "restart", str(self.folder)]
        return f"{shlex.join(command)}/{{name}}.json {shlex.join(flags)}"

    def rollout(self, *flags: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tonle", "rollout", "--gateway", self.url, *flags]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "TONLE_ADMIN_KEY": ADMIN}
        )  # fmt: skip


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    rows, tmp_path = [], tmp_path_factory.mktemp("rollout")
    with contextlib.ExitStack() as ending:
        for name in NAMES:
            port, file = free_port(), tmp_path / f"{name}.json"
            ending.callback(timed_backend.stop, file)
            timed_backend.start(file, port)
            rows.append({"name": name, "url": f"http://127.0.0.1:{port}"})
        settings = tmp_path / "gateway.yaml"
        settings.write_text(json.dumps({
            "backends": rows, "admin_key": [ADMIN], "state_db": str(tmp_path / "state.db"), "history_db": "memory",
        }))  # fmt: skip
        gateway = ending.enter_context(tonle_gateway("--config", str(settings)))
        yield Stack(gateway.url, tmp_path)


@pytest.fixture
def stack(started: Stack) -> Stack:
    """As it was at first, whatever an earlier test has left."""
    for name, backend in started.backends().items():
        if backend["draining"]:
            started.post(f"{name}/resume")
        if json.loads(started.file(name).read_text()) != {**DEFAULTS, "port": int(backend["url"].rpartition(":")[2])}:
            subprocess.run(started.restart().format(name=name), shell=True, check=True)
            started.post(f"{name}/probe")
    until(lambda: all(each["available"] for each in started.backends().values()))
    return started


def finish(process: subprocess.Popen[str], code: int) -> str:
    said, _ = process.communicate(timeout=240)
    assert process.returncode == code, said
    return said


def until(condition: Callable[[], object]) -> None:
    for _ in range(12_000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come to pass")


def test_all_are_restarted_and_no_request_fails(stack: Stack) -> None:
    before = stack.pids()
    with Load(stack.url) as load:
        said = finish(stack.rollout("--restart", stack.restart()), 0)
    assert load.failures == [] and load.num_answered > 20
    assert all(stack.pids()[name] != before[name] for name in NAMES), said
    assert all(each["available"] and not each["draining"] for each in stack.backends().values())
    assert "3 replicas replaced" in said


def test_a_canary_that_fails_is_drained_and_nobody_notices(stack: Stack) -> None:
    before = stack.pids()
    flags = ("--canary", "30%", "--watch", "30s", "--warm-up", "0s")
    with Load(stack.url) as load:
        said = finish(stack.rollout("--restart", stack.restart("--fail-share", "0.5"), *flags), 3)
    assert load.failures == []
    assert "rolled back: a was worse than the others" in said
    assert "requests failed" in said
    found = stack.backends()
    assert found["a"]["draining"] and not found["b"]["draining"] and not found["c"]["draining"]
    assert [name for name in NAMES if stack.pids()[name] != before[name]] == ["a"]


def test_a_slow_canary_is_brought_back_by_its_command(stack: Stack) -> None:
    flags = ("--canary", "30%", "--watch", "30s", "--warm-up", "0s", "--rollback", stack.restart())
    with Load(stack.url) as load:
        said = finish(stack.rollout("--restart", stack.restart("--ttft-ms", "60"), *flags), 3)
    assert load.failures == []
    assert "time to first token" in said
    found = stack.backends()
    assert all(each["available"] and not each["draining"] and each["share"] is None for each in found.values())
    assert json.loads(stack.file("a").read_text())["ttft_ms"] == 5


def test_ctrl_c_leaves_nothing_drained(stack: Stack) -> None:
    port = int(stack.url.rpartition(":")[2])
    hanging = threading.Thread(target=ask, args=(http.client.HTTPConnection("127.0.0.1", port, timeout=120), "hang"))
    hanging.start()
    until(lambda: any(each["running"] for each in stack.backends().values()))
    busy = next(name for name, each in stack.backends().items() if each["running"])
    process = stack.rollout("--restart", stack.restart(), "--only", busy)
    until(lambda: stack.backends()[busy]["draining"])
    process.send_signal(signal.SIGINT)
    finish(process, 130)
    assert not stack.backends()[busy]["draining"]
    process = stack.rollout("--restart", "sleep 60", "--only", busy)
    until(lambda: stack.backends()[busy]["draining"])
    process.send_signal(signal.SIGTERM)
    assert "Traceback" not in finish(process, 143)
    assert not stack.backends()[busy]["draining"]
    hanging.join(120)


def test_what_would_fail_requests_is_refused(stack: Stack) -> None:
    for name in ("b", "c"):
        stack.post(f"{name}/drain")
    said = finish(stack.rollout("--restart", stack.restart()), 1)
    assert "without a, requests would fail" in " ".join(said.split())
    assert "b: is left out" in said
    assert not stack.backends()["a"]["draining"]
    assert "there is no backend 'x'" in finish(stack.rollout("--restart", "true", "--only", "x"), 1)
    assert "only {name} and {url} can be filled in" in finish(
        stack.rollout("--restart", "echo {pod}", "--only", "a"), 1
    )


def test_a_good_canary_takes_the_place_of_the_old_one(stack: Stack) -> None:
    """The last test of this file: afterwards there is no backend b."""
    port, file = free_port(), stack.file("new")
    timed_backend.start(file, port)
    try:
        flags = ("--canary", "30%", "--watch", "3s", "--warm-up", "0.2s", "--max-slowdown", "100%")
        with Load(stack.url) as load:
            said = finish(stack.rollout("--replace", f"b=http://127.0.0.1:{port}", *flags), 0)
            assert "is as good as the others" in said
            until(lambda: set(stack.backends()) == {"a", "c", f"127.0.0.1:{port}"})
        assert load.failures == []
        assert stack.backends()[f"127.0.0.1:{port}"]["share"] is None
    finally:
        timed_backend.stop(file)
