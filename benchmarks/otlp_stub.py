"""A collector that takes what it is sent over OTLP/HTTP and throws it away.

    python -m benchmarks.otlp_stub PORT

GET anything: how much came, `{"posts": …, "bytes": …}`.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    num_posts = num_bytes = 0

    def do_POST(self) -> None:
        size = int(self.headers["content-length"])
        self.rfile.read(size)
        Handler.num_posts += 1
        Handler.num_bytes += size
        self._reply(b"")

    def do_GET(self) -> None:
        self._reply(json.dumps({"posts": self.num_posts, "bytes": self.num_bytes}).encode())

    def _reply(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
