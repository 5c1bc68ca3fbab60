"""`replay`: send recorded requests again and see whether the answers are the same.

Does: rebuild the request from its record, without streaming; compare texts and tool calls. Does not: repeat what cannot repeat: a
request that samples without a seed is passed over unless asked for; or know HTTP: the caller sends. `tonle bench --replay` sends
recorded requests too, at their recorded times; it takes from here what a request was (`request_of`, `path_of`), whether its
answer must be the same (`is_deterministic`), and whether it is (`Recorded`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from typing import Any, Literal, NamedTuple

import msgspec

from tonle.audit.seal import CONTENT
from tonle.errors import InternalError
from tonle.protocol.answers import Answer, Collector
from tonle.protocol.replies import body_message

Verdict = Literal["same", "different", "failed", "skipped"]
INFERENCE = "/api/v1/inference"  # its records hold the chat request that was made of the question
# Their records, where a gateway wrote them, hold the request that was made of theirs: that one is sent.
_TRANSLATED = ("/v1/messages", "/v1/responses", "/api/chat", "/api/generate")
_TAKE_INPUT = ("/v1/responses", "/v1/embeddings")  # what others call `prompt`, in records too
_AROUND = 20  # characters shown on either side of a difference
_REQUEST_FIELDS = ("messages", "prompt", "parameters", "output")


class ServerReply(NamedTuple):
    status: int
    content_type: str
    body: bytes


# Sends a body to a path (`/v1/…`). Raises `InternalError` if this request failed; what else it raises ends the replay.
Send = Callable[[str, dict[str, Any]], ServerReply]


class ReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    verdict: Verdict
    position: int | None = None  # of the first character that differs
    detail: str = ""
    unknown_model: bool = False  # the server does not have the model that was asked for
    answered_by: str | None = None  # then: the model that answered when it was recorded, if that had another name

    def __str__(self) -> str:
        where = f" at character {self.position}" if self.position is not None else ""
        return f"{self.verdict}{where}: {self.id}" + (f": {self.detail}" if self.detail else "")


def is_deterministic(record: dict[str, Any]) -> bool:
    """Greedy, or with a seed: it should give the same answer again."""
    sampling = record.get("sampling") or {}
    return sampling.get("temperature") == 0 or sampling.get("seed") is not None


def request_of(record: dict[str, Any]) -> dict[str, Any] | None:
    """The body that was sent. None if it is not there to be sent: removed, masked, or never understood."""
    gone = set(record["chain"].get("redacted") or ()) | ({*CONTENT} if record.get("masked") else set())
    parameters = record.get("parameters") or {}
    if gone & {*_REQUEST_FIELDS} or not isinstance(parameters, dict) or "body" in parameters:
        return None
    body: dict[str, Any] = {"model": record.get("model"), **(record.get("sampling") or {}), **parameters}
    for name in ("stream", "stream_options"):
        body.pop(name, None)
    for name in ("messages", "prompt"):
        if record.get(name) is not None:
            body["input" if name == "prompt" and record["endpoint"] in _TAKE_INPUT else name] = record[name]
    return inference_body(body) if record["endpoint"] == INFERENCE else body


def inference_body(body: dict[str, Any]) -> dict[str, Any] | None:
    """A question for the inference service, from the chat request that it became. None if it cannot have been one."""
    messages = body.pop("messages", None)
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        return None
    *before, question = messages
    if question.get("role") != "user":
        return None
    if before and before[0].get("role") == "system":
        body["system_prompt"] = before.pop(0).get("content")
    return {**body, "conversation_history": before, "user_input": question.get("content")}


def replay(
    records: Iterable[dict[str, Any]], send: Send, *, model: str | None = None, everything: bool = False
) -> Iterator[ReplayResult]:
    """One outcome per record. `model` replaces the recorded one."""
    for record in records:
        reason = _why_not(record, everything=everything)
        body = request_of(record) if reason is None else None
        if body is None:
            yield ReplayResult(
                id=record["id"], verdict="skipped", detail=reason or "its request is not on record as it was"
            )
            continue
        if model is not None:
            body["model"] = model
        yield _replay_one(record, body, send)


def _why_not(record: dict[str, Any], *, everything: bool) -> str | None:
    if record.get("status") not in ("ok", "cached"):
        return f"it was {record.get('status')}"
    if not everything and not is_deterministic(record):
        return "it is not deterministic (temperature is not 0 and there is no seed)"
    return None


def path_of(record: dict[str, Any]) -> str:
    """Where the recorded request is sent. Only a gateway notes what its cache had."""
    if record["endpoint"] not in _TRANSLATED or record.get("cache") is None:
        return str(record["endpoint"])
    return "/v1/completions" if record.get("messages") is None else "/v1/chat/completions"


class Recorded(msgspec.Struct, frozen=True):
    """The answer of a record: all that a comparison needs of it."""

    id: str
    endpoint: str
    text: str  # of all choices, with reasoning and tool calls

    @classmethod
    def of(cls, record: dict[str, Any]) -> Recorded:
        choices = record.get("choices")
        if record["endpoint"] == INFERENCE or not isinstance(choices, list) or not choices:
            text = str(record.get("output") or "")
        else:
            text = "\n".join(
                _told(choice.get("text"), choice.get("reasoning"), choice.get("tool_calls"))
                for choice in choices
                if isinstance(choice, dict)
            )
        return cls(record["id"], record["endpoint"], text)

    def compare(self, answer: Answer) -> ReplayResult:
        """With the answer of today, which may have been streamed."""
        if self.endpoint == INFERENCE:
            after = str(answer.raw.get("response") or "") if isinstance(answer.raw, dict) else ""
        else:
            after = "\n".join(
                _told(choice.text, "".join(choice.reasoning), list(choice.tool_calls.values()))
                for _, choice in sorted(answer.choices.items())
            )
        return _compare(self.id, self.text, after)


def _replay_one(record: dict[str, Any], body: dict[str, Any], send: Send) -> ReplayResult:
    try:
        reply = send(path_of(record), body)
    except InternalError as error:
        return ReplayResult(id=record["id"], verdict="failed", detail=error.message)
    answer = _answer(reply)
    if reply.status != HTTPStatus.OK:
        said = f"the server says {reply.status}: {body_message(reply.body)}"
        if reply.status != HTTPStatus.NOT_FOUND or not _names_model(answer.error):
            return ReplayResult(id=record["id"], verdict="failed", detail=said)
        route = record.get("route") or {}
        answered_by = route.get("model") if route.get("model") != body.get("model") else None
        said += f"; it was answered by {answered_by}" if answered_by else ""
        return ReplayResult(id=record["id"], verdict="failed", detail=said, unknown_model=True, answered_by=answered_by)
    return Recorded.of(record).compare(answer)


def _told(text: Any, reasoning: Any, calls: Any) -> str:
    """One choice as a text to compare. The ids of tool calls are drawn anew each time and do not count."""
    functions = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    lines = [f"{each.get('name')}({each.get('arguments')})" for each in functions if isinstance(each, dict)]
    return "\n".join([str(each) for each in (reasoning, text) if each] + lines)


def _answer(reply: ServerReply) -> Answer:
    collector = Collector(reply.content_type)
    collector.feed(reply.body)
    return collector.finish()


def _names_model(error: Any) -> bool:
    """A 404 may also be for the path. Servers say in `param`, `code` or words that it is the model."""
    return isinstance(error, dict) and error.get("code") != "not_found" and "model" in str(error)


def _compare(record_id: str, before: str, after: str) -> ReplayResult:
    if before == after:
        return ReplayResult(id=record_id, verdict="same")
    pairs = zip(before, after, strict=False)
    position = next((index for index, (old, new) in enumerate(pairs) if old != new), min(len(before), len(after)))
    start = max(0, position - _AROUND)
    old, new = before[start : position + _AROUND], after[start : position + _AROUND]
    return ReplayResult(id=record_id, verdict="different", position=position, detail=f"{old!r} is now {new!r}")
