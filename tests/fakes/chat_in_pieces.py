"""`ChatInPieces`: a server of chat completions that streams the bytes which a test hands it, when it does.

Does: list one model, send each piece at once and alone, so that a piece may end inside a letter. Does not: know what it sends;
`chunk` makes an event.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "pieces"
DONE = b"data: [DONE]\n\n"


class ChatInPieces(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.pieces: queue.Queue[bytes | None] = queue.Queue()  # None ends the answer

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ChatInPieces

    def do_GET(self) -> None:
        is_list = self.path == "/v1/models"
        body = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}] if is_list else []}).encode()
        self.send_response(200 if is_list else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while (piece := self.server.pieces.get()) is not None:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *args: Any) -> None:
        pass


def chunk(content: str, finish_reason: str | None = None) -> bytes:
    """An event, its letters as UTF-8."""
    choice = {"index": 0, "delta": {"content": content} if content else {}, "finish_reason": finish_reason}
    body = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": [choice]}
    return b"data: %b\n\n" % json.dumps(body, ensure_ascii=False).encode()


@contextmanager
def chat_in_pieces() -> Iterator[ChatInPieces]:
    with ChatInPieces() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.pieces.put(None)  # for an answer that a failed test left open
        server.shutdown()
        thread.join()
