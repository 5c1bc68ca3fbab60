"""`Call`: one generation request on its way through the stages, and what they learn about it.

Does: read the body once, estimate its size, remember. Does not: decide anything.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from tonle.edge.exchange import Exchange
from tonle.errors import InvalidRequest, TooLarge
from tonle.gateway.api_keys.key import LOCAL_CALLER, Key
from tonle.protocol.fields import STRIPPED
from tonle.protocol.known import unknown_fields
from tonle.protocol.openai import FieldWarning
from tonle.protocol.parse import MAX_NAME_CHARS, MAX_WARNINGS, strict_refusal

if TYPE_CHECKING:
    from tonle.gateway.limits.limiter import Lease

OWN_FIELDS = ("use_cache",)  # of the gateway: no backend must see them
EXTRAS = "vllm_xargs"  # where vLLM looks for further fields; what is stripped is stripped here too

# Streams of these end with a usage chunk if `stream_options.include_usage` asks for it.
WITH_USAGE = ("/v1/chat/completions", "/v1/completions")

DEFAULT_NEW_TOKENS = 256  # a guess for requests that do not say how much they want
MAX_TOKENS = 2**31 - 1  # more than any model writes, and a number that every store can add up
MAX_DEADLINE_DIGITS = 9  # milliseconds: about eleven days
ASCII_PER_TOKEN = 4  # letters
BYTES_PER_TOKEN = 3  # of other scripts, where a letter has several bytes
HIGH, NORMAL, LOW = 1, 2, 3
_PRIORITIES = {"critical": 0, "high": HIGH, "normal": NORMAL, "low": LOW}
_TRUE = ("1", "true")


class Call:
    """Set by the stage named in the comment; read by those after it."""

    def __init__(self, exchange: Exchange, path: str) -> None:
        self.exchange = exchange
        self.path = path  # what the backend is asked for: /v1/chat/completions or /v1/completions
        self.request_id = exchange.request_id
        self.body: dict[str, Any] = {}
        self.raw = exchange.body  # as it came
        self.warnings: list[FieldWarning] = []  # fields that were removed, changed, or that nobody knows
        self.rewritten = False  # `body` is no longer what `raw` says
        # admit
        self.key: Key = LOCAL_CALLER
        # read
        self.asked_model: str | None = None  # where the body names none, `resolve` sets the only one there is
        self.strict = False  # rather refuse than warn
        self.stream = False
        self.wants_usage = False  # the caller asked for the usage chunk
        self.prompt_tokens = 0  # estimated
        self.new_tokens = DEFAULT_NEW_TOKENS
        self.priority = NORMAL
        self.deadline_s: float | None = None  # monotonic; the answer must have begun by then
        # charge
        self.lease: Lease | None = None
        # replay
        self.cache_state = "bypass"  # hit | miss | bypass
        self.cached_from: str | None = None  # request id of the answer that is replayed
        # choose
        self.model = ""  # the backend's name for it
        self.model_config: dict[str, Any] | None = None
        self.backend = ""
        self.why = ""  # that backend
        self.experiment: str | None = None
        self.arm: str | None = None
        self.attempts: list[str] = []  # backends that failed before the one that answered
        self.hedge: dict[str, Any] | None = None  # who was asked too when the first kept silent, and after how long
        self.shadow: dict[str, Any] | None = None  # where a copy went
        self.prefill_backend: str | None = None
        # send, watch
        self.queued_s = 0.0
        self.sent_s: float | None = None  # monotonic
        self.first_byte_s: float | None = None

    # -- read

    def read(self) -> None:
        """The body. Raises `InvalidRequest`, `TooLarge`."""
        if self.exchange.oversized:
            raise TooLarge("the request body is larger than this gateway takes")
        self.body = self._decode()
        self._read_fields()
        self._strip()
        self._note_unknown()

    def _decode(self) -> dict[str, Any]:
        if not self.raw:
            raise InvalidRequest("the body is empty; send a JSON object")
        try:
            body = msgspec.json.decode(self.raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(
                f"the body is not valid JSON: {str(error).removeprefix('JSON is malformed: ')}"
            ) from None
        if not isinstance(body, dict):
            raise InvalidRequest("the body must be a JSON object")
        return body

    def _read_fields(self) -> None:
        body = self.body
        model = body.get("model")
        if model is not None and not isinstance(model, str):
            raise InvalidRequest("model must be a string", param="model")
        self.asked_model = model or None
        self.stream = body.get("stream") is True
        options = body.get("stream_options")
        self.wants_usage = isinstance(options, dict) and bool(options.get("include_usage"))
        self.prompt_tokens = sum(estimate_tokens(text) for text in prompt_texts(body))
        for name in ("max_completion_tokens", "max_tokens"):
            asked = body.get(name)
            if isinstance(asked, int) and asked > MAX_TOKENS:
                raise InvalidRequest(f"{name} must be at most {MAX_TOKENS}", param=name)
        limits = (body.get("max_completion_tokens"), body.get("max_tokens"))
        self.new_tokens = next((limit for limit in limits if isinstance(limit, int) and limit > 0), DEFAULT_NEW_TOKENS)
        self.priority = self._priority(body.get("priority"))
        self.deadline_s = self._deadline()

    def _priority(self, asked: Any) -> int:
        """Lower goes first. A caller may step back; only an admin key may step forward."""
        number = _PRIORITIES.get(asked.lower()) if isinstance(asked, str) else asked
        if not isinstance(number, int) or isinstance(number, bool):
            if asked is not None:
                self.warn("priority", f"must be a number or one of {', '.join(_PRIORITIES)}; taken as normal")
            return NORMAL
        if number < NORMAL and not self.key.may("admin"):
            self.warn("priority", "changed to normal: only an admin key may step forward")
            self.body["priority"] = NORMAL
            self.rewritten = True
            return NORMAL
        return max(number, 0)

    def _deadline(self) -> float | None:
        text = self.exchange.header("x-request-deadline-ms")
        if not text:
            return None
        num_digits = len(text.lstrip("0"))  # looked at first: reading a number of thousands of digits fails
        if not text.isdecimal() or not 0 < num_digits <= MAX_DEADLINE_DIGITS:
            raise InvalidRequest("X-Request-Deadline-Ms must be a number of milliseconds, such as 2000")
        return self.exchange.arrived_s + int(text) / 1000

    def _strip(self) -> None:
        """What only this side of the gateway may set. A null goes too: a body may name a field twice."""
        extras = self.body.get(EXTRAS)
        for place, prefix in ((self.body, ""), (extras if isinstance(extras, dict) else {}, f"{EXTRAS}.")):
            for name, why in STRIPPED.items():
                if name in place:
                    self.rewritten = True
                    if place.pop(name) is not None:
                        self.warn(prefix + name, why)

    def _note_unknown(self) -> None:
        if not isinstance(self.body.get("use_cache", False), bool):
            self.warn("use_cache", "must be true or false; ignored")
        for name in unknown_fields(self.path, self.body):
            if name not in OWN_FIELDS:
                self.warn(name, "unknown field, passed on as it is")

    def warn(self, param: str, message: str) -> None:
        """Tell the caller what became of a field."""
        if len(self.warnings) < MAX_WARNINGS:
            self.warnings.append(FieldWarning(param[:MAX_NAME_CHARS], message))

    def check_strict(self, *, strict: bool) -> None:
        """Raises `InvalidRequest` if there are warnings and the caller or the gateway is strict about them."""
        self.strict = strict or self.exchange.header("x-tonle-strict").lower() in _TRUE
        if self.strict and self.warnings:
            raise strict_refusal(self.warnings)

    # -- questions of the stages

    @property
    def subject(self) -> str:
        """Who stays in one arm of an experiment: the user the caller names, else the key."""
        user = self.exchange.header("x-user-id") or self.body.get("user")
        return f"{self.key.id}/{user}" if isinstance(user, str) and user else self.key.id

    @property
    def asks_usage(self) -> bool:
        """Usage is asked for behind the caller's back, and taken out of the stream again."""
        return self.stream and not self.wants_usage and self.path in WITH_USAGE

    @property
    def total_tokens(self) -> int:
        """Estimated: prompt and answer."""
        return self.prompt_tokens + self.new_tokens

    def time_left_s(self) -> float | None:
        return None if self.deadline_s is None else self.deadline_s - time.monotonic()

    def prefix_text(self, num_chars: int) -> str:
        """How the prompt begins."""
        pieces, size = [], 0
        for text in prompt_texts(self.body):
            pieces.append(text[: num_chars - size])
            size += len(pieces[-1])
            if size >= num_chars:
                break
        return "\x00".join(pieces)


def prompt_texts(body: dict[str, Any]) -> Iterator[str]:
    """Every text of the prompt in order; of token ids, a text that names them."""
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


def estimate_tokens(text: str) -> int:
    """Near enough to choose a backend and to charge in advance. The gateway has no tokenizer."""
    if text.isascii():
        return len(text) // ASCII_PER_TOKEN + 1
    return len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN + 1
