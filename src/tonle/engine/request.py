"""What a caller asks the engine for, and what comes back. Plain data; the same types cross the mailbox."""

from __future__ import annotations

import enum
import math
from typing import Any, Literal

import msgspec

from tonle.config.types import wrong_type
from tonle.errors import InvalidRequest

FinishReason = Literal["stop", "length", "cancelled", "error"]

MAX_LOGPROBS = 20  # alternatives per token, as in OpenAI's API
MAX_STOPS = 16
MAX_STOP_CHARS = 1024  # of one stop string: a stream holds back as much
MAX_BIASES = 1024  # entries of logit_bias, and of stop_token_ids
MAX_N = 64
POOLINGS = ("last", "mean")  # an embedding is the hidden state of the last token, or the mean of all tokens'


class RequestPriority(enum.IntEnum):
    """Lower runs earlier. Waiting ages: see `EngineConfig.priority_ageing_s`."""

    CRITICAL = 0
    HIGH = 1
    NORMAL = 2
    LOW = 3


class StructuredOutput(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What the text of an answer must be. Exactly one field is set (`engine/grammar/grammar_text.py` checks)."""

    json: dict[str, Any] | bool | str | None = None  # a JSON schema; a string holds one
    json_object: bool = False  # any JSON object
    regex: str | None = None
    choice: list[str] | None = None  # one of these texts
    grammar: str | None = None  # Lark as llguidance reads it, or GBNF (`root ::= …`)
    structural_tag: dict[str, Any] | None = None  # free text with bound parts, as vLLM and SGLang take it


class Thinking(msgspec.Struct, kw_only=True, omit_defaults=True, array_like=True):
    """How a model thinks before it answers. The structure of an answer begins where the thinking ends."""

    start: list[int] = []  # the tokens that open it
    end: list[int] = []  # the tokens that close it
    is_open: bool = False  # the prompt ends inside of it
    budget: int | None = None  # most tokens of thought; then `closing` is written for the model
    closing: list[int] = []  # `end` and what may stand around it; ends with `end` or what follows it


class GenerationConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How to continue one prompt. A field left at None takes the model's default (its generation_config.json), if the
    model has one, else the value in the comment."""

    max_length: int | None = None  # most new tokens, without the prompt; 128 for text, `default_max_tokens` for a chat
    max_tokens: int | None = None  # another name for max_length, which takes its value
    min_tokens: int = 0  # no end-of-sequence before this many new tokens
    do_sample: bool = True  # False: greedy, whatever the temperature
    temperature: float | None = None  # 0 = greedy; 1
    top_k: int | None = None  # 0 = off; 0
    top_p: float | None = None  # 1 = off; 1
    min_p: float | None = None  # 0 = off; 0
    repetition_penalty: float | None = None  # on prompt and output, also of greedy requests; 1 = off; 1
    presence_penalty: float = 0.0  # on output, 0 = off
    frequency_penalty: float = 0.0  # on output, 0 = off
    logit_bias: dict[int, float] = {}
    seed: int | None = (
        None  # same seed, same draws; the text too, but for rounding (docs/guide.md, "The same answer twice")
    )
    early_stopping: bool = True  # stop at the model's end-of-sequence token; False runs to max_length
    stop: list[str] = []
    stop_token_ids: list[int] = []
    include_stop_text: bool = False  # keep the stop string in the output
    n: int = 1  # independent continuations
    best_of: int | None = None  # so many are computed, and the n with the best mean log-probability returned; None = n
    logprobs: int | None = None  # None = none; k = the chosen token's and the k best alternatives'
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    prompt_logprobs_start: int = (
        0  # from this place of the prompt on; what stands before may come from the prefix cache
    )
    skip_special_tokens: bool = True
    use_cache: bool = True  # False: compute the whole prompt, even if its beginning is in the prefix cache
    speculate: bool = True  # False: no draft tokens for this request, and none from it; the answer is the same
    structured: StructuredOutput | None = None  # what the text must be; None = any
    thinking: Thinking | None = None  # None: the model does not think, or all of it is answer

    def __post_init__(self) -> None:
        """Raises `InvalidRequest`."""
        if self.max_tokens is None:
            return
        if self.max_length not in (None, self.max_tokens):
            raise InvalidRequest(
                f"max_tokens is another name for max_length: give one of them, not {self.max_tokens!r} and "
                f"{self.max_length!r}",
                param="max_tokens",
            )
        self.max_length, self.max_tokens = self.max_tokens, None

    @property
    def num_candidates(self) -> int:
        """Continuations to compute."""
        return self.n if self.best_of is None else self.best_of

    @property
    def greedy(self) -> bool:
        return not self.do_sample or self.temperature == 0.0

    def resolved(self, **defaults: Any) -> ResolvedConfig:
        """With every field set: as given, else from `defaults`, else the engine's own."""
        given = {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}
        known = {name: value for name, value in defaults.items() if value is not None}
        return ResolvedConfig(**(known | given))

    def validate(self) -> None:
        """Raise `InvalidRequest` naming the first field that makes no sense."""
        self.__post_init__()  # max_tokens may have been assigned since
        self._check_structured()
        if (wrong := wrong_type(msgspec.structs.replace(self, structured=None))) is not None:
            raise InvalidRequest(wrong[1], param=wrong[0])
        _check_range("max_length", self.max_length, 1)
        _check_range("min_tokens", self.min_tokens, 0, math.inf if self.max_length is None else self.max_length)
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_k", self.top_k, 0)
        _check_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("n", self.n, 1, MAX_N)
        _check_range("best_of", self.best_of, 1, MAX_N)
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidRequest(f"best_of must be at least n ({self.n}), not {self.best_of}", param="best_of")
        _check_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _check_range("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        _check_range("prompt_logprobs_start", self.prompt_logprobs_start, 0)
        for name in ("logit_bias", "stop_token_ids"):
            if (count := len(getattr(self, name))) > MAX_BIASES:
                raise InvalidRequest(f"{name} takes at most {MAX_BIASES} tokens, not {count}", param=name)
        for token, bias in self.logit_bias.items():
            _check_range("logit_bias", bias, -100.0, 100.0)
            _check_range("logit_bias", token, 0)
        _check_range("seed", self.seed, -(2**63), 2**64 - 1)
        if len(self.stop) > MAX_STOPS:
            raise InvalidRequest(f"stop takes at most {MAX_STOPS} strings, not {len(self.stop)}", param="stop")
        if any(len(text) > MAX_STOP_CHARS for text in self.stop):
            raise InvalidRequest(f"a stop string may have at most {MAX_STOP_CHARS} characters", param="stop")
        if any(not text for text in self.stop):
            raise InvalidRequest("stop must not contain an empty string", param="stop")

    def _check_structured(self) -> None:
        """What a grammar says is checked where it is read (`engine/grammar/grammar_text.py`): it may be of any size and depth."""
        if self.structured is not None and not isinstance(self.structured, StructuredOutput):
            raise InvalidRequest(
                f"structured must be a StructuredOutput, not {type(self.structured).__name__}", param="structured"
            )
        if isinstance(self.thinking, Thinking):
            if not self.thinking.end:
                raise InvalidRequest("thinking must have the tokens that end it (end)", param="thinking")
            _check_range("thinking.budget", self.thinking.budget, 0)


class ResolvedConfig(GenerationConfig, kw_only=True, omit_defaults=True):
    """A `GenerationConfig` whose defaults are settled: what the engine computes with. These are the engine's own."""

    max_length: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class GenerationDefaults(msgspec.Struct, frozen=True, omit_defaults=True):
    """What requests get that do not say otherwise: the model's generation_config.json and the server's settings."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None  # of a continued text
    max_chat_tokens: int | None = None  # of a chat's answer; None = what the context leaves
    max_tokens_limit: int | None = None  # no request gets more, whatever it asks for

    def apply(self, config: GenerationConfig, *, max_tokens: int | None, room: int) -> ResolvedConfig:
        """`config` with every field set. `max_tokens`: for one that names no length; None = `room`, the tokens that the
        context leaves. A default length never exceeds the room; one asked for may, which is the caller's to refuse."""
        length = config.max_length
        if length is None:
            length = room if max_tokens is None else min(max(max_tokens, config.min_tokens), room)
        if self.max_tokens_limit is not None:
            length = min(length, self.max_tokens_limit)
        sampling = {name: getattr(self, name) for name in SAMPLING_FIELDS}
        resolved = config.resolved(**sampling)
        resolved.max_length = max(length, 1) if config.max_length is None else length
        return resolved


SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # that a model has defaults for


def _check_range(name: str, value: float | None, low: float, high: float = math.inf, *, open_low: bool = False) -> None:
    if value is None:
        return
    if not math.isfinite(value):
        raise InvalidRequest(f"{name} must be a finite number, not {value!r}", param=name)
    if value < low or value > high or (open_low and value == low):
        bounds = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        bounds += f", {low:g} excluded" if open_low else ""
        raise InvalidRequest(f"{name} must be {bounds}, not {value!r}", param=name)


class RemoteBlocks(msgspec.Struct, kw_only=True, array_like=True, frozen=True):
    """Blocks of a prompt that another engine has computed and keeps for this request (docs/scale.md)."""

    host: str
    port: int
    lease: str  # its name there
    token: str  # that proves it
    num_blocks: int
    tp_size: int = 1
    readers: int = 1  # requests that fetch them


class KeptBlocks(msgspec.Struct, kw_only=True, array_like=True):
    """Where the blocks of a prompt are that this engine keeps for another one."""

    engine_id: str
    host: str
    port: int
    lease: str
    token: str
    blocks: list[int]
    num_tokens: int


class Request(msgspec.Struct, kw_only=True, array_like=True):
    """One sequence to compute, as it crosses the mailbox. A caller's `n` has become n of these."""

    handle: int  # unique per engine; small, so that step messages stay small
    prompt: list[int]
    config: ResolvedConfig
    priority: int = RequestPriority.NORMAL
    seed: int = 0  # always set: the caller's, or drawn by the front; differs between the n
    salt: bytes = b""  # prefix blocks are shared only between equal salts: the digest of its adapter, and its tenant
    arrived_s: float = 0.0  # time.monotonic(), comparable between processes of one machine
    adapter: int = 0  # the engine's number of the adapter it is computed with; 0 = none
    pooling: str = ""  # one of POOLINGS: an embedding of the prompt is wanted, and no token; `config.max_length` is 0
    grammar: str = ""  # what its text must be, as llguidance reads it (Lark, or its JSON form); "" = any
    remote: RemoteBlocks | None = None  # its prompt was computed by another engine
    keep_blocks: bool = False  # when it ends, the full blocks of its prompt are kept for an engine that fetches them


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
