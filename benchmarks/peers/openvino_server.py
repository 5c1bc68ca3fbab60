"""OpenVINO GenAI behind the few lines of HTTP that the benchmark needs: /health, /v1/models, /v1/completions.

    python openvino_server.py FOLDER --port 8000

Does: tokenize, stream one event per token, detokenize; greedy only. The pipeline works in a process of its own
(`openvino_pipeline.py`), so that neither ever waits for the other's Python; one message per step passes between them.
Does not: sample, chat, cancel. Runs in OpenVINO's environment: uvicorn on uvloop and httptools, which Tonle's server uses, too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
from collections.abc import AsyncIterator, Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvicorn
from openvino_pipeline import NewRequest, NewTokens, run_pipeline
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]

JOIN_TIMEOUT_S = 10.0


class Engine:
    """Owns the pipeline's process, and hands every token it sends to the request that waits for it."""

    def __init__(self, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._mail: Connection
        self._mail, far_end = context.Pipe()
        self._process = context.Process(target=run_pipeline, args=(str(folder), far_end), daemon=True)
        self._process.start()
        far_end.close()
        self._queues: dict[int, asyncio.Queue[NewTokens | None]] = {}
        self._ids = itertools.count()
        self.ready = False

    def listen(self) -> None:
        """Start taking mail; called once, on the event loop."""
        asyncio.get_running_loop().add_reader(self._mail.fileno(), self._take_mail)

    async def generate(self, prompt_ids: list[int], max_tokens: int, *, ignore_eos: bool) -> AsyncIterator[NewTokens]:
        request_id = next(self._ids)
        queue = self._queues[request_id] = asyncio.Queue()
        self._mail.send(NewRequest(request_id, prompt_ids, max_tokens, ignore_eos))
        try:
            while True:
                news = await queue.get()
                if news is None:
                    raise RuntimeError("the pipeline's process has ended")
                yield news
                if news.finish_reason is not None:
                    return
        finally:
            del self._queues[request_id]

    def stop(self) -> None:
        asyncio.get_running_loop().remove_reader(self._mail.fileno())
        with contextlib.suppress(BrokenPipeError):
            self._mail.send(None)
        self._process.join(JOIN_TIMEOUT_S)

    def _take_mail(self) -> None:
        try:
            message: list[NewTokens] = self._mail.recv()
        except EOFError:
            self._fail()
            return
        self.ready = True
        for news in message:
            queue = self._queues.get(news.request_id)
            if queue is not None:
                queue.put_nowait(news)

    def _fail(self) -> None:
        """The pipeline is gone: say so to all waiting requests, and to /health."""
        asyncio.get_running_loop().remove_reader(self._mail.fileno())
        self.ready = False
        for queue in self._queues.values():
            queue.put_nowait(None)


class App:
    """The ASGI application."""

    def __init__(self, folder: Path) -> None:
        self._engine = Engine(folder)  # first: it loads while the rest starts
        self._model = folder.name
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["path"] == "/v1/completions":
            await self._complete(json.loads(await _body(receive)), send)
        elif scope["path"] == "/v1/models":
            await _reply(send, 200, {"object": "list", "data": [{"id": self._model, "object": "model"}]})
        elif scope["path"] == "/health":
            await _reply(send, 200 if self._engine.ready else 503, {})
        else:
            await _reply(send, 404, {"error": {"message": f"no {scope['path']} here"}})

    async def _live(self, receive: Receive, send: Send) -> None:
        while True:
            event = (await receive())["type"]
            if event == "lifespan.startup":
                self._engine.listen()
            else:
                self._engine.stop()
            await send({"type": f"{event}.complete"})
            if event == "lifespan.shutdown":
                return

    async def _complete(self, body: dict[str, Any], send: Send) -> None:
        if body.get("temperature", 1) != 0:
            await _reply(send, 400, {"error": {"message": "only temperature 0 (greedy) is served"}})
            return
        prompt = body["prompt"]
        ids = self._tokenizer.encode(prompt, add_special_tokens=False).ids if isinstance(prompt, str) else prompt
        news = self._engine.generate(ids, body.get("max_tokens", 16), ignore_eos=body.get("ignore_eos", False))
        if body.get("stream"):
            await self._stream(news, len(ids), send)
        else:
            token_ids, reason = [], None
            async for step in news:
                token_ids += step.token_ids
                reason = step.finish_reason
            choice = {"index": 0, "text": self._tokenizer.decode(token_ids), "finish_reason": reason}
            answer = {"object": "text_completion", "model": self._model, "choices": [choice]}
            await _reply(send, 200, answer | {"usage": _usage(len(ids), len(token_ids))})

    async def _stream(self, news: AsyncIterator[NewTokens], prompt_tokens: int, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        head = f'data: {{"object":"text_completion","model":{json.dumps(self._model)},"choices":['
        text = DecodeStream(skip_special_tokens=True)
        output_tokens = 0
        async for step in news:
            output_tokens += len(step.token_ids)
            # None while a letter's bytes are incomplete
            piece = "".join(text.step(self._tokenizer, token_id) or "" for token_id in step.token_ids)
            if piece or step.finish_reason is not None:
                choice = {"index": 0, "text": piece, "finish_reason": step.finish_reason}
                await _chunk(send, f"{head}{json.dumps(choice)}]}}\n\n")
        await _chunk(send, f'{head}],"usage":{json.dumps(_usage(prompt_tokens, output_tokens))}}}\n\n')
        await _chunk(send, "data: [DONE]\n\n", more=False)


def _usage(prompt_tokens: int, output_tokens: int) -> dict[str, int]:
    total = prompt_tokens + output_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": output_tokens, "total_tokens": total}


async def _body(receive: Receive) -> bytes:
    parts = []
    while True:
        event = await receive()
        parts.append(event.get("body", b""))
        if not event.get("more_body"):
            return b"".join(parts)


async def _chunk(send: Send, text: str, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": more})


async def _reply(send: Send, status: int, body: dict[str, Any]) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await _chunk(send, json.dumps(body), more=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    app = App(arguments.folder)
    uvicorn.run(app, port=arguments.port, loop="uvloop", http="httptools", log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
