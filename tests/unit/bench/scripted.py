"""A loopback server that follows a script: known tokens, known pauses, known misbehaviour. Asyncio in a thread."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Asked:
    """One request as the server saw it."""

    number: int  # how many completions were asked for before this
    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]  # of JSON
    raw: bytes = b""


class Cut:
    """Script step: drop the connection here."""


Step = bytes | float | Cut  # send, pause (seconds), drop
Script = Iterable[Step]


@dataclass
class Behaviour:
    """What the server does unless `script` says otherwise for a request."""

    models: list[str] | None = field(default_factory=lambda: ["scripted"])  # None: no /v1/models
    tokenize: str | None = "prompt"  # the field /tokenize reads; None: no /tokenize
    takes_ids: bool = True
    usage: bool = True
    cached_tokens: int | None = 0
    words_overhead: int = 0  # added to a text prompt's count
    tokens_per_word: float = 1.0
    first_pause_s: float = 0.0
    pause_s: float = 0.0
    tokens_per_chunk: int = 1
    keep_alive: bool = True
    key: str | None = None
    inference: bool = False  # has /api/v1/inference, with a response cache
    script: Callable[[Asked], Script | None] = lambda asked: None
    paths: dict[str, Callable[[Asked], Script]] = field(default_factory=dict)  # that answer something else than text


def frame(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(document: Any) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
STREAM_END = frame(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def text_event(text: str, finish: str | None = None) -> bytes:
    return frame(event({"choices": [{"index": 0, "text": text, "finish_reason": finish}], "usage": None}))


def usage_event(prompt_tokens: int, output_tokens: int, cached_tokens: int | None = None) -> bytes:
    usage: dict[str, Any] = {"prompt_tokens": prompt_tokens, "completion_tokens": output_tokens}
    if cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return frame(event({"choices": [], "usage": usage}))


def json_reply(status: int, document: Any) -> bytes:
    body = json.dumps(document).encode()
    head = f"HTTP/1.1 {status} Whatever\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


class ScriptedServer:
    """Owns the thread, the socket and the record of what was asked."""

    def __init__(self, behaviour: Behaviour, tls: ssl.SSLContext | None = None) -> None:
        self.behaviour = behaviour
        self.asked: list[Asked] = []
        self._cached: set[str] = set()
        self.num_connections = 0
        self.port = 0
        self.scheme = "https" if tls else "http"
        self._tls = tls
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    @property
    def completions(self) -> list[Asked]:
        return [asked for asked in self.asked if asked.path.endswith(("completions", "inference"))]

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(120)

    def stop(self) -> None:
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(120)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopped = asyncio.Event()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stopped.wait()
        server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; False: the connection is over."""
        head, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines) if name}
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
        method, path, _ = head.split(" ")
        is_json = bool(raw) and "json" in headers.get("content-type", "json")
        asked = Asked(len(self.completions), method, path, headers, json.loads(raw) if is_json else {}, raw)
        self.asked.append(asked)
        for step in self._script(asked):
            if isinstance(step, bytes):
                writer.write(step)
                await writer.drain()
            elif isinstance(step, Cut):
                return False
            else:
                await asyncio.sleep(step)
        return self.behaviour.keep_alive

    def _script(self, asked: Asked) -> Script:
        behaviour = self.behaviour
        if behaviour.key is not None and asked.headers.get("authorization") != f"Bearer {behaviour.key}":
            return [json_reply(401, {"error": {"message": "no such key"}})]
        if asked.path.endswith("/api/v1/inference") and behaviour.inference:
            return behaviour.script(asked) or self._infer(asked)
        if asked.path.endswith("completions"):
            own = behaviour.script(asked)
            answer = self._stream if asked.body.get("stream") else self._chat
            return answer(asked) if own is None else own
        if asked.path.endswith("/v1/models") and behaviour.models is not None:
            return [json_reply(200, {"object": "list", "data": [{"id": name} for name in behaviour.models]})]
        if asked.path in behaviour.paths:
            return behaviour.paths[asked.path](asked)
        if asked.path.endswith("/tokenize") and behaviour.tokenize is not None:
            words = asked.body.get(behaviour.tokenize, "").split()
            return [json_reply(200, {"tokens": [5000 + sum(map(ord, word)) * 7 + len(word) for word in words]})]
        return [json_reply(404, {"detail": "Not Found"})]

    def _stream(self, asked: Asked) -> Iterator[Step]:
        """The well-behaved answer: exactly max_tokens tokens, all of them words."""
        behaviour = self.behaviour
        if isinstance(asked.body.get("prompt"), list) and not behaviour.takes_ids:
            yield json_reply(400, {"error": {"message": "prompt must be a string"}})
            return
        chat = asked.path.endswith("chat/completions")
        total = asked.body["max_tokens"]
        yield STREAM_HEAD
        if chat:
            yield frame(event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}))
        yield behaviour.first_pause_s
        for begin in range(0, total, behaviour.tokens_per_chunk):
            if begin:
                yield behaviour.pause_s
            text = " word" * min(behaviour.tokens_per_chunk, total - begin)
            yield frame(event({"choices": [{"index": 0, "delta": {"content": text}}]})) if chat else text_event(text)
        last: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
        yield frame(event({"choices": [{"index": 0, "finish_reason": "length"} | last]}))
        if behaviour.usage:
            yield usage_event(self.count_prompt(asked.body), total, behaviour.cached_tokens)
        yield STREAM_END

    def _chat(self, asked: Asked) -> Iterator[Step]:
        yield self.behaviour.first_pause_s
        message = {"role": "assistant", "content": "a word"}
        yield json_reply(200, {"choices": [{"message": message}], "usage": {"completion_tokens": 2}})

    def _infer(self, asked: Asked) -> Iterator[Step]:
        """Answers a question that it has answered before, with the cache on both times, from the cache."""
        question, use_cache = asked.body["user_input"], asked.body["use_cache"]
        hit = use_cache and question in self._cached
        if use_cache:
            self._cached.add(question)
        yield 0.0 if hit else self.behaviour.first_pause_s
        yield json_reply(200, {"response": "a word", "metadata": {"cache_hit": hit, "completion_tokens": 2}})

    def count_prompt(self, body: dict[str, Any]) -> int:
        prompt = body.get("prompt")
        if isinstance(prompt, list):
            return len(prompt)
        text = prompt if prompt is not None else " ".join(message["content"] for message in body["messages"])
        return self.behaviour.words_overhead + int(len(text.split()) * self.behaviour.tokens_per_word)


@contextmanager
def serving(behaviour: Behaviour | None = None, tls: ssl.SSLContext | None = None) -> Iterator[ScriptedServer]:
    server = ScriptedServer(behaviour or Behaviour(), tls)
    server.start()
    try:
        yield server
    finally:
        server.stop()
