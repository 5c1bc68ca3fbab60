"""Read: a request's body into a `ParsedRequest`, once. No later stage looks at the bytes again.

Does: read the fields the gateway acts on, estimate the size, remove what only this side may set, note a warning for
each field that was removed, changed or is unknown. Does not: decide where the request goes or whether it may run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec

from tonle.edge.exchange import Exchange
from tonle.errors import InvalidRequest
from tonle.gateway.api_keys.key import Key
from tonle.protocol.fields import STRIPPED
from tonle.protocol.known import unknown_fields
from tonle.protocol.openai import FieldWarning
from tonle.protocol.parse import MAX_NAME_CHARS, MAX_WARNINGS, strict_refusal

OWN_FIELDS = ("use_cache",)  # the gateway's own: never sent to a backend
EXTRAS = "vllm_xargs"  # where vLLM looks for further fields; what is stripped is stripped here too

# Streams of these end with a usage chunk if `stream_options.include_usage` asks for it.
WITH_USAGE = ("/v1/chat/completions", "/v1/completions")

DEFAULT_NEW_TOKENS = 256  # the estimate for a request that sets no limit
MAX_TOKENS = 2**31 - 1  # more than any model writes, and a number that every store can add up
MAX_DEADLINE_DIGITS = 9  # milliseconds: about eleven days
ASCII_PER_TOKEN = 4  # letters
BYTES_PER_TOKEN = 3  # of other scripts, where a letter has several bytes
TIMER_S = 0.002  # a timer of uvloop, which counts whole milliseconds, may fire this much before its time
HIGH, NORMAL, LOW = 1, 2, 3
_PRIORITIES = {"critical": 0, "high": HIGH, "normal": NORMAL, "low": LOW}
_TRUE = ("1", "true")


class ParsedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `read`."""

    body: dict[str, Any]  # without the fields that were stripped
    raw: bytes  # the JSON text of the body as it arrived
    rewritten: bool  # `body` differs from `raw`
    warnings: tuple[FieldWarning, ...]
    asked_model: str | None  # None: the body names none
    stream: bool
    wants_usage: bool  # the caller asked for the usage chunk of a stream
    adds_usage: bool  # the caller did not: the gateway asks for it, and removes it from the stream again
    prompt_tokens: int  # estimated
    new_tokens: int  # asked for, or a guess
    priority: int  # lower goes first
    deadline_s: float | None  # monotonic; the answer must have begun by then
    user: str | None  # named by the caller
    strict: bool  # refuse rather than warn
    history_dropped: int = 0  # messages left out by the inference service

    @property
    def total_tokens(self) -> int:
        """Estimated: prompt and answer."""
        return self.prompt_tokens + self.new_tokens

    def time_left_s(self) -> float | None:
        return None if self.deadline_s is None else self.deadline_s - time.monotonic()

    @property
    def is_late(self) -> bool:
        return self.deadline_s is not None and self.deadline_s <= time.monotonic() + TIMER_S

    def check_strict(self) -> None:
        """Raises `InvalidRequest` if there are warnings and the caller or the gateway is strict about them."""
        if self.strict and self.warnings:
            raise strict_refusal(list(self.warnings))

    def prefix_text(self, num_chars: int) -> str:
        """The beginning of the prompt."""
        pieces, size = [], 0
        for text in prompt_texts(self.body):
            pieces.append(text[: num_chars - size])
            size += len(pieces[-1])
            if size >= num_chars:
                break
        return "\x00".join(pieces)


class DecodedBody(msgspec.Struct):
    """A JSON object on its way to a `ParsedRequest`."""

    body: dict[str, Any]
    raw: bytes
    warnings: list[FieldWarning] = []
    rewritten: bool = False
    history_dropped: int = 0

    def warn(self, param: str, message: str) -> None:
        """Tell the caller what became of a field."""
        add_warning(self.warnings, param, message)


def add_warning(warnings: list[FieldWarning], param: str, message: str) -> None:
    if len(warnings) < MAX_WARNINGS:
        warnings.append(FieldWarning(param[:MAX_NAME_CHARS], message))


def parse_request(decoded: DecodedBody, exchange: Exchange, path: str, key: Key, *, strict: bool) -> ParsedRequest:
    """`path` is what a backend will be asked for; `strict`, the gateway's own setting. Raises `InvalidRequest`."""
    body = decoded.body
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise InvalidRequest("model must be a string", param="model")
    stream = body.get("stream") is True
    options = body.get("stream_options")
    wants_usage = isinstance(options, dict) and bool(options.get("include_usage"))
    new_tokens = _new_tokens(body)
    priority = _priority(decoded, key)
    deadline_s = _deadline(exchange)
    _strip(decoded)
    _note_unknown(decoded, path)
    user = exchange.header("x-user-id") or body.get("user")
    return ParsedRequest(
        body=body,
        raw=decoded.raw,
        rewritten=decoded.rewritten,
        warnings=tuple(decoded.warnings),
        asked_model=model or None,
        stream=stream,
        wants_usage=wants_usage,
        adds_usage=stream and not wants_usage and path in WITH_USAGE,
        prompt_tokens=estimate_prompt(body),
        new_tokens=new_tokens,
        priority=priority,
        deadline_s=deadline_s,
        user=user if isinstance(user, str) and user else None,
        strict=strict or exchange.header("x-tonle-strict").lower() in _TRUE,
        history_dropped=decoded.history_dropped,
    )


def _new_tokens(body: dict[str, Any]) -> int:
    found = DEFAULT_NEW_TOKENS
    for name in ("max_tokens", "max_completion_tokens"):  # the second counts where both are given
        asked = body.get(name)
        if not isinstance(asked, int):
            continue
        if asked > MAX_TOKENS:
            raise InvalidRequest(f"{name} must be at most {MAX_TOKENS}", param=name)
        if asked > 0:
            found = asked
    return found


def _priority(decoded: DecodedBody, key: Key) -> int:
    """A caller may ask for less than normal; for more, its key needs the scope."""
    asked = decoded.body.get("priority")
    number = _PRIORITIES.get(asked.lower()) if isinstance(asked, str) else asked
    if not isinstance(number, int) or isinstance(number, bool):
        if asked is not None:
            decoded.warn("priority", f"must be a number or one of {', '.join(_PRIORITIES)}; normal is used")
        return NORMAL
    if number < NORMAL and not key.may("priority"):
        decoded.warn("priority", "changed to normal: only a key with scope priority or admin may ask for more")
        decoded.body["priority"] = NORMAL
        decoded.rewritten = True
        return NORMAL
    return max(number, 0)


def _deadline(exchange: Exchange) -> float | None:
    text = exchange.header("x-request-deadline-ms")
    if not text:
        return None
    num_digits = len(text.lstrip("0"))  # checked first: parsing a number of thousands of digits fails
    if not text.isdecimal() or not 0 < num_digits <= MAX_DEADLINE_DIGITS:
        raise InvalidRequest("X-Request-Deadline-Ms must be a number of milliseconds, such as 2000")
    return exchange.arrived_s + int(text) / 1000


def _strip(decoded: DecodedBody) -> None:
    """Fields that only this side of the gateway may set. A null is removed too: a body may name a field twice."""
    extras = decoded.body.get(EXTRAS)
    for place, prefix in ((decoded.body, ""), (extras if isinstance(extras, dict) else {}, f"{EXTRAS}.")):
        for name, why in STRIPPED.items():
            if name in place:
                decoded.rewritten = True
                if place.pop(name) is not None:
                    decoded.warn(prefix + name, why)


def _note_unknown(decoded: DecodedBody, path: str) -> None:
    if not isinstance(decoded.body.get("use_cache", False), bool):
        decoded.warn("use_cache", "must be true or false; ignored")
    for name in unknown_fields(path, decoded.body):
        if name not in OWN_FIELDS:
            decoded.warn(name, "unknown field, passed on as it is")


def prompt_texts(body: dict[str, Any]) -> Iterator[str]:
    """Every text of the prompt in order; for token ids, a text that names them."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        yield prompt
    elif isinstance(prompt, list):
        yield from (part if isinstance(part, str) else f" {part} " for part in prompt)
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str):
            yield content
        elif isinstance(content, list):
            yield from (
                part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)
            )


def estimate_prompt(body: dict[str, Any]) -> int:
    """Tokens of the prompt: counted where it comes as token ids, estimated where it comes as text."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], str):
        is_flat = isinstance(prompt[0], int)
        return len(prompt) if is_flat else sum(len(part) for part in prompt if isinstance(part, list)) or len(prompt)
    return sum(estimate_tokens(text) for text in prompt_texts(body))


def estimate_tokens(text: str) -> int:
    """Close enough to choose a backend and to charge in advance. The gateway has no tokenizer."""
    if text.isascii():
        return len(text) // ASCII_PER_TOKEN + 1
    return len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN + 1
