"""What a caller asks the engine for, and what comes back. Plain data; the same types cross the mailbox."""

from __future__ import annotations

import enum
import math
from typing import Literal

import msgspec

from tonle.config.types import wrong_type
from tonle.errors import InvalidRequest

FinishReason = Literal["stop", "length", "cancelled", "error"]

MAX_LOGPROBS = 20  # alternatives per token, as in OpenAI's API
MAX_STOPS = 16
MAX_N = 64


class RequestPriority(enum.IntEnum):
    """Lower runs earlier. Waiting ages: see `EngineConfig.priority_ageing_s`."""

    CRITICAL = 0
    HIGH = 1
    NORMAL = 2
    LOW = 3


class GenerationConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How to continue one prompt."""

    max_length: int = 128  # most new tokens; the prompt does not count
    min_tokens: int = 0  # no end-of-sequence before this many new tokens
    do_sample: bool = True  # False: greedy, whatever the temperature
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0  # 1 = off
    min_p: float = 0.0  # 0 = off
    repetition_penalty: float = 1.0  # on prompt and output, 1 = off
    presence_penalty: float = 0.0  # on output, 0 = off
    frequency_penalty: float = 0.0  # on output, 0 = off
    logit_bias: dict[int, float] = {}
    seed: int | None = None  # same seed, same text, whatever else runs
    early_stopping: bool = True  # stop at the model's end-of-sequence token; False runs to max_length
    stop: list[str] = []
    stop_token_ids: list[int] = []
    include_stop_text: bool = False  # keep the stop string in the output
    n: int = 1  # independent continuations
    logprobs: int | None = None  # None = none; k = the chosen token's and the k best alternatives'
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    skip_special_tokens: bool = True

    @property
    def greedy(self) -> bool:
        return not self.do_sample or self.temperature == 0.0

    def validate(self) -> None:
        """Raise `InvalidRequest` naming the first field that makes no sense."""
        if (wrong := wrong_type(self)) is not None:
            raise InvalidRequest(wrong[1], param=wrong[0])
        _check_range("max_length", self.max_length, 1)
        _check_range("min_tokens", self.min_tokens, 0, self.max_length)
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_k", self.top_k, 0)
        _check_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("n", self.n, 1, MAX_N)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_range(name, getattr(self, name), 0, MAX_LOGPROBS)
        for token, bias in self.logit_bias.items():
            _check_range("logit_bias", bias, -100.0, 100.0)
            _check_range("logit_bias", token, 0)
        if self.seed is not None:
            _check_range("seed", self.seed, -(2**63), 2**64 - 1)
        if len(self.stop) > MAX_STOPS:
            raise InvalidRequest(f"stop takes at most {MAX_STOPS} strings, not {len(self.stop)}", param="stop")
        if any(not text for text in self.stop):
            raise InvalidRequest("stop must not contain an empty string", param="stop")


def _check_range(name: str, value: float, low: float, high: float = math.inf, *, open_low: bool = False) -> None:
    if not math.isfinite(value):
        raise InvalidRequest(f"{name} must be a finite number, not {value!r}", param=name)
    if value < low or value > high or (open_low and value == low):
        bounds = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        bounds += f", {low:g} excluded" if open_low else ""
        raise InvalidRequest(f"{name} must be {bounds}, not {value!r}", param=name)


class Request(msgspec.Struct, kw_only=True, array_like=True):
    """One sequence to compute, as it crosses the mailbox. A caller's `n` has become n of these."""

    handle: int  # unique per engine; small, so that step messages stay small
    prompt: list[int]
    config: GenerationConfig
    priority: int = RequestPriority.NORMAL
    seed: int = 0  # always set: the caller's, or drawn by the front; differs between the n
    salt: bytes = b""  # prefix blocks are shared only between equal salts (tenants)
    arrived_s: float = 0.0  # time.monotonic(), comparable between processes of one machine


class TokenLogprob(msgspec.Struct, array_like=True):
    """A token's log-probability and the best alternatives', best first: the model's own, before penalties and temperature."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    completion_tokens: int = 0


class Timings(msgspec.Struct):
    """Moments of one request, `time.monotonic()` seconds; None = not reached."""

    arrived_s: float
    scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None

    @property
    def queue_s(self) -> float | None:
        return None if self.scheduled_s is None else self.scheduled_s - self.arrived_s

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrived_s

    @property
    def latency_s(self) -> float | None:
        return None if self.finished_s is None else self.finished_s - self.arrived_s


class Delta(msgspec.Struct):
    """What is new in one continuation. Its text is cut between letters, as `hold_clusters` says.

    Tokens may run ahead of text, unless log-probabilities are asked for: then the text is exactly that of the tokens,
    but for the last delta, where a stop string or an incomplete letter is cut off.
    """

    index: int  # which of the n
    text: str
    tokens: list[int]
    logprobs: list[TokenLogprob] | None = None  # one per token, if asked for
    finish_reason: FinishReason | None = None  # set exactly once per index, on its last delta
    stop_reason: str | int | None = None  # the stop string or stop token that matched


class GenerationResult(msgspec.Struct, kw_only=True):
    """A finished request, all n continuations together."""

    request_id: str
    prompt_ids: list[int]
    texts: list[str]
    output_ids: list[list[int]]
    finish_reasons: list[FinishReason]
    usage: Usage
    timings: Timings
    logprobs: list[list[TokenLogprob]] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    error: str | None = None  # set when finish_reason is "error"

    @property
    def text(self) -> str:
        return self.texts[0]

    @property
    def finish_reason(self) -> FinishReason:
        return self.finish_reasons[0]
