"""What is fuzzed over HTTP: a server of one model, and a gateway in front of a backend, on uvloop; and who asks them.

The server's engine is scripted, its chat template a real one that writes out tool calls and arguments.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import queue
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fakes.front import ByteText, FakeFront
from tests.http.serving import serving
from tonle.config.gateway import GatewayConfig
from tonle.config.routing import BackendConfig
from tonle.edge.exchange import Exchange
from tonle.edge.listening import bind, local_url, run
from tonle.edge.server import HttpServer, ServerLimits
from tonle.engine.text.template import ChatTemplate
from tonle.gateway.apis.error_shapes import is_messages, is_ollama
from tonle.gateway.gateway import Gateway
from tonle.replica.replica import ReplicaOptions

KEY, ADMIN = "fuzz-key", "fuzz-admin"
TIMEOUT_S = 60.0  # beyond this a request counts as hanging
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{{ x | tojson if x is defined else '' }}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class TemplateText(ByteText):
    def __init__(self) -> None:
        self._template = ChatTemplate(_TEMPLATE, special_tokens={})

    def render_chat(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return self._template.render(messages, **options)


@dataclass
class Caller:
    """Sends requests on one connection and judges every reply. `statuses` and `worst_s` are for the table."""

    url: str
    headers: dict[str, str]
    statuses: Counter[int] = field(default_factory=Counter)
    worst_s: float = 0.0
    _connection: http.client.HTTPConnection | None = None

    def send(self, method: str, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        began_s = time.monotonic()
        status, content_type, reply = self._exchange(method, path, body, {**self.headers, **(headers or {})})
        self.worst_s = max(self.worst_s, time.monotonic() - began_s)
        self.statuses[status] += 1
        assert status < 500, (status, reply)
        if method == "HEAD":
            assert not reply
        elif status >= 400:
            _check_error(path, json.loads(reply))
            assert len(reply) < 20_000, "an error repeats too much of what was sent"
        elif content_type.startswith("text/event-stream"):
            events = [event for event in reply.split(b"\n\n") if event and not event.startswith(b":")]
            for event in events:
                data = event.rpartition(b"\n")[2]
                assert data == b"data: [DONE]" or isinstance(json.loads(data.removeprefix(b"data: ")), dict)
            last = b"message_stop" if is_messages(path) else b"data: [DONE]"
            assert last in events[-1] or b'"error"' in events[-1], events[-1]
        elif content_type == "application/x-ndjson":
            *lines, end = reply.split(b"\n")
            assert not end and all(isinstance(json.loads(line), dict) for line in lines)
            assert json.loads(lines[-1]).get("done") is True or "error" in json.loads(lines[-1]), lines[-1]
        elif content_type == "application/json":
            json.loads(reply)

    def _exchange(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, str, bytes]:
        for attempt in range(2):  # a server may close an idle connection at any time
            if self._connection is None:
                self._connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=TIMEOUT_S)
            try:
                self._connection.request(method, path, body, {"Content-Type": "application/json", **headers})
                reply = self._connection.getresponse()
                content = reply.read()
            except (ConnectionError, http.client.RemoteDisconnected):
                self.close()
                if attempt:
                    raise
                continue
            return reply.status, reply.headers.get("content-type") or "", content
        raise AssertionError("unreachable")

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def check_alive(self) -> None:
        assert self._exchange("GET", "/health", b"", self.headers)[0] == 200


def _check_error(path: str, body: dict[str, Any]) -> None:
    """In the shape of the API that the path belongs to."""
    error = body["error"]
    if is_ollama(path):
        assert set(body) == {"error"} and error and isinstance(error, str), body
    elif is_messages(path):
        assert body["type"] == "error" and set(error) == {"type", "message"} and error["message"], body
    else:
        assert set(error) == {"message", "type", "param", "code"} and error["message"], body


@contextlib.contextmanager
def running_server(folder: Path) -> Iterator[Caller]:
    front = FakeFront()
    front.text = TemplateText()
    with serving(front, ReplicaOptions(max_choices=8), audit_dir=str(folder / "audit")) as url:
        caller = Caller(url, {})
        try:
            yield caller
        finally:
            caller.close()


class Backend:
    """Answers every request like an OpenAI-compatible server; one that is not JSON, with 500: the gateway let it through."""

    def __init__(self) -> None:
        self.server = HttpServer(self._handle, ServerLimits())

    async def _handle(self, exchange: Exchange) -> None:
        if exchange.path == "/v1/models":
            exchange.reply(b'{"object":"list","data":[{"id":"m","object":"model","owned_by":"fuzz"}]}')
            return
        try:
            body = json.loads(exchange.body)
        except (ValueError, RecursionError):
            exchange.reply(b'{"error":{"message":"not JSON"}}', status=500)
            return
        if body.get("stream") is True:
            exchange.start(content_type="text/event-stream")
            choice = {"index": 0, "delta": {"content": "hi"}, "text": "hi", "finish_reason": "stop"}
            exchange.write(b"data: %b\n\ndata: [DONE]\n\n" % json.dumps({"id": "1", "choices": [choice]}).encode())
            exchange.end()
            return
        message = {"role": "assistant", "content": "hi"}
        choice = {"index": 0, "message": message, "text": "hi", "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        others = {"count": 1, "data": [{"index": 0, "embedding": [0.5]}]}  # of /tokenize and /v1/embeddings
        exchange.reply(json.dumps({"id": "1", "model": "m", "choices": [choice], "usage": usage, **others}).encode())


@contextlib.contextmanager
def running_gateway(folder: Path) -> Iterator[Caller]:
    started: queue.Queue[tuple[asyncio.AbstractEventLoop, asyncio.Event, str]] = queue.Queue()

    async def main() -> None:
        backend, stop = Backend(), asyncio.Event()
        theirs, ours = bind("127.0.0.1", 0), bind("127.0.0.1", 0)
        await backend.server.start(theirs)
        config = GatewayConfig(
            backends=(BackendConfig(url=local_url(*theirs.getsockname()[:2]), name="b"),), api_key=(KEY,),
            admin_key=(ADMIN,), audit_dir=str(folder / "audit"), state_db=str(folder / "state.db"), drain_s=5.0,
        )  # fmt: skip
        config.validate()
        gateway = Gateway(config)
        await gateway.start(ours)
        started.put((asyncio.get_running_loop(), stop, local_url(*ours.getsockname()[:2])))
        await stop.wait()
        await gateway.stop()
        await backend.server.stop(drain_s=0)

    thread = threading.Thread(target=lambda: run(main()), daemon=True)
    thread.start()
    loop, stop, url = started.get(timeout=60)
    caller = Caller(url, {"Authorization": f"Bearer {ADMIN}"})
    try:
        yield caller
    finally:
        caller.close()
        loop.call_soon_threadsafe(stop.set)
        thread.join(timeout=60)
        assert not thread.is_alive()
