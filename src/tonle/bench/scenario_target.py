"""Who answers the questions of the scenarios: the inference service, a chat endpoint, or an engine passed in as an object.

Does: ask one question and say whether the answer came from a cache; find out which of the two paths a server has.
Does not: read the clock (`scenarios.py` does), choose questions, import an engine.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, TypeVar

import msgspec

from tonle.bench.target import find_model
from tonle.bench.workload import PATHS
from tonle.edge.buffered_reply import BufferedReply, fetch
from tonle.edge.client import HttpClient, UpstreamError
from tonle.errors import ConfigError
from tonle.protocol.replies import body_message

T = TypeVar("T")

INFERENCE_PATH = "/api/v1/inference"
CHAT_PATH = PATHS["chat"]
PROBE = "Hello"


class NoAnswerError(Exception):
    """One question got no answer. The text is "kind: detail", as in `Sample.failure`."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the scenarios need to know of an answer."""

    cache_hit: bool | None = None  # None: not told
    output_tokens: int = 0  # 0: not told


class ScenarioTarget(Protocol):
    """Takes questions. `tells_cache_hits`: it has a response cache that a question may use or not, and says which it did."""

    asked_by: str
    model: str | None
    notes: list[str]
    tells_cache_hits: bool

    async def ask(self, question: str, *, use_cache: bool) -> Answer: ...


class Engine(Protocol):
    """What `run_scenarios` takes as an object. `metadata` has `cache_hit`, and may have `completion_tokens` and `model`."""

    def generate_async(self, user_input: str, *, use_cache: bool) -> Awaitable[tuple[str, dict[str, Any]]]: ...


class _Metadata(msgspec.Struct):
    cache_hit: bool
    completion_tokens: int | None = None


class _Inference(msgspec.Struct):
    metadata: _Metadata
    response: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None


class _Choice(msgspec.Struct):
    message: dict[str, Any]


class _Chat(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


@dataclass(slots=True)
class InferenceService:
    """`POST /api/v1/inference` of a Tonle server or gateway."""

    client: HttpClient
    model: str | None
    output_tokens: int
    timeout_s: float
    notes: list[str] = field(default_factory=list)
    asked_by: str = INFERENCE_PATH
    tells_cache_hits: bool = True

    async def ask(self, question: str, *, use_cache: bool) -> Answer:
        body = {
            "model": self.model, "user_input": question, "use_cache": use_cache, "max_tokens": self.output_tokens,
            "temperature": 0,
        }  # fmt: skip
        reply = await _post(self.client, INFERENCE_PATH, body, self.timeout_s)
        found = _decoded(reply, _Inference).metadata
        return Answer(found.cache_hit, found.completion_tokens or 0)


@dataclass(slots=True)
class ChatService:
    """`POST /v1/chat/completions` of any OpenAI-compatible server: says nothing about a response cache."""

    client: HttpClient
    model: str | None
    output_tokens: int
    timeout_s: float
    notes: list[str] = field(default_factory=list)
    asked_by: str = CHAT_PATH
    tells_cache_hits: bool = False

    async def ask(self, question: str, *, use_cache: bool) -> Answer:
        body = {
            "model": self.model, "messages": [{"role": "user", "content": question}], "temperature": 0,
            "max_tokens": self.output_tokens,
        }  # fmt: skip
        reply = await _post(self.client, CHAT_PATH, body, self.timeout_s)
        chat = _decoded(reply, _Chat)
        if not chat.choices:
            raise NoAnswerError("unreadable answer: it has no choices")
        usage = chat.usage or _Usage()
        return Answer(None, usage.completion_tokens or 0)


def _decoded(reply: BufferedReply, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(reply.body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise NoAnswerError(f"unreadable answer: {error}") from None


async def _post(client: HttpClient, path: str, body: dict[str, Any], timeout_s: float) -> BufferedReply:
    try:
        reply = await fetch(client, client.request("POST", path, msgspec.json.encode(body), {}), timeout_s=timeout_s)
    except UpstreamError as error:
        raise NoAnswerError(str(error)) from None
    if reply.status != 200:
        raise NoAnswerError(f"HTTP {reply.status}: {body_message(reply.body)}")
    return reply


async def find_service(
    client: HttpClient, *, model: str | None, output_tokens: int, timeout_s: float
) -> InferenceService | ChatService:
    """Which path of the server takes questions. Raises `ConfigError`, saying what to do, if none does."""
    notes: list[str] = []
    name = await find_model(client, model, notes)
    service = InferenceService(client, name, output_tokens, timeout_s, notes)
    try:
        await service.ask(PROBE, use_cache=False)
    except NoAnswerError as failure:
        missing = str(failure)
    else:
        return service
    chat = ChatService(client, name, output_tokens, timeout_s, notes)
    try:
        await chat.ask(PROBE, use_cache=False)
    except NoAnswerError as failure:
        _give_up(client, str(failure), missing)
    notes.append(
        f"the server has no {INFERENCE_PATH} ({missing}): questions went to {CHAT_PATH}, "
        "which says nothing about a response cache"
    )
    return chat


def _give_up(client: HttpClient, chat_failure: str, inference_failure: str) -> NoReturn:
    text = f"{client.address} does not answer a simple question: {CHAT_PATH} says {chat_failure}"
    if inference_failure != chat_failure:
        text += f"; {INFERENCE_PATH} says {inference_failure}"
    raise ConfigError(text, param="url")


class EngineTarget:
    """An object with `async generate_async(user_input, *, use_cache) -> (response, metadata)`."""

    tells_cache_hits = True
    asked_by = "generate_async"

    def __init__(self, engine: Engine, *, model: str | None, output_tokens: int, timeout_s: float) -> None:
        generate = getattr(engine, "generate_async", None)
        if not callable(generate):
            raise ConfigError(
                f"{type(engine).__name__} cannot be measured: it needs an async method "
                "generate_async(user_input, *, use_cache) that returns (response, metadata)",
                param="engine",
            )
        self._engine: Any = engine
        self._timeout_s = timeout_s
        self.model = model
        self.notes: list[str] = []
        self._settings: dict[str, Any] = {}
        if _takes(generate, "max_tokens"):
            self._settings["max_tokens"] = output_tokens
        else:
            self.notes.append("the engine takes no max_tokens: its answers are as long as it makes them")

    async def ask(self, question: str, *, use_cache: bool) -> Answer:
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                reply = await self._engine.generate_async(question, use_cache=use_cache, **self._settings)
        except Exception as error:  # whatever the engine raises is a failed request
            if deadline.expired():
                raise NoAnswerError(f"timeout: no answer in {self._timeout_s:g} s") from None
            raise NoAnswerError(f"{type(error).__name__}: {error}") from error
        try:
            _, metadata = reply
            self.model = self.model or metadata.get("model")
            return Answer(metadata.get("cache_hit"), metadata.get("completion_tokens") or 0)
        except (AttributeError, TypeError, ValueError):
            raise NoAnswerError(
                f"unreadable answer: generate_async returned {type(reply).__name__}, not (response, metadata)"
            ) from None


def _takes(function: Any, name: str) -> bool:
    """Whether a keyword of this name can be passed."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())
