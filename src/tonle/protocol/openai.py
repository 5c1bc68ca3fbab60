"""OpenAI's bodies as data: what callers send and what they get back.

Does: name every field we act on, with its type and a line about it (the docs page and /openapi.json come from them).
Does not: check values against a model, or decide what an unknown field means (`parse.py`, `fields.py`).
In requests null means absent. In replies, fields OpenAI does not have are left out (UNSET) unless they carry something.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Struct, UnsetType

from tonle.protocol.field_types import Integer
from tonle.protocol.field_types import about as about  # as part of this module, too
from tonle.protocol.fields import CHAT_ONLY, NO_EFFECT_MESSAGE, OtherFields
from tonle.protocol.structured_fields import StructuredFields
from tonle.protocol.tool_fields import (
    CallDelta,
    CalledFunction,
    FunctionDefinition,
    FunctionName,
    SentCall,
    SentFunction,
    ToolChoiceObject,
    ToolDefinition,
    WireCall,
)

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
FinishReason = Literal["stop", "length", "tool_calls", "function_call"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


# -- requests


class StreamOptions(Struct, kw_only=True):
    other_fields: ClassVar = OtherFields(no_effect={"include_obfuscation": NO_EFFECT_MESSAGE})
    include_usage: Annotated[bool | None, about("End the stream with a chunk that carries the usage.")] = None
    continuous_usage_stats: Annotated[bool | None, about("Put the usage so far into every chunk.")] = None


class SamplingFields(StructuredFields, kw_only=True):
    """What chat and text completions share."""

    model: Annotated[str | None, about("Name of the model; may be left out.")] = None
    max_tokens: Annotated[Integer | None, about("Most new tokens. Default of completions: 16.")] = None
    temperature: Annotated[float | None, about("0 = always the most likely token. Default: the model's, else 1.")] = (
        None
    )
    top_p: Annotated[
        float | None, about("Keep the likeliest tokens up to this total probability. Default: the model's, else 1.")
    ] = None
    n: Annotated[Integer | None, about("Independent answers. Default 1.")] = None
    stream: Annotated[bool | None, about("Send the answer as server-sent events as it is generated.")] = None
    stream_options: Annotated[StreamOptions | None, about("What a stream tells beside the answer.")] = None
    stop: Annotated[str | list[str] | None, about("End at any of these strings.")] = None
    presence_penalty: Annotated[float | None, about("-2 to 2, on tokens already in the answer.")] = None
    frequency_penalty: Annotated[float | None, about("-2 to 2, per occurrence in the answer.")] = None
    logit_bias: Annotated[dict[str, float] | None, about("Token id to bias, -100 to 100.")] = None
    seed: Annotated[int | None, about("Same seed, same draws.")] = None
    # Not OpenAI's, known from other servers.
    top_k: Annotated[
        Integer | None, about("Keep the k likeliest tokens; 0 or -1 = off. Default: the model's, else off.")
    ] = None
    min_p: Annotated[
        float | None, about("Drop tokens less likely than this share of the likeliest. Default: the model's, else 0.")
    ] = None
    repetition_penalty: Annotated[
        float | None, about("On tokens of prompt and answer; 1 = off. Default: the model's, else off.")
    ] = None
    min_tokens: Annotated[Integer | None, about("Do not end before this many new tokens. Default 0.")] = None
    ignore_eos: Annotated[bool | None, about("Do not stop at the model's end-of-sequence token.")] = None
    stop_token_ids: Annotated[list[Integer] | None, about("End at any of these tokens.")] = None
    include_stop_str_in_output: Annotated[bool | None, about("Keep the stop string in the answer.")] = None
    skip_special_tokens: Annotated[bool | None, about("Leave special tokens out of the text. Default true.")] = None
    prompt_logprobs: Annotated[
        Integer | None, about("Log-probabilities of the prompt's tokens with this many alternatives; not with stream.")
    ] = None
    return_token_ids: Annotated[bool | None, about("Also return token ids, of the prompt and of the answer.")] = None
    truncate_prompt_tokens: Annotated[
        Integer | None, about("Keep this many of the prompt's last tokens; -1 = as many as the context holds.")
    ] = None
    speculate: Annotated[
        bool | None, about("false: no speculative decoding for this request. The answer is the same. Default true.")
    ] = None
    priority: Annotated[
        int | str | None, about("critical, high, normal or low; or 0 (first) to 3. Default normal.")
    ] = None


class ContentPart(Struct, kw_only=True):
    type: Annotated[str, about("Only text.")]
    text: str | None = None


class Message(Struct, kw_only=True):
    role: Role
    content: Annotated[str | list[ContentPart] | None, about("Text, or a list of text parts.")] = None
    name: str | None = None
    tool_calls: Annotated[list[SentCall] | None, about("Calls an assistant made earlier.")] = None
    tool_call_id: Annotated[str | None, about("Which call a tool message answers.")] = None
    reasoning_content: Annotated[str | None, about("What an assistant thought earlier; for the chat template.")] = None
    reasoning: Annotated[str | None, about("Another name for reasoning_content.")] = None
    function_call: Annotated[SentFunction | None, about("Older form of tool_calls.")] = None


class ThinkingOption(Struct, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive", "auto"] = "enabled"
    budget_tokens: Annotated[Integer | None, about("Most tokens of thought.")] = None


class ReasoningOption(Struct, kw_only=True):
    effort: Effort | None = None
    max_tokens: Annotated[Integer | None, about("Most tokens of thought.")] = None
    enabled: bool | None = None
    exclude: Annotated[bool | None, about("Leave thoughts out of the reply.")] = None


class ChatRequest(SamplingFields, kw_only=True):
    messages: Annotated[list[Message], about("The conversation, oldest first.")]
    max_completion_tokens: Annotated[
        Integer | None, about("Most new tokens; overrides max_tokens. Default: the server's; see X-Tonle-Max-Tokens.")
    ] = None
    logprobs: Annotated[bool | None, about("Return log-probabilities of the answer's tokens.")] = None
    top_logprobs: Annotated[Integer | None, about("Also those of this many alternatives, 0 to 20.")] = None
    add_generation_prompt: Annotated[bool | None, about("End the prompt where the assistant begins. Default yes.")] = (
        None
    )
    continue_final_message: Annotated[
        bool | None, about("Continue the last message instead of beginning a new one; not with add_generation_prompt.")
    ] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, about("Variables for the model's chat template.")] = None

    tools: Annotated[list[ToolDefinition] | None, about("Functions that the model may call, at most 128.")] = None
    tool_choice: Annotated[
        str | ToolChoiceObject | None, about("auto (the default with tools), none, required, or which one to call.")
    ] = None
    parallel_tool_calls: Annotated[bool | None, about("Whether one answer may have several calls. Default yes.")] = None
    functions: Annotated[list[FunctionDefinition] | None, about("Older form of tools.")] = None
    function_call: Annotated[str | FunctionName | None, about("Older form of tool_choice.")] = None

    reasoning_effort: Annotated[Effort | None, about("For the chat template; none = do not think.")] = None
    enable_thinking: Annotated[bool | None, about("For the chat template: whether to think.")] = None
    thinking_token_budget: Annotated[Integer | None, about("Most tokens of thought.")] = None
    thinking: Annotated[bool | ThinkingOption | None, about("Both in one: true, false, or {type, budget_tokens}.")] = (
        None
    )
    reasoning: Annotated[
        ReasoningOption | None, about("{effort, max_tokens, enabled, exclude}: all of these in one.")
    ] = None
    include_reasoning: Annotated[bool | None, about("Whether the reply has the thoughts. Default yes.")] = None
    separate_reasoning: Annotated[bool | None, about("false = leave thoughts in content. Default true.")] = None


class CompletionRequest(SamplingFields, kw_only=True):
    other_fields: ClassVar = OtherFields(refused=CHAT_ONLY)
    prompt: Annotated[
        str | list[str | Integer | list[Integer]], about("Text, token ids, or a list of either: one answer for each.")
    ]
    echo: Annotated[bool | None, about("Begin the answer with the prompt.")] = None
    logprobs: Annotated[Integer | None, about("Return log-probabilities with this many alternatives, 0 to 20.")] = None
    best_of: Annotated[
        Integer | None,
        about("So many answers are computed, and the n with the best mean log-probability returned. Not with stream."),
    ] = None
    add_special_tokens: Annotated[bool | None, about("Let the tokenizer add its begin token. Default true.")] = None


class TokenizeRequest(Struct, kw_only=True):
    model: Annotated[str | None, about("Name of the model; may be left out.")] = None
    prompt: Annotated[str | None, about("Text to split. Give this or messages.")] = None
    messages: Annotated[list[Message] | None, about("A conversation, rendered with the chat template first.")] = None
    add_special_tokens: Annotated[bool | None, about("With prompt only. Default true.")] = None
    add_generation_prompt: Annotated[bool | None, about("With messages only. Default true.")] = None
    continue_final_message: Annotated[bool | None, about("With messages only. Default false.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, about("Variables for the model's chat template.")] = None
    # What else changes the prompt of a chat; with messages only.
    tools: Annotated[list[ToolDefinition] | None, about("With messages only: tools as the chat would have.")] = None
    tool_choice: Annotated[str | ToolChoiceObject | None, about("With none, the model is not told of tools.")] = None
    functions: Annotated[list[FunctionDefinition] | None, about("Older form of tools.")] = None
    function_call: Annotated[str | FunctionName | None, about("Older form of tool_choice.")] = None
    reasoning_effort: Annotated[Effort | None, about("For the chat template; none = do not think.")] = None
    enable_thinking: Annotated[bool | None, about("For the chat template: whether to think.")] = None
    thinking: Annotated[bool | ThinkingOption | None, about("The same: true, false, or {type}.")] = None
    reasoning: Annotated[ReasoningOption | None, about("Both in one: {effort, enabled}.")] = None
    return_token_strs: Annotated[bool | None, about("Also return each token as text.")] = None


class DetokenizeRequest(Struct, kw_only=True):
    tokens: Annotated[list[Integer], about("Token ids.")]
    model: Annotated[str | None, about("Name of the model; may be left out.")] = None
    skip_special_tokens: Annotated[bool | None, about("Default false.")] = None


# -- replies


class FieldWarning(Struct):
    """A field of the request that was accepted and did nothing."""

    param: str
    message: str


class PromptTokensDetails(Struct):
    cached_tokens: int


class CompletionTokensDetails(Struct):
    reasoning_tokens: int


class WireUsage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: Annotated[
        CompletionTokensDetails | UnsetType, about("Of answers whose thoughts are told apart.")
    ] = UNSET


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[ChatTokenLogprob]


class CompletionLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]  # where each token begins in the choice's text, characters


class PromptLogprob(Struct):
    logprob: float
    decoded_token: str
    rank: int | None  # 1 = likeliest; null = not among the alternatives asked for


# One entry per prompt token, by token id; the first token has nothing before it and so no entry.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class ChatMessage(Struct):
    content: Annotated[str | None, about("null if there is nothing but calls or thoughts.")]
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[WireCall] | UnsetType = UNSET
    function_call: CalledFunction | UnsetType = UNSET
    reasoning_content: Annotated[str | UnsetType, about("What the model thought before it answered.")] = UNSET
    reasoning: Annotated[str | UnsetType, about("The same under its newer name.")] = UNSET


class ChatChoice(Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    stop_reason: str | int | UnsetType = UNSET  # the stop string or token that matched
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: WireUsage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET
    warnings: list[FieldWarning] | UnsetType = UNSET


class ChatDelta(Struct):
    content: str | UnsetType = UNSET
    role: Literal["assistant"] | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET
    function_call: CalledFunction | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: WireUsage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    warnings: list[FieldWarning] | UnsetType = UNSET


class CompletionChoice(Struct, kw_only=True):
    """Of a whole answer and of a chunk alike; only in a chunk may `finish_reason` be null."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Struct, kw_only=True):
    """A whole answer, or a chunk of one: OpenAI gives both the same shape."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: WireUsage | UnsetType | None = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET
    warnings: list[FieldWarning] | UnsetType = UNSET


class ModelInfo(Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "tonle"
    root: str  # the model behind an alias; of an adapter its folder, for callers that may load adapters
    parent: str | None = None
    max_model_len: int
    digest: Annotated[str | UnsetType, about("Of an adapter: SHA-256 of its content.")] = UNSET


class ModelList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelInfo]


class Tokens(Struct, kw_only=True):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | UnsetType = UNSET
    warnings: list[FieldWarning] | UnsetType = UNSET


class Detokenized(Struct, kw_only=True):
    prompt: str
    warnings: list[FieldWarning] | UnsetType = UNSET


class Health(Struct, kw_only=True):
    status: Literal["healthy", "unhealthy"]
    reason: str | None = None  # why unhealthy
    model: str
    running: int  # requests
    waiting: int
    kv_usage: float  # 0..1
    uptime_s: float


class ErrorDetail(Struct):
    message: str
    type: Annotated[
        str,
        about("invalid_request_error, rate_limit_error (429), service_unavailable_error (503, 504) or server_error."),
    ]
    param: Annotated[str | None, about("The field at fault, if any.")] = None
    code: Annotated[
        str | None, about("The reason in one word: context_length_exceeded, rate_limit_exceeded, shutting_down, ...")
    ] = None


class ErrorBody(Struct):
    error: ErrorDetail
