"""A wire request into an order for the engine: token ids, sampling settings, priority.

Does: apply the API's defaults, render and tokenize, check against the model, and complain in the names the caller used.
Does not: touch the connection. Pure functions; long prompts are translated on a thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tonle.engine.messages import ModelCard
from tonle.engine.request import GenerationConfig, RequestPriority, ResolvedConfig
from tonle.engine.text import Text
from tonle.errors import ContextOverflow, InvalidRequest
from tonle.protocol.openai import ChatRequest, CompletionRequest, FieldWarning, SamplingFields
from tonle.protocol.priority import EXPECTED, read_priority
from tonle.replica.answer_reading import AnswerReading
from tonle.replica.chat_plan import plan_chat
from tonle.replica.chat_style import ChatStyle
from tonle.replica.read_structured import read_structured

DEFAULT_COMPLETION_TOKENS = 16  # as in OpenAI's API; of chats, `GenerationDefaults` knows
MAX_TOKENS_NAMED = 1024  # in logit_bias, as in OpenAI's API, and in stop_token_ids
MAX_TOKEN_DIGITS = 18  # of a token id: below 2**63
MAX_STOP_CHARS = 1000  # of a stop string: with every token, the end of the text is compared with all of it
MAX_QUOTED_CHARS = 100  # of a wrong value in an error


class ServedModel(NamedTuple):
    """What requests are translated for."""

    text: Text
    card: ModelCard
    max_choices: int  # prompts x n of one request
    style: ChatStyle


@dataclass(frozen=True, slots=True)
class Part:
    prompt: list[int]
    config: ResolvedConfig


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What one HTTP request asks of the engine: each part is answered n times."""

    parts: list[Part]
    n: int
    priority: RequestPriority
    prompt_only: bool = False  # the answer's tokens are not wanted, only what is known about the prompt
    reading: AnswerReading | None = None  # of answers that are more than content
    structured_by: str | None = None  # the field that says what the answer must be
    warnings: list[FieldWarning] = field(default_factory=list)  # about fields that cannot have an effect on this model

    @property
    def max_tokens(self) -> int:
        """Most new tokens of one answer, after all defaults and limits."""
        return 0 if self.prompt_only else max(part.config.max_length for part in self.parts)


def chat_order(request: ChatRequest, served: ServedModel) -> EngineRequest:
    """Raises `CallerError`."""
    text, card = served.text, served.card
    _check_stream(request)
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    config = _config(request)
    if request.logprobs:
        config.logprobs = request.top_logprobs or 0
    plan = plan_chat(request, text, served.style)
    prompt = _truncated(plan.prompt, request, card)
    limit = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    check_prompt(prompt, "messages", card)
    config.max_length = getattr(request, limit)
    room = _room(prompt, "messages", config.max_length, limit, card)
    config.structured, config.thinking = plan.structured, plan.thinking
    if plan.reading is not None and plan.reading.format.reads_special_tokens:
        config.skip_special_tokens = False
    _validate(config, {"max_length": limit, "logprobs": "top_logprobs"})
    settled = card.defaults.apply(config, max_tokens=card.defaults.max_chat_tokens, room=room)
    order = _order(request, [Part(prompt, settled)], served)
    return replace(order, reading=plan.reading, structured_by=plan.structured_by, warnings=plan.warnings)


def completion_order(request: CompletionRequest, served: ServedModel) -> EngineRequest:
    """Raises `CallerError`."""
    card = served.card
    _check_stream(request)
    prompts = [_truncated(prompt, request, card) for prompt in _prompts(request, served.text, served.max_choices)]
    structure = read_structured(request)
    config = _config(request)
    config.best_of = request.best_of
    if config.num_candidates > config.n and request.stream:
        raise InvalidRequest("best_of cannot be streamed: which answers are best is known at the end", param="best_of")
    config.logprobs = request.logprobs
    config.structured = None if structure is None else structure.output
    if request.echo and request.logprobs is not None:  # the echoed prompt has log-probabilities like the answer
        config.prompt_logprobs = max(request.logprobs, request.prompt_logprobs or 0)
    # max_tokens 0 with echo asks about the prompt alone; the engine always makes one token, which is then left out
    prompt_only = request.max_tokens == 0 and request.echo is True
    config.max_length = 1 if prompt_only else request.max_tokens
    _validate(config, {"max_length": "max_tokens"})
    parts = []
    for place, prompt in enumerate(prompts):
        name = "prompt" if len(prompts) == 1 else f"prompt[{place}]"
        check_prompt(prompt, name, card)
        room = _room(prompt, name, config.max_length, "max_tokens", card)
        settled = card.defaults.apply(config, max_tokens=DEFAULT_COMPLETION_TOKENS, room=room)
        parts.append(Part(prompt, settled))
    order = _order(request, parts, served)
    return replace(order, prompt_only=prompt_only, structured_by=None if structure is None else structure.param)


def _order(request: SamplingFields, parts: list[Part], served: ServedModel) -> EngineRequest:
    """The checks that are the same for both kinds."""
    config, card, max_choices = parts[0].config, served.card, served.max_choices
    named: dict[str, Iterable[int]] = {
        "logit_bias": config.logit_bias,
        "stop_token_ids": config.stop_token_ids,
        "allowed_token_ids": request.allowed_token_ids or (),
    }
    for name, tokens in named.items():
        for token in tokens:
            if not 0 <= token < card.vocab_size:
                raise InvalidRequest(
                    f"{name}: the model has tokens 0 to {card.vocab_size - 1}, not {token}", param=name
                )
    if len(parts) * config.num_candidates > max_choices:
        name = "n" if config.best_of is None else "best_of"
        raise InvalidRequest(
            f"{len(parts)} prompts x {name} {config.num_candidates} are more than the {max_choices} answers one request may "
            "have",
            param=name,
        )
    return EngineRequest(parts, config.n, read_priority_field(request.priority))


def _config(request: SamplingFields) -> GenerationConfig:
    """Everything but the lengths and log-probabilities. Absent fields stay open: the model may have defaults for them."""
    config = GenerationConfig()
    for name in (
        "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "n", "seed",
        "min_tokens", "stop_token_ids", "skip_special_tokens", "speculate",
    ):  # fmt: skip
        if (value := getattr(request, name)) is not None:
            setattr(config, name, value)
    if request.seed is not None and not -(2**63) <= request.seed < 2**64:
        raise InvalidRequest("seed must fit in 64 bits", param="seed")
    if request.stop is not None:
        config.stop = [request.stop] if isinstance(request.stop, str) else request.stop
        if any(len(stop) > MAX_STOP_CHARS for stop in config.stop):
            raise InvalidRequest(f"a stop string may have at most {MAX_STOP_CHARS} characters", param="stop")
    if len(config.stop_token_ids) > MAX_TOKENS_NAMED:
        raise InvalidRequest(f"stop_token_ids takes at most {MAX_TOKENS_NAMED} tokens", param="stop_token_ids")
    if request.top_k == -1:
        config.top_k = 0
    config.prompt_logprobs = request.prompt_logprobs
    config.logit_bias = _logit_bias(request.logit_bias or {})
    config.early_stopping = not request.ignore_eos
    config.include_stop_text = bool(request.include_stop_str_in_output)
    return config


def _validate(config: GenerationConfig, names: dict[str, str]) -> None:
    """`names`: what the engine calls a field, and what the caller called it."""
    try:
        config.validate()
    except InvalidRequest as error:
        name = names.get(error.param or "")
        if name is None:
            raise
        raise InvalidRequest(error.message.replace(str(error.param), name, 1), param=name) from None


def _check_stream(request: SamplingFields) -> None:
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequest("prompt_logprobs is not available with stream", param="prompt_logprobs")


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    if len(bias) > MAX_TOKENS_NAMED:
        raise InvalidRequest(f"logit_bias takes at most {MAX_TOKENS_NAMED} tokens, not {len(bias)}", param="logit_bias")
    for token in bias:
        if not (token.isascii() and token.isdecimal() and len(token) <= MAX_TOKEN_DIGITS):
            raise InvalidRequest("the keys of logit_bias must be token ids", param="logit_bias")
    return {int(token): value for token, value in bias.items()}


def read_priority_field(priority: int | str | None) -> RequestPriority:
    if priority is None:
        return RequestPriority.NORMAL
    number = read_priority(priority)
    if number is None:
        found = repr(priority)[:MAX_QUOTED_CHARS]
        raise InvalidRequest(f"priority must be {EXPECTED}, not {found}", param="priority")
    return RequestPriority(number)


def _prompts(request: CompletionRequest, text: Text, max_choices: int) -> list[list[int]]:
    """A prompt may be text or token ids, or a list of texts, or a list of lists of token ids."""
    add_special_tokens = request.add_special_tokens is not False
    prompt = request.prompt
    if isinstance(prompt, str):
        return [text.encode(prompt, add_special_tokens=add_special_tokens)]
    if not prompt:
        raise InvalidRequest("prompt is an empty list", param="prompt")
    if all(isinstance(item, int) for item in prompt):
        return [prompt]  # type: ignore[list-item]
    if len(prompt) > max_choices:
        raise InvalidRequest(
            f"{len(prompt)} prompts are more than the {max_choices} one request may have", param="prompt"
        )
    if all(isinstance(item, str) for item in prompt):
        return [text.encode(item, add_special_tokens=add_special_tokens) for item in prompt]  # type: ignore[arg-type]
    if all(isinstance(item, list) for item in prompt):
        return prompt  # type: ignore[return-value]
    raise InvalidRequest("prompt must hold only texts, only token ids, or only lists of token ids", param="prompt")


def _truncated(prompt: list[int], request: SamplingFields, card: ModelCard) -> list[int]:
    """The end of the prompt, as far as the caller wants it kept."""
    most = request.truncate_prompt_tokens
    if most is None:
        return prompt
    if most < -1 or most == 0:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be at least 1, or -1, not {most}", param="truncate_prompt_tokens"
        )
    if most == -1:
        most = max(card.context_length - _max_tokens(request), 1)
    return prompt[-most:]


def _max_tokens(request: SamplingFields) -> int:
    """What the caller asks for; 1 if it leaves that open."""
    asked = request.max_completion_tokens if isinstance(request, ChatRequest) else None
    return max(1, asked or request.max_tokens or 1)


def check_prompt(prompt: list[int], name: str, card: ModelCard) -> None:
    if not prompt:
        raise InvalidRequest(f"{name} is empty; the model needs at least one token to continue", param=name)
    if min(prompt) < 0 or max(prompt) >= card.vocab_size:
        raise InvalidRequest(f"{name}: the model has tokens 0 to {card.vocab_size - 1}", param=name)


def _room(prompt: list[int], name: str, asked: int | None, limit: str, card: ModelCard) -> int:
    """How many new tokens the context leaves. Raises `ContextOverflow` if there are none, or fewer than asked for."""
    left = card.context_length - len(prompt)
    if left < 1:
        raise ContextOverflow(
            f"{name} has {len(prompt)} tokens; the model's context is {card.context_length} tokens, prompt and answer "
            "together. Shorten the prompt.", param=name,
        )  # fmt: skip
    if asked is not None and asked > left:
        raise ContextOverflow(
            f"{name} has {len(prompt)} tokens and {limit} asks for {asked} more; the model's context is "
            f"{card.context_length} tokens. Ask for at most {left}, or shorten the prompt.", param=limit,
        )  # fmt: skip
    return left
