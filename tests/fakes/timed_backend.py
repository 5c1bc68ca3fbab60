"""An OpenAI-compatible server in a process of its own, as slow and as faulty as it is told, and the command that restarts it.

`python -m tests.fakes.timed_backend serve FILE` runs what FILE says. `... restart FILE [--ttft-ms N] [--fail-share X]` ends the
one that runs, waits for its end, and starts another on the same port, as `systemctl restart` would.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

MODEL, WORDS = "m", 4
HANG_S = 3.0
_WAIT_S = 120.0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    settings: dict[str, Any]
    num_asked = 0

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._whole(200, {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "vllm"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        Handler.num_asked += 1
        if "hang" in json.dumps(body["messages"]):
            time.sleep(HANG_S)
        share = self.settings["fail_share"]
        if int(Handler.num_asked * share) > int((Handler.num_asked - 1) * share):
            self._whole(500, {"error": {"message": "faulty on purpose", "type": "server_error"}})
            return
        time.sleep(self.settings["ttft_ms"] / 1000)
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        with contextlib.suppress(OSError):
            for number in range(WORDS):
                self._event({"index": 0, "delta": {"content": f"{number} "}, "finish_reason": None})
                time.sleep(0.005)
            self._event({"index": 0, "delta": {}, "finish_reason": "stop"})
            self._chunk(b"data: [DONE]\n\n")
            self.wfile.write(b"0\r\n\r\n")
            return
        self.close_connection = True

    def _event(self, choice: dict[str, Any]) -> None:
        chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": [choice]}
        self._chunk(b"data: %b\n\n" % json.dumps(chunk).encode())

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _whole(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512
    allow_reuse_address = True


def serve(file: Path) -> None:
    """Until SIGTERM, after which what runs is finished."""
    Handler.settings = json.loads(file.read_text())
    server = Server(("127.0.0.1", Handler.settings["port"]), Handler)
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    file.with_suffix(".pid").write_text(str(os.getpid()))
    server.serve_forever(poll_interval=0.02)


def start(file: Path, port: int, *, ttft_ms: float = 5.0, fail_share: float = 0.0) -> None:
    """Returns when it runs."""
    pid_file = file.with_suffix(".pid")
    pid_file.unlink(missing_ok=True)
    file.write_text(json.dumps({"port": port, "ttft_ms": ttft_ms, "fail_share": fail_share}))
    command = [sys.executable, "-m", "tests.fakes.timed_backend", "serve", str(file)]
    nowhere = subprocess.DEVNULL
    subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True)
    _until(lambda: pid_file.exists() and pid_file.read_text() != "")


def stop(file: Path) -> None:
    """Returns when it is gone."""
    pid_file = file.with_suffix(".pid")
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, ValueError):
        pid = int(pid_file.read_text())
        os.kill(pid, signal.SIGTERM)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)  # if it is ours
        _until(lambda: not Path(f"/proc/{pid}").exists() or _is_zombie(pid))


def _is_zombie(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def _until(condition: Any) -> None:
    ends_s = time.monotonic() + _WAIT_S
    while not condition():
        if time.monotonic() > ends_s:
            raise AssertionError("the backend did not do in time what it was told")
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=("serve", "restart"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--ttft-ms", type=float, default=5.0)
    parser.add_argument("--fail-share", type=float, default=0.0)
    given = parser.parse_args()
    if given.verb == "serve":
        serve(given.file)
        return
    port = json.loads(given.file.read_text())["port"]
    stop(given.file)
    start(given.file, port, ttft_ms=given.ttft_ms, fail_share=given.fail_share)


if __name__ == "__main__":
    main()
