"""`ServerProcess`: starts, says why one did not start, stops, and leaves nothing behind."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tonle.bench.server_process import ServerProcess, free_port
from tonle.errors import ConfigError

# A server with a child of its own, whose process id it prints; 503 to the first two questions.
SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen(["sleep", "600"])
print("child", child.pid, flush=True)
class Answers(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Answers.asked += 1
        print(self.path, self.headers.get("authorization"), flush=True)
        self.send_response(200 if Answers.asked > 2 else 503)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever()
"""


def start(log: Path, script: str = SERVER, **options: object) -> ServerProcess:
    port = free_port()
    return ServerProcess([sys.executable, "-c", script, str(port)], port=port, log=log, **options)  # type: ignore[arg-type]


def child_pid(log: Path) -> int:
    return int(log.read_text().split("child ")[1].split()[0])


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(true: Callable[[], bool]) -> None:
    for _ in range(2400):
        if true():
            return
        time.sleep(0.05)
    raise AssertionError("it never came true")


def test_waits_until_the_server_is_ready_and_stops_it_with_its_children(tmp_path: Path) -> None:
    log, seen = tmp_path / "new" / "log", []
    with start(log, ready_path="/health", api_key="sk-1", on_progress=lambda s, line: seen.append((s, line))) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
        connection.request("GET", "/more")
        assert connection.getresponse().status == 200
        assert server.url == f"http://127.0.0.1:{server.port}"
        assert server.is_running
        assert "/health Bearer sk-1" in log.read_text()
        assert os.getpgid(server.pid) == server.pid != os.getpgid(0)
        child = child_pid(log)
    assert not server.is_running
    assert seen
    assert seen[-1][0] >= seen[0][0]
    wait_until(lambda: not is_alive(child))
    server.stop()


def test_a_server_that_ends_is_an_error_with_its_last_lines(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"(?s)exit code 3.*no such model: x"),
        start(tmp_path / "log", "import sys; print('no such model: x'); sys.exit(3)"),
    ):
        raise AssertionError("it cannot be ready")


def test_a_server_that_never_answers_is_stopped_after_its_time(tmp_path: Path) -> None:
    server = start(tmp_path / "log", "import time; time.sleep(600)", ready_s=0.3)
    with pytest.raises(ConfigError, match=r"not ready after 0.3 s; it printed nothing"), server:
        raise AssertionError("it cannot be ready")
    assert not server.is_running


def test_a_command_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot run no-such-program: No such file"):
        ServerProcess(["no-such-program"], port=free_port(), log=tmp_path / "log")


def test_a_server_does_not_outlive_the_process_that_started_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    parent = f"""
import sys, time
from pathlib import Path
from tonle.bench.server_process import ServerProcess, free_port
port = free_port()
server = ServerProcess([sys.executable, "-c", {SERVER!r}, str(port)], port=port, log=Path({str(log)!r}))
server.wait_ready()
print(server.pid, flush=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    child = child_pid(log)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    wait_until(lambda: not is_alive(pid) and not is_alive(child))
