"""Bodies of Ollama's API as requests for chat completions, completions and embeddings.

Does: name the fields of /api/chat, /api/generate, /api/embed and /api/embeddings, translate them, refuse by name what
cannot be served. Does not: reply (`reply.py`).
"""

from __future__ import annotations

from collections import deque
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from tonle.errors import InvalidRequest
from tonle.gateway.apis.chat_body import function_call, function_tool, schema_format, streamed, thinking_switch
from tonle.gateway.apis.ollama.options import Options, set_options
from tonle.gateway.parsed_request import add_warning
from tonle.protocol.field_types import Integer
from tonle.protocol.fields import OtherFields, Refusal
from tonle.protocol.openai import FieldWarning, about

RAW_TOKENS = 128  # of an answer to a raw prompt, where nothing is said: OpenAI's default would be 16
_THINK = about("Whether to think, or how hard: low, medium, high. Default: as the model does.")
_IMAGES = {"images": Refusal("this server reads text only", ([],))}
_LOADED = {"keep_alive": "models stay loaded"}
_OF_EMBEDDINGS = OtherFields(no_effect={"options": "has no effect on embeddings"}, silent=_LOADED)

Think = bool | Literal["low", "medium", "high"] | None


class CalledFunction(msgspec.Struct, kw_only=True):
    other_fields: ClassVar = OtherFields(
        silent=dict.fromkeys(("description", "index"), "not part of what the model reads")
    )
    name: str
    arguments: dict[str, Any] = {}


class EarlierCall(msgspec.Struct, kw_only=True):
    other_fields: ClassVar = OtherFields(silent={"type": "there is one kind"})
    function: CalledFunction
    id: str | None = None


class OllamaMessage(msgspec.Struct, kw_only=True):
    other_fields: ClassVar = OtherFields(refused=_IMAGES)
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: Annotated[str | None, about("What an assistant thought earlier.")] = None
    tool_calls: Annotated[list[EarlierCall] | None, about("Calls an assistant made earlier.")] = None
    tool_name: Annotated[str | None, about("Of a tool message: which tool it is the result of.")] = None
    tool_call_id: Annotated[str | None, about("Of a tool message: which call it answers.")] = None


class ToolFunction(msgspec.Struct, kw_only=True):
    name: str
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, about("JSON schema of the arguments.")] = None
    strict: bool | None = None


class OllamaTool(msgspec.Struct, kw_only=True):
    function: ToolFunction
    type: Literal["function"] = "function"


class GenerationFields(msgspec.Struct, kw_only=True):
    """What /api/chat and /api/generate share."""

    other_fields: ClassVar = OtherFields(silent=_LOADED)
    model: Annotated[str | None, about("Name of the model; may be left out if there is only one.")] = None
    stream: Annotated[bool | None, about("Default true: one JSON object per line as the answer is generated.")] = None
    format: Annotated[str | dict[str, Any] | None, about('"json", or a JSON schema for the answer.')] = None
    options: Annotated[Options | None, about("Sampling and length; see below.")] = None
    think: Annotated[Think, _THINK] = None
    logprobs: Annotated[bool | None, about("Return log-probabilities of the answer's tokens.")] = None
    top_logprobs: Annotated[Integer | None, about("Also those of this many alternatives.")] = None


class OllamaChatRequest(GenerationFields, kw_only=True):
    messages: Annotated[
        list[OllamaMessage] | None, about("The conversation; none: only see that the model is there.")
    ] = None
    tools: Annotated[list[OllamaTool] | None, about("Functions that the model may call.")] = None


class OllamaGenerateRequest(GenerationFields, kw_only=True):
    other_fields: ClassVar = OtherFields(
        refused=_IMAGES
        | {
            "suffix": Refusal("this server does not fill in the middle", ("",)),
            "template": Refusal("the model's own chat template is used; with raw, the prompt is used as it is", ("",)),
            "context": Refusal("send the conversation to /api/chat", ([],)),
            **dict.fromkeys(("height", "steps", "width"), Refusal("this server makes no images")),
        },
        silent=_LOADED,
    )
    prompt: Annotated[str | None, about("Empty: only see that the model is there.")] = None
    system: Annotated[str | None, about("Placed before the prompt.")] = None
    raw: Annotated[bool | None, about("Continue the prompt as it is, without the chat template.")] = None


class OllamaEmbedRequest(msgspec.Struct, kw_only=True):
    other_fields: ClassVar = _OF_EMBEDDINGS
    model: Annotated[str | None, about("Name of the model; may be left out if there is only one.")] = None
    input: Annotated[str | list[str], about("A text, or a list of texts: one embedding for each.")]
    dimensions: Annotated[
        Annotated[int, Meta(ge=1)] | None, about("Passed on; Tonle's own engine takes the model's own number only.")
    ] = None
    truncate: Annotated[
        bool | None, about("Default true: use the beginning of a text that is too long. false: refuse it.")
    ] = None


class OllamaEmbeddingsRequest(msgspec.Struct, kw_only=True):
    """The older form, for one text."""

    other_fields: ClassVar = _OF_EMBEDDINGS
    model: Annotated[str | None, about("Name of the model; may be left out if there is only one.")] = None
    prompt: Annotated[str, about("The text.")]


def chat_body(request: OllamaChatRequest, warnings: list[FieldWarning]) -> dict[str, Any]:
    """Raises `InvalidRequest`."""
    body: dict[str, Any] = {"messages": chat_messages(request.messages or [])}
    if request.tools:
        body["tools"] = [_tool(tool) for tool in request.tools]
    _set_generation(body, request, warnings)
    if request.logprobs:
        body["logprobs"] = True
        if request.top_logprobs is not None:
            body["top_logprobs"] = request.top_logprobs
    elif request.top_logprobs is not None:
        add_warning(warnings, "top_logprobs", "has no effect without logprobs")
    return body


def generate_body(request: OllamaGenerateRequest, warnings: list[FieldWarning]) -> dict[str, Any]:
    """A chat of one turn, or with `raw` the prompt as it is. Raises `InvalidRequest`."""
    if not request.raw:
        system = [OllamaMessage(role="system", content=request.system)] if request.system else []
        messages = [*system, OllamaMessage(role="user", content=request.prompt)]
        shared = {name: getattr(request, name) for name in GenerationFields.__struct_fields__}
        return chat_body(OllamaChatRequest(messages=messages, **shared), warnings)
    if request.logprobs:
        raise InvalidRequest("logprobs cannot be served with raw: leave one of them out", param="logprobs")
    body: dict[str, Any] = {"prompt": request.prompt or ""}
    _set_generation(body, request, warnings)
    body.setdefault("max_tokens", RAW_TOKENS)
    return body


def embed_body(request: OllamaEmbedRequest) -> dict[str, Any]:
    body: dict[str, Any] = {"input": request.input, "encoding_format": "float"}
    if request.dimensions is not None:
        body["dimensions"] = request.dimensions
    if request.truncate is not False:
        body["truncate_prompt_tokens"] = -1  # to what the model takes
    return body


def _set_generation(body: dict[str, Any], request: GenerationFields, warnings: list[FieldWarning]) -> None:
    if request.stream is not False:
        body |= streamed()
    if isinstance(request.format, dict):
        body["response_format"] = schema_format(request.format)
    elif request.format == "json":
        body["response_format"] = {"type": "json_object"}
    elif request.format:
        raise InvalidRequest('format must be "json" or a JSON schema', param="format")
    if request.think is not None and "prompt" in body:
        add_warning(warnings, "think", "has no effect with raw")
    elif isinstance(request.think, bool):
        body |= thinking_switch(on=request.think)
    elif request.think is not None:
        body["reasoning_effort"] = request.think
    if request.options is not None:
        set_options(body, request.options)


def _tool(tool: OllamaTool) -> dict[str, Any]:
    function = tool.function
    parameters = function.parameters or {"type": "object", "properties": {}}
    return function_tool(function.name, function.description, parameters, strict=function.strict)


def chat_messages(messages: list[OllamaMessage]) -> list[dict[str, Any]]:
    """Raises `InvalidRequest`."""
    chat: list[dict[str, Any]] = []
    calls = UnansweredCalls()
    for message in messages:
        told: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.thinking and message.role == "assistant":
            told["reasoning_content"] = message.thinking
        if message.tool_calls and message.role == "assistant":
            told["tool_calls"] = [
                function_call(calls.add(call.id, call.function.name), call.function.name, call.function.arguments)
                for call in message.tool_calls
            ]
        elif message.role == "tool":
            told["tool_call_id"] = message.tool_call_id or calls.take(message.tool_name)
        chat.append(told)
    return chat


class UnansweredCalls:
    """Calls have no ids in Ollama's API: here they get some, which are found again for their results."""

    def __init__(self) -> None:
        self._taken: set[int] = set()  # numbers of calls
        self._ids: list[str] = []  # by number
        self._all: deque[int] = deque()
        self._named: dict[str, deque[int]] = {}

    def add(self, call_id: str | None, name: str) -> str:
        number = len(self._ids)
        self._ids.append(call_id or f"call_{number + 1}")
        self._all.append(number)
        self._named.setdefault(name, deque()).append(number)
        return self._ids[number]

    def take(self, name: str | None) -> str:
        """The id of the first call of that tool, else of any, that has no result."""
        for waiting in (self._named.get(name or "", deque()), self._all):
            while waiting:
                number = waiting.popleft()
                if number not in self._taken:
                    self._taken.add(number)
                    return self._ids[number]
        return "call_0"
