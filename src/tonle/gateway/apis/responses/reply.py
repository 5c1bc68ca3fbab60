"""`ResponseReply`: a chat's answer, whole or streamed, into a response or the events of one.

Does: tell events in order, each with its number; hold the end of the reply until the response is stored, so that a caller can
continue it at once. Does not: put items together (`output.py`) or store (`call.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec

from tonle.edge.exchange import JSON, Exchange
from tonle.errors import TonleError
from tonle.gateway.apis.chat_stream import ChatChunks, first_choice, whole_answer
from tonle.gateway.apis.responses.output import Output
from tonle.gateway.apis.responses.response_object import conclude, error_of, is_cut, renamed_error, usage_of
from tonle.protocol import sse

Headers = Iterable[tuple[str, str]]
Save = Callable[[dict[str, Any]], Awaitable[None]]
ENDED_EARLY = "the answer of the backend ended before it was complete"


class ResponseReply:
    """An `Outlet`. Nothing is complete before `complete`."""

    def __init__(
        self, exchange: Exchange, response: dict[str, Any], on_told: Callable[[str], None], save: Save | None
    ) -> None:
        """`on_told` gets the response's id when the caller does. `save` stores a response; it may raise a `TonleError`.
        None: it is not stored."""
        self._on_told = on_told
        self._exchange = exchange
        self._response = response
        self._save = save
        self._chunks = ChatChunks()
        self._output = Output(response["id"].removeprefix("resp_"), self._emit)
        self._events: list[bytes] = []  # to be written
        self._num_events = 0
        self._is_stream = False
        self._muted = False
        self._begun = False  # the stream has told of the response
        self._failed = False
        self._finish_reason: str | None = None
        self._held: list[tuple[str, str]] | None = None  # headers; the reply waits to be completed

    def reply(self, body: bytes, *, status: int = 200, content_type: str = JSON, headers: Headers = ()) -> None:
        """Raises `UpstreamFailed` if it is not a chat's answer."""
        if status != 200:
            self._held = None
            self._exchange.reply(renamed_error(body), status=status, content_type=content_type, headers=headers)
            return
        self._muted = True
        answer, choice = whole_answer(body)
        self._learn(answer, choice)
        self._output.add(choice["message"], choice.get("logprobs"))
        self._conclude()
        self._held = list(headers)

    # -- streams

    def start(self, *, status: int = 200, content_type: str, headers: Headers = ()) -> None:
        self._is_stream = True
        self._exchange.start(status=status, content_type=sse.CONTENT_TYPE, headers=headers)

    def write(self, piece: bytes) -> None:
        """Any part of a stream of chat chunks."""
        for chunk in self._chunks.feed(piece):
            self._take(chunk)
        self._flush()

    def end(self) -> None:
        for chunk in self._chunks.finish():
            self._take(chunk)
        if not self._failed and self._finish_reason is None and not self._chunks.done:
            self._fail({"message": ENDED_EARLY, "code": "upstream_failed"})
        if self._failed:
            self._flush()
            self._exchange.end()
            return
        self._begin()
        self._conclude()
        self._held = []

    def _take(self, chunk: dict[str, Any]) -> None:
        if "comment" in chunk:
            self._events.append(f": {chunk['comment']}\n\n".encode())
        elif self._failed:
            return
        elif chunk.get("error") is not None:
            self._fail(chunk["error"])
        else:
            choice = first_choice(chunk)
            self._learn(chunk, choice)
            self._begin()
            if isinstance(delta := choice.get("delta"), dict):
                self._output.add(delta, choice.get("logprobs"))

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._on_told(self._response["id"])
            self._emit("response.created", {"response": self._response})
            self._emit("response.in_progress", {"response": self._response})

    def _fail(self, reason: Any) -> None:
        """The items stay as they are: nothing in them is told to be complete."""
        self._begin()
        self._failed = self._muted = True
        self._output.finish(cut=True)
        error = error_of(reason)
        self._response |= {"status": "failed", "output": self._output.items, "store": False,
                           "error": {"code": error["code"], "message": error["message"]}}  # fmt: skip
        self._muted = False
        self._emit("response.failed", {"response": self._response})
        # Clients read one of the two forms; those that raise an exception look for `error`.
        self._emit("error", {**{name: error[name] for name in ("code", "message", "param")}, "error": error})

    def _emit(self, kind: str, fields: dict[str, Any]) -> None:
        if self._muted:
            return
        event = msgspec.json.encode({"type": kind, "sequence_number": self._num_events, **fields})
        self._events.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), event))
        self._num_events += 1

    def _flush(self) -> None:
        if self._events:
            self._exchange.write(b"".join(self._events))
            self._events = []

    # -- both

    def _learn(self, chat: dict[str, Any], choice: dict[str, Any]) -> None:
        """What a chunk or an answer says beside its text."""
        response, reason = self._response, choice.get("finish_reason")
        if isinstance(reason, str):
            self._finish_reason = reason
        if isinstance(model := chat.get("model"), str):
            response["model"] = model
        if isinstance(tier := chat.get("service_tier"), str):
            response["service_tier"] = tier
        if (usage := usage_of(chat.get("usage"))) is not None:
            response["usage"] = usage
        if isinstance(warnings := chat.get("warnings"), list) and warnings:
            response["warnings"] = warnings

    def _conclude(self) -> None:
        self._output.finish(cut=is_cut(self._finish_reason))
        self._response["output"] = self._output.items
        conclude(self._response, self._finish_reason)

    async def complete(self) -> None:
        """Store the response, if it is to be stored, and send what was held. Nothing if the reply has ended otherwise."""
        if self._held is None:
            return
        if self._save is not None:
            try:
                await self._save(self._response)
            except TonleError as error:
                self._response["store"] = False
                told = {"param": "store", "message": f"this response was not stored: {error.message}"}
                self._response["warnings"] = [*self._response.get("warnings", ()), told]
        headers, self._held = self._held, None
        if not self._is_stream:
            self._on_told(self._response["id"])
            self._exchange.reply(msgspec.json.encode(self._response), headers=headers)
            return
        self._emit(f"response.{self._response['status']}", {"response": self._response})
        self._flush()
        self._exchange.end()
