"""Read: a request's body into a `ParsedRequest`, once. No later stage looks at the bytes again.

Does: read the fields the gateway acts on, estimate the size, remove what only this side may set, note a warning for
each field that was removed, changed or is unknown. Does not: decide where the request goes or whether it may run.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from tonle.edge.exchange import Exchange
from tonle.errors import InvalidRequest
from tonle.gateway.api_keys.key import Key
from tonle.gateway.media_use import NO_MEDIA, MediaUse, estimate_media
from tonle.protocol.embeddings import RERANK_PATHS, SCORE_PATHS
from tonle.protocol.fields import STRIPPED
from tonle.protocol.known import unknown_fields
from tonle.protocol.media_paths import SPEECH, WORKERS, is_media
from tonle.protocol.multipart import Form
from tonle.protocol.openai import FieldWarning
from tonle.protocol.parse import MAX_NAME_CHARS, MAX_WARNINGS, strict_refusal
from tonle.protocol.priority import EXPECTED, NORMAL, read_priority

OWN_FIELDS = ("use_cache",)  # the gateway's own: never sent to a backend
ROUTERS = "kv_transfer_params"  # where a prompt is computed: kept where the caller is a router
EXTRAS = "vllm_xargs"  # where vLLM looks for further fields; what is stripped is stripped here too

# Their prompts are read; the prompts of other paths are estimated by the size of the body. Streams of these end with a
# usage chunk if `stream_options.include_usage` asks for it.
WITH_USAGE = ("/v1/chat/completions", "/v1/completions")
NOT_COMPUTED = ("/tokenize", "/detokenize")  # no model runs: requests, but no tokens, are counted
NO_ANSWER = ("/v1/embeddings", *SCORE_PATHS, *RERANK_PATHS, *NOT_COMPUTED)  # no token is written

# The longest answer, under the other names that servers have for `max_tokens`. Which one counts if several are given
# differs: the largest is reserved.
_LENGTHS = ("max_completion_tokens", "max_output_tokens")
_LENGTHS_ELSEWHERE = ("n_predict", "max_new_tokens")
# A body with none of these, as most are, is read without looking for each.
_SPECIAL = frozenset({
    *_LENGTHS, *_LENGTHS_ELSEWHERE, *STRIPPED, EXTRAS, "n", "best_of", "priority", "service_tier",
})  # fmt: skip
DEFAULT_NEW_TOKENS = 256  # the estimate for a request that sets no limit
MAX_TOKENS = 2**31 - 1  # more than any model writes, and a number that every store can add up
MAX_DEADLINE_DIGITS = 9  # milliseconds: about eleven days
ASCII_PER_TOKEN = 4  # letters
BYTES_PER_TOKEN = 3  # of other scripts, where a letter has several bytes
_TOOLS = ("tools", "functions")
_AS_JSON = (*_TOOLS, "response_format")  # what a prompt may hold as JSON beside messages
_encode = msgspec.json.Encoder().encode
_KINDS: dict[type, str] = {str: "a string", list: "a list", dict: "an object"}
_NO_RIGHT = "only a key with scope priority or admin may ask for more"
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
    new_tokens: int  # of one answer: asked for, or a guess
    num_answers: int = 1  # for each prompt so many as `n` or `best_of` ask for
    priority: int  # lower goes first
    deadline_s: float | None  # monotonic; the answer must have begun by then
    user: str | None  # named by the caller
    strict: bool  # refuse rather than warn
    history_dropped: int = 0  # messages left out by the inference service
    media: MediaUse = NO_MEDIA  # estimated
    form: Form | None = None  # `raw` is this form, and no JSON; `body` has its fields, without files
    file_hashes: tuple[str, ...] = ()  # SHA-256 of its files in their order, where a record wants them

    @property
    def total_tokens(self) -> int:
        """Estimated: prompts and answers."""
        return min(self.prompt_tokens + self.new_tokens * self.num_answers, MAX_TOKENS)

    def time_left_s(self) -> float | None:
        return None if self.deadline_s is None else self.deadline_s - time.monotonic()

    @property
    def is_late(self) -> bool:
        return self.deadline_s is not None and self.deadline_s <= time.monotonic()

    def check_strict(self) -> None:
        """Raises `InvalidRequest` if there are warnings and the caller or the gateway is strict about them."""
        if self.strict and self.warnings:
            raise strict_refusal(list(self.warnings))

    def prefix_text(self, num_chars: int) -> str:
        """The beginning of the prompt. Chat templates put tools near it: a hash of theirs stands for them."""
        pieces, size = [], 0
        if tools := _json_of(self.body, _TOOLS):
            pieces.append(hashlib.blake2b(tools, digest_size=16).hexdigest())
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


def parse_request(
    decoded: DecodedBody, exchange: Exchange, path: str, key: Key, *, strict: bool, trust_router: bool = False
) -> ParsedRequest:
    """`path` is what a backend will be asked for; `strict`, the gateway's own setting; `trust_router`: the caller is a router,
    which may set what other callers may not. Raises `InvalidRequest`."""
    body = decoded.body
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise InvalidRequest("model must be a string", param="model")
    stream = body.get("stream") is True
    options = body.get("stream_options")
    wants_usage = isinstance(options, dict) and bool(options.get("include_usage"))
    new_tokens, num_answers, priority = 0, 1, NORMAL
    of_worker = path.startswith(WORKERS)  # its fields are its own, whatever they are called
    if not of_worker:
        new_tokens = _asked_length(body.get("max_tokens"), "max_tokens")
    if not of_worker and not _SPECIAL.isdisjoint(body):
        new_tokens, num_answers = max(new_tokens, _other_lengths(body)), _answers_each(body)
        priority = _priority(decoded, key)
        _strip(decoded, trust_router=trust_router)
    if path in WITH_USAGE:
        prompt_tokens = estimate_prompt(body)
        num_answers = min(num_answers * _num_prompts(body), MAX_TOKENS)
    else:
        prompt_tokens = 0 if path in NOT_COMPUTED else len(decoded.raw) // ASCII_PER_TOKEN + 1
    if path in NO_ANSWER:
        new_tokens = 0
    elif new_tokens <= 0:
        new_tokens = DEFAULT_NEW_TOKENS
    deadline_s = deadline_of(exchange)
    media = NO_MEDIA
    if is_media(path):
        prompt_tokens = new_tokens = 0
        media = estimate_media(path, body)
        stream = stream or (path == SPEECH and body.get("stream_format") == "sse")
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
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        num_answers=num_answers,
        priority=priority,
        deadline_s=deadline_s,
        user=user if isinstance(user, str) and user else None,
        strict=is_strict(exchange, strict=strict),
        history_dropped=decoded.history_dropped,
        media=media,
    )


def is_strict(exchange: Exchange, *, strict: bool) -> bool:
    """`strict`: the gateway's own setting."""
    return strict or exchange.header("x-tonle-strict").lower() in _TRUE


def _asked_length(value: Any, name: str) -> int:
    """0: none is asked for. Raises `InvalidRequest`."""
    if value is None:
        return 0
    length = _integer(value, name)
    if length > MAX_TOKENS:
        raise InvalidRequest(f"{name} must be at most {MAX_TOKENS}", param=name)
    return length


def _other_lengths(body: dict[str, Any]) -> int:
    """The largest length given under another name than `max_tokens`. Raises `InvalidRequest`."""
    lengths = [_asked_length(body.get(name), name) for name in _LENGTHS]
    lengths += [min(asked, MAX_TOKENS) for name in _LENGTHS_ELSEWHERE if isinstance(asked := body.get(name), int)]
    return max(lengths)


def _answers_each(body: dict[str, Any]) -> int:
    """For each prompt, at least 1. Raises `InvalidRequest`."""
    asked = [_integer(value, name) for name in ("n", "best_of") if (value := body.get(name)) is not None]
    return min(max([1, *asked]), MAX_TOKENS)


def _num_prompts(body: dict[str, Any]) -> int:
    prompt = body.get("prompt")
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1


def _integer(value: Any, name: str) -> int:
    """Some servers take `"4096"` for 4096, others do not: what is not plainly a number is not passed on to find out."""
    if isinstance(value, int):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    raise InvalidRequest(f"{name} must be an integer, not {_KINDS.get(type(value), 'a fraction')}", param=name)


def _priority(decoded: DecodedBody, key: Key) -> int:
    """A caller may ask for less than normal; for more, its key needs the scope. Without it, backends get what was read
    here and nothing else: no spelling of theirs, and no other field that means the same."""
    body = decoded.body
    _strip_priority_elsewhere(decoded, key)
    if "priority" not in body:
        return NORMAL
    asked = body["priority"]
    number = read_priority(asked)
    if number is None and asked is not None:
        decoded.warn("priority", f"must be {EXPECTED}; normal is used")
    if key.may("priority"):
        return NORMAL if number is None else number
    decoded.rewritten = True
    if number is None:
        del body["priority"]
        return NORMAL
    if number < NORMAL:
        decoded.warn("priority", f"changed to normal: {_NO_RIGHT}")
        number = NORMAL
    body["priority"] = number
    return number


def _strip_priority_elsewhere(decoded: DecodedBody, key: Key) -> None:
    body, extras = decoded.body, decoded.body.get(EXTRAS)
    if isinstance(extras, dict) and "priority" in extras:
        del extras["priority"]
        decoded.rewritten = True
        decoded.warn(f"{EXTRAS}.priority", "removed: use the field priority")
    if body.get("service_tier") == "priority" and not key.may("priority"):  # OpenAI's word for it
        del body["service_tier"]
        decoded.rewritten = True
        decoded.warn("service_tier", f"removed: {_NO_RIGHT}")


def deadline_of(exchange: Exchange) -> float | None:
    """Monotonic. Raises `InvalidRequest`."""
    text = exchange.header("x-request-deadline-ms")
    if not text:
        return None
    num_digits = len(text.lstrip("0"))  # checked first: parsing a number of thousands of digits fails
    if not text.isdecimal() or not 0 < num_digits <= MAX_DEADLINE_DIGITS:
        raise InvalidRequest("X-Request-Deadline-Ms must be a number of milliseconds, such as 2000")
    return exchange.arrived_s + int(text) / 1000


def _strip(decoded: DecodedBody, *, trust_router: bool) -> None:
    """Fields that only this side of the gateway may set. A null is removed too: a body may name a field twice."""
    extras = decoded.body.get(EXTRAS)
    for place, prefix in ((decoded.body, ""), (extras if isinstance(extras, dict) else {}, f"{EXTRAS}.")):
        for name, why in STRIPPED.items():
            if name in place and not (trust_router and name == ROUTERS):
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
        if not isinstance(message, dict):
            continue
        content = message.get("content")
        if isinstance(content, str):
            yield content
        elif isinstance(content, list):
            yield from (
                part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)
            )
        if "tool_calls" in message:
            yield from _called(message["tool_calls"])


def _called(calls: Any) -> Iterator[str]:
    """The names and arguments of calls in an assistant's message."""
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            yield from (text for part in ("name", "arguments") if isinstance(text := function.get(part), str))


def _json_of(body: dict[str, Any], names: tuple[str, ...]) -> bytes:
    """Fields that servers put into the prompt as JSON; empty if there are none."""
    return b"".join(_encode(value) for name in names if (value := body.get(name)))


def estimate_prompt(body: dict[str, Any]) -> int:
    """Tokens of the prompt: counted where it comes as token ids, estimated where it comes as text."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], str):
        is_flat = isinstance(prompt[0], int)
        return len(prompt) if is_flat else sum(len(part) for part in prompt if isinstance(part, list)) or len(prompt)
    return sum(estimate_tokens(text) for text in prompt_texts(body)) + len(_json_of(body, _AS_JSON)) // ASCII_PER_TOKEN


def estimate_tokens(text: str) -> int:
    """Close enough to choose a backend and to charge in advance. The gateway has no tokenizer."""
    if text.isascii():
        return len(text) // ASCII_PER_TOKEN + 1
    return len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN + 1
