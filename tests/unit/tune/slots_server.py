"""A server of its own kind, for tests of `tonle tune`: `python slots_server.py PORT SLOTS`. It answers SLOTS requests at a time.

Streams as OpenAI's completions do; each answer takes a place for some milliseconds, so that more slots are faster.
"""

from __future__ import annotations

import http.server
import json
import sys
import threading
import time

STEP_S = 0.006  # long beside what an answer takes of a busy machine
places = threading.Semaphore(int(sys.argv[2]))


class Answers(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._send(200 if self.path == "/v1/models" else 404, json.dumps({"data": [{"id": "slots"}]}).encode())

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path != "/v1/completions":
            self._send(404, b"{}")
            return
        count = int(asked.get("max_tokens", 4))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        with places:
            for place in range(count):
                time.sleep(STEP_S)
                last = place == count - 1
                self._event({"choices": [{"index": 0, "text": "a ", "finish_reason": "length" if last else None}]})
        prompt = len(str(asked["prompt"]).split())
        self._event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": count}})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _event(self, content: dict[str, object]) -> None:
        self.wfile.write(b"data: " + json.dumps(content).encode() + b"\n\n")
        self.wfile.flush()

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


if __name__ == "__main__":
    if sys.argv[2] == "5":
        sys.exit("five slots are not supported")
    http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever()
