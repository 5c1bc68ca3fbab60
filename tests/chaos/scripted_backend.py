"""A backend that sends what no healthy one does: `python -m tests.chaos.scripted_backend --port N`.

model one-event    a stream that is one event of 48 MiB
model endless      a stream of 32 MiB in events of 4 KiB, as fast as it is read
"""

from __future__ import annotations

import contextlib
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODELS = ("one-event", "endless")
ONE_EVENT_BYTES, ENDLESS_BYTES, PIECE_BYTES = 48 * 1024**2, 32 * 1024**2, 4096


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        body = json.dumps({"object": "list", "data": [{"id": name, "object": "model"} for name in MODELS]}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        model = json.loads(self.rfile.read(int(self.headers["content-length"])))["model"]
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        with contextlib.suppress(OSError):
            self._one_event() if model == "one-event" else self._endless()
            self._chunk(b"data: [DONE]\n\n")
            self.wfile.write(b"0\r\n\r\n")
            return
        self.close_connection = True

    def _one_event(self) -> None:
        before, after = _event("\0").split(b"\\u0000")
        self._chunk(before)
        for _ in range(ONE_EVENT_BYTES // 65536):
            self._chunk(b"x" * 65536)
        self._chunk(after)

    def _endless(self) -> None:
        event = _event("x" * PIECE_BYTES)
        for _ in range(ENDLESS_BYTES // PIECE_BYTES):
            self._chunk(event)

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))


def _event(text: str) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return b"data: %b\n\n" % json.dumps(chunk).encode()


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512


if __name__ == "__main__":
    Server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
