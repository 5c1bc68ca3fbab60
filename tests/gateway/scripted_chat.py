"""`ScriptedChat`: a server of chat completions that answers what a test tells it to, whole and in pieces."""

from __future__ import annotations

from typing import Any

import msgspec

from tests.gateway.running_gateway import Upstream
from tonle.edge.exchange import Exchange

USAGE = {
    "prompt_tokens": 20, "completion_tokens": 6, "total_tokens": 26, "prompt_tokens_details": {"cached_tokens": 16},
}  # fmt: skip


def call(name: str, arguments: str, *, call_id: str = "call_a") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


class ScriptedChat(Upstream):
    """`message` is the answer; of a stream, `deltas`, or the message in small pieces."""

    def __init__(self, *models: str) -> None:
        super().__init__(*models)
        self.message: dict[str, Any] = {"role": "assistant", "content": "Phnom Penh."}
        self.deltas: list[dict[str, Any]] | None = None
        self.finish_reason: str | None = "stop"
        self.stop_reason: str | None = None
        self.raw_stream: bytes | None = None  # sent as it is
        self.paths: list[str] = []

    async def _handle(self, exchange: Exchange) -> None:
        if exchange.method == "POST":
            self.paths.append(exchange.path)
        await super()._handle(exchange)

    def _whole(self, body: dict[str, Any]) -> dict[str, Any]:
        path = self.paths[-1]
        if path == "/tokenize":
            return {"count": 11, "tokens": [1] * 11, "max_model_len": 100}
        if path == "/v1/embeddings":
            texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
            data = [{"index": index, "embedding": [float(index), 0.5]} for index in range(len(texts))]
            return {"object": "list", "data": data[::-1], "model": body["model"], "usage": USAGE}
        choice = {"index": 0, "message": self.message, "finish_reason": self.finish_reason}
        if path == "/v1/completions":
            choice = {"index": 0, "text": self.message["content"], "finish_reason": self.finish_reason}
        if self.stop_reason is not None:
            choice["stop_reason"] = self.stop_reason
        return {"id": "chatcmpl-7", "object": "chat.completion", "created": 1, "model": body["model"],
                "choices": [choice], "usage": USAGE}  # fmt: skip

    async def _stream(self, exchange: Exchange, body: dict[str, Any]) -> None:
        exchange.start(content_type="text/event-stream")
        if self.raw_stream is not None:
            exchange.write(self.raw_stream)
            exchange.end()
            return
        head = {"id": "chatcmpl-7", "object": "chat.completion.chunk", "created": 1, "model": body["model"]}
        is_raw = self.paths[-1] == "/v1/completions"
        for delta in self.deltas or pieces(self.message):
            said = {"text": delta.get("content", "")} if is_raw else {"delta": delta}
            _send(exchange, head | {"choices": [{"index": 0, **said, "finish_reason": None}]})
        said = {"text": ""} if is_raw else {"delta": {}}
        stop = {} if self.stop_reason is None else {"stop_reason": self.stop_reason}
        _send(exchange, head | {"choices": [{"index": 0, **said, "finish_reason": self.finish_reason, **stop}]})
        if (body.get("stream_options") or {}).get("include_usage"):
            _send(exchange, head | {"choices": [], "usage": USAGE})
        exchange.write(b"data: [DONE]\n\n")
        exchange.end()


def _send(exchange: Exchange, chunk: dict[str, Any]) -> None:
    exchange.write(b"data: %b\n\n" % msgspec.json.encode(chunk))


def pieces(message: dict[str, Any]) -> list[dict[str, Any]]:
    """A message as a server streams it: texts in pieces of three letters, of a call first the name."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    for name in ("reasoning_content", "content"):
        text = message.get(name) or ""
        deltas += [{name: text[start : start + 3]} for start in range(0, len(text), 3)]
    for index, each in enumerate(message.get("tool_calls", ())):
        function = each["function"]
        begun = {"name": function["name"], "arguments": ""}
        deltas.append({"tool_calls": [{"index": index, "id": each["id"], "type": "function", "function": begun}]})
        text = function["arguments"]
        deltas += [
            {"tool_calls": [{"index": index, "function": {"arguments": text[start : start + 3]}}]}
            for start in range(0, len(text), 3)
        ]
    return deltas
