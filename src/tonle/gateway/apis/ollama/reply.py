"""Answers of chat completions, completions and embeddings in the shape of Ollama's API, whole or as lines of JSON.

Does: write text, thoughts, calls, counts and times; errors as {"error": "…"}. Does not: read bytes of a stream
(`../chat_stream.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from tonle.edge.exchange import JSON, Exchange
from tonle.gateway.apis.chat_answers import (
    GrowingCalls,
    ToolCall,
    calls_of,
    text_of,
    thoughts_of,
    token_counts,
    whole_calls,
)
from tonle.gateway.apis.chat_stream import ChatChunks, decoded, first_choice, whole_answer
from tonle.gateway.apis.error_shapes import ollama_error, own_shape
from tonle.gateway.call import ReplyFacts
from tonle.gateway.refusals import UpstreamFailed
from tonle.gateway.relay import engine_times
from tonle.protocol.replies import error_text

NDJSON = "application/x-ndjson"
NS = 1_000_000_000

Kind = Literal["chat", "generate", "raw", "load", "embed", "embeddings"]


class OllamaReply:
    """An `Outlet`: what a backend answers comes in, Ollama's shape goes out."""

    def __init__(self, exchange: Exchange, kind: Kind, model: str, facts: ReplyFacts) -> None:
        """`kind`: what was asked for, `load` is a chat or a prompt without words. `model`: as the caller named it."""
        self._exchange = exchange
        self._kind = kind
        self._model = model
        self._facts = facts
        self._chunks = ChatChunks()
        self._calls = GrowingCalls()
        self._finish_reason: Any = None
        self._usage: Any = None
        self._first_s: float | None = None  # monotonic; when the first words of a stream came
        self._last_s: float | None = None

    # -- whole

    def reply(
        self, body: bytes, *, status: int = 200, content_type: str = JSON, headers: Iterable[tuple[str, str]] = ()
    ) -> None:
        headers = list(headers)
        if status == 200:
            body = msgspec.json.encode(self._whole(body, engine_times(dict(headers)) or {}))
        else:
            body = own_shape(self._exchange.path, status, body, self._exchange.request_id)
        self._exchange.reply(body, status=status, headers=headers)

    def _whole(self, body: bytes, engine_s: dict[str, float]) -> dict[str, Any]:
        """Raises `UpstreamFailed`."""
        if self._kind == "load":
            return self._line("") | {"done": True, "done_reason": "load"}
        if self._kind in ("embed", "embeddings"):
            return self._vectors(body)
        if self._kind == "raw":
            answer = decoded(body)
            choice = first_choice(answer) if isinstance(answer, dict) else {}
            if not isinstance(choice.get("text"), str):
                raise UpstreamFailed("the answer of the backend is not a completion")
            self._name(answer)
            line = self._line(choice["text"])
        else:
            answer, choice = whole_answer(body)
            self._name(answer)
            message, cut_off = choice["message"], choice.get("finish_reason") == "length"
            calls = whole_calls(calls_of(message), cut_off=cut_off)
            line = self._line(text_of(message), thoughts_of(message), calls) | _logprobs(choice)
        line |= self._ending(choice.get("finish_reason"), answer.get("usage"), engine_s)
        return line | ({"warnings": answer["warnings"]} if answer.get("warnings") else {})

    def _vectors(self, body: bytes) -> dict[str, Any]:
        found = decoded(body)
        data = found.get("data") if isinstance(found, dict) else None
        if not isinstance(found, dict) or not isinstance(data, list) or not all(isinstance(row, dict) for row in data):
            raise UpstreamFailed("the answer of the backend has no embeddings")
        self._name(found)
        vectors = [row.get("embedding") for row in sorted(data, key=_index)]
        if self._kind == "embeddings":
            return {"embedding": vectors[0] if vectors else []}
        warnings = {"warnings": found["warnings"]} if found.get("warnings") else {}
        return {
            "model": self._model, "embeddings": vectors, "total_duration": int(self._exchange.elapsed_s * NS),
            "load_duration": 0, "prompt_eval_count": token_counts(found.get("usage")).prompt, **warnings,
        }  # fmt: skip

    # -- streams

    def start(self, *, status: int = 200, content_type: str, headers: Iterable[tuple[str, str]] = ()) -> None:
        self._exchange.start(status=status, content_type=NDJSON, headers=headers)

    def write(self, piece: bytes) -> None:
        self._exchange.write(b"".join([self._of_chunk(chunk) for chunk in self._chunks.feed(piece)]))

    def end(self) -> None:
        """Raises `UpstreamFailed` if what came is no whole answer; the error is then written, and this is called again."""
        self._exchange.write(b"".join([self._of_chunk(chunk) for chunk in self._chunks.finish()]))
        if not self._chunks.failed:
            if self._finish_reason is None:
                raise UpstreamFailed("the answer of the backend broke off")
            calls = self._calls.whole(cut_off=self._finish_reason == "length")
            last = [self._line("", calls=calls) | {"done": False}] if calls else []
            last.append(self._line("") | self._ending(self._finish_reason, self._usage, self._stream_times()))
            self._exchange.write(b"".join(map(_json_line, last)))
        self._exchange.end()

    def _of_chunk(self, chunk: dict[str, Any]) -> bytes:
        if "comment" in chunk:  # lines cannot have comments: one that says nothing
            return _json_line(self._line("") | {"done": False})
        if chunk.get("error") is not None:
            return ollama_error(error_text(chunk["error"])) + b"\n"
        self._name(chunk)
        self._usage = chunk.get("usage") or self._usage
        choice = first_choice(chunk)
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        if self._kind == "raw":
            text, thoughts = choice.get("text"), ""
        else:
            delta = choice.get("delta")
            delta = delta if isinstance(delta, dict) else {}
            self._calls.add(delta)
            text, thoughts = text_of(delta), thoughts_of(delta)
        warnings = {"warnings": chunk["warnings"]} if chunk.get("warnings") else {}
        if not text and not thoughts and not warnings:
            return b""
        self._last_s = time.monotonic()
        self._first_s = self._first_s or self._last_s
        text = text if isinstance(text, str) else ""
        return _json_line(self._line(text, thoughts) | _logprobs(choice) | warnings | {"done": False})

    def _stream_times(self) -> dict[str, float]:
        if self._first_s is None or self._last_s is None:
            return {}
        waited_s = self._first_s - self._exchange.arrived_s - self._facts.queued_s
        return {"prefill": max(waited_s, 0.0), "decode": self._last_s - self._first_s}

    # -- lines

    def _name(self, answer: dict[str, Any]) -> None:
        """If the caller named no model, its name is what the backend says."""
        self._model = self._model or str(answer.get("model") or "")

    def _line(self, text: str, thoughts: str = "", calls: Iterable[ToolCall] = ()) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        words: dict[str, Any] = {"content": text} if self._is_chat else {"response": text}
        if thoughts:
            words["thinking"] = thoughts
        if called := [{"id": call.id, "function": {"name": call.name, "arguments": call.arguments}} for call in calls]:
            words["tool_calls"] = called
        if self._is_chat:
            words = {"message": {"role": "assistant", **words}}
        return {"model": self._model, "created_at": now, **words}

    @property
    def _is_chat(self) -> bool:
        return self._exchange.path == "/api/chat"

    def _ending(self, finish_reason: Any, usage: Any, engine_s: dict[str, float]) -> dict[str, Any]:
        """How it ended, and what it took, nanoseconds. What is not known is left out."""
        counts = token_counts(usage)
        facts: dict[str, Any] = {
            "done": True, "done_reason": "length" if finish_reason == "length" else "stop",
            "total_duration": int(self._exchange.elapsed_s * NS), "load_duration": 0,
            "prompt_eval_count": counts.prompt, "eval_count": counts.completion,
        }  # fmt: skip
        for name, field in (("prefill", "prompt_eval_duration"), ("decode", "eval_duration")):
            if engine_s.get(name):
                facts[field] = int(engine_s[name] * NS)
        return facts


def _index(row: dict[str, Any]) -> int:
    index = row.get("index")
    return index if isinstance(index, int) else 0


def _logprobs(choice: dict[str, Any]) -> dict[str, Any]:
    """Both APIs tell them alike."""
    found = choice.get("logprobs")
    content = found.get("content") if isinstance(found, dict) else None
    return {"logprobs": content} if isinstance(content, list) and content else {}


def _json_line(line: dict[str, Any]) -> bytes:
    return msgspec.json.encode(line) + b"\n"
