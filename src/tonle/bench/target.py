"""Find out, before measuring, which model the server offers and how it counts the tokens of a prompt.

Does: ask /v1/models, /tokenize and one or two one-token completions. Does not: measure anything.

Two kinds of synthetic prompt. `ids`: random token ids out of those that plain words have, so that a prompt has exactly
the wanted tokens; needs /tokenize and a completions endpoint that takes ids. `words`: text, its length fitted to what
the server says about two probes in its usage.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from time import perf_counter
from typing import Any

import msgspec

from tonle.bench.datasets.data_workload import DataWorkload
from tonle.bench.datasets.read_data import read_data
from tonle.bench.drive import send_job
from tonle.bench.measure import Sample
from tonle.bench.options import BenchOptions
from tonle.bench.synthetic import ASSUMED_IDS, PromptScale, SyntheticWorkload
from tonle.bench.words import WORDS
from tonle.bench.workload import Workload, build_job
from tonle.edge.buffered_reply import BufferedReply, fetch
from tonle.edge.client import HttpClient, UpstreamError
from tonle.errors import ConfigError
from tonle.protocol.replies import body_message, read_models

ASK_TIMEOUT_S = 30.0  # for questions that need no model
READY_GRACE_S = 3.0
ASK_AGAIN_S = 0.1
MIN_POOL = 64  # different token ids, so that prompts differ
MAX_IDS_OVERHEAD = 8  # tokens a server may add to a prompt of ids (beginning-of-text)
PROBE_IDS = 32
PROBE_WORDS = 16
NO_MODELS = 'the server lists no models: "default" is sent as the model\'s name (--model sets another)'


@dataclass(frozen=True, slots=True)
class Target:
    """What the server turned out to be."""

    model: str
    workload: Workload
    notes: list[str] = field(default_factory=list)  # for the reader of the report
    scale: PromptScale | None = None  # None: prompts that are not drawn


async def explore(client: HttpClient, options: BenchOptions) -> Target:
    """Get to know the server; raise `ConfigError`, saying what to do, if no benchmark can be run against it."""
    notes: list[str] = []
    if options.kind != "chat":
        from tonle.bench.kinds.target import explore_kind

        model, workload = await explore_kind(client, options, notes)
        return Target(model, workload, notes)
    if options.replay is not None:
        from tonle.bench.datasets.replay_workload import ReplayWorkload

        replay = ReplayWorkload(options)  # first: its errors need no server
        model = await find_model(client, options.model, [])
        return Target(options.model or replay.model or model, replay, notes)
    data = None if options.file is None else read_data(options.file, options.format, options.endpoint)
    model = await find_model(client, options.model, notes)
    if data is not None:
        return Target(model, DataWorkload(options, model, data), notes + data.notes)
    scale = await _Prober(client, options, model, notes).find_scale()
    return Target(model, SyntheticWorkload(options, model, scale), notes, scale)


async def find_model(client: HttpClient, wanted: str | None, notes: list[str]) -> str:
    """The wanted model's name, or the first that the server lists. Raises `ConfigError` if the server cannot be used."""
    names = await list_models(client)
    if wanted is not None:
        return wanted
    if not names:
        notes.append(NO_MODELS)
        return "default"
    if len(names) > 1:
        notes.append(f"the server lists {len(names)} models: {names[0]} is measured (--model chooses another)")
    return names[0]


async def list_models(client: HttpClient) -> list[str]:
    """Their names, if the server tells them. Raises `ConfigError` if it cannot be used."""
    reply = await _ask_models(client)
    if reply.status in (401, 403):
        raise ConfigError(f"{client.address} refuses the key: HTTP {reply.status}, {body_message(reply.body)}. "
                          "Give one with --api-key or OPENAI_API_KEY", param="api_key")  # fmt: skip
    if reply.status == 503:
        raise ConfigError(f"{client.address} is not ready: HTTP 503, {body_message(reply.body)}. Try again when it is",
                          param="url")  # fmt: skip
    return _model_names(reply)


async def _ask_models(client: HttpClient) -> BufferedReply:
    """A server that is just starting is asked again: one of its front ends may be ready before another."""
    until_s = perf_counter() + READY_GRACE_S
    while True:
        try:
            reply = await fetch(client, client.request("GET", "/v1/models", b"", {}), timeout_s=ASK_TIMEOUT_S)
        except UpstreamError as error:
            if not error.sent:
                raise ConfigError(
                    f"nothing answers at {client.address} ({error}). Start the server first (`tonle serve`), "
                    "or give its address with --url",
                    param="url",
                ) from None
            raise ConfigError(f"{client.address} did not answer GET /v1/models ({error})", param="url") from None
        if reply.status != HTTPStatus.SERVICE_UNAVAILABLE or perf_counter() > until_s:
            return reply
        await asyncio.sleep(ASK_AGAIN_S)


def _model_names(reply: BufferedReply) -> list[str]:
    if reply.status != 200:
        return []
    try:
        return [model.id for model in read_models(reply.body)]
    except msgspec.MsgspecError:
        return []


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Prober:
    """Owns the search for a `PromptScale`."""

    def __init__(self, client: HttpClient, options: BenchOptions, model: str, notes: list[str]) -> None:
        self._client = client
        self._options = options
        self._model = model
        self._notes = notes
        self._rng = random.Random(f"{options.seed}/probe")

    async def find_scale(self) -> PromptScale:
        kind = self._options.prompt_kind
        if kind == "words" or self._options.endpoint == "chat" or self._options.turns is not None:
            return await self._fit_words()
        pool = await self._token_pool()
        if pool is None and kind == "auto":
            return await self._fit_words()
        scale = await self._try_ids(pool or tuple(ASSUMED_IDS))
        return scale or await self._fit_words()

    async def _try_ids(self, pool: tuple[int, ...]) -> PromptScale | None:
        """None: the server does not read a list of token ids as such, and words may be used instead."""
        sample = await self._probe(self._rng.choices(pool, k=PROBE_IDS))
        if sample.failure is not None:
            reason = sample.failure
        elif sample.prompt_tokens is None:
            return PromptScale("ids", pool)
        else:
            overhead = sample.prompt_tokens - PROBE_IDS
            if 0 <= overhead <= MAX_IDS_OVERHEAD:
                return PromptScale("ids", pool, overhead)
            reason = f"it counts {PROBE_IDS} ids as {sample.prompt_tokens} tokens"
        if self._options.prompt_kind == "ids":
            raise ConfigError(f"the server takes no token ids as prompt ({reason}); use --prompt-kind words",
                              param="prompt_kind")  # fmt: skip
        self._notes.append(f"prompts are words: the server takes no token ids ({reason})")
        return None

    async def _fit_words(self) -> PromptScale:
        few, many = PROBE_WORDS, PROBE_WORDS + min(max(self._options.input_tokens.high, 64), 512)
        counts: list[int | None] = []
        for length in (few, many):
            sample = await self._probe(" ".join(self._rng.choices(WORDS, k=length)))
            if sample.failure is not None:
                raise ConfigError(f"the server does not answer a simple request: {sample.failure}", param="url")
            counts.append(sample.prompt_tokens)
        if counts[0] is None or counts[1] is None:
            self._notes.append("prompt lengths are estimates, one token per word: the server reports no usage")
            return PromptScale("words", WORDS)
        slope = max((counts[1] - counts[0]) / (many - few), 0.01)
        return PromptScale("words", WORDS, max(0.0, counts[0] - slope * few), slope)

    async def _probe(self, content: str | list[int]) -> Sample:
        endpoint = self._options.endpoint or ("completions" if self._options.turns is None else "chat")
        job = build_job(self._options, self._model, endpoint, 0, content, output_tokens=1)
        return await send_job(self._client, replace(job, exact_tokens=None), timeout_s=self._options.timeout_s)

    async def _token_pool(self) -> tuple[int, ...] | None:
        """Token ids that stand for plain words; None if the server does not tell."""
        half = len(WORDS) // 2
        first = await self._tokenize(" ".join(WORDS[:half]))
        second = await self._tokenize(" ".join(WORDS[half:]))
        # No word is in both halves: an id that is came from elsewhere, such as a beginning-of-text token.
        pool = set(first) ^ set(second)
        return tuple(sorted(pool)) if len(pool) >= MIN_POOL else None

    async def _tokenize(self, text: str) -> list[int]:
        """Ids of a text, or none. vLLM and Tonle call it `prompt`, llama-server `content`."""
        bodies: tuple[dict[str, Any], ...] = (
            {"model": self._model, "prompt": text, "add_special_tokens": False},
            {"content": text, "add_special": False},
        )
        for body in bodies:
            request = self._client.request("POST", "/tokenize", msgspec.json.encode(body), {})
            try:
                reply = await fetch(self._client, request, timeout_s=ASK_TIMEOUT_S)
                tokens = msgspec.json.decode(reply.body, type=_Tokens).tokens if reply.status == 200 else []
            except (UpstreamError, msgspec.MsgspecError):
                continue
            if tokens:
                return tokens
        return []
