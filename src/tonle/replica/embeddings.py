"""POST /v1/embeddings: texts in, vectors out.

Does: parse, tokenize, check each input against the model, have the engine compute all, encode the reply. Inputs of one request
are withdrawn together if its caller leaves. Does not: pool (the engine does), or know HTTP.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import msgspec
import numpy as np
from msgspec import UNSET

from tonle.engine.embedding import Embedding, check_fits, normalized
from tonle.engine.messages import ModelCard
from tonle.engine.request import RequestPriority
from tonle.engine.text import Text
from tonle.errors import ContextOverflow, InvalidRequest
from tonle.protocol.adapters import ADAPTER_HEADER, header_value
from tonle.protocol.embeddings import EmbeddingRequest, EncodedEmbeddings
from tonle.protocol.parse import parse, warning_headers
from tonle.protocol.pooling_bodies import as_inputs, check_reply_size, encoded, pooling_usage
from tonle.replica.endpoints import EndpointReply
from tonle.replica.generate import THREAD_BYTES
from tonle.replica.replica import Replica, ReplicaRequest
from tonle.replica.template_messages import template_messages
from tonle.replica.translate import check_prompt, read_priority_field

CHARS_PER_TOKEN = 16  # of a text that is cut: as much of it is looked at for each token that is used


@dataclass(frozen=True, slots=True)
class EmbeddingOrder:
    """What one HTTP request asks of the engine."""

    prompts: list[list[int]]
    pooling: str
    normalize: bool
    encoding: str
    priority: RequestPriority


async def embeddings(replica: Replica, request: ReplicaRequest) -> EndpointReply:
    asked, warnings = parse(request.body, EmbeddingRequest)
    card = replica.card()
    model = replica.resolve(asked.model)
    adapter = replica.adapter(model)
    replica.check_strict(request, warnings)
    is_long = len(request.body) > THREAD_BYTES
    text = replica.front.text
    order = (
        await asyncio.to_thread(embedding_order, asked, text, card) if is_long else embedding_order(asked, text, card)
    )
    found: list[Embedding] = []
    try:
        found = await replica.front.embed(
            order.prompts, pooling=order.pooling, priority=order.priority, salt=request.salt, adapter=adapter
        )
    finally:
        _observe(replica, order, found)
    vectors = np.stack([each.vector for each in found])
    reply = EncodedEmbeddings(
        id=request.answer_id("embd"), created=int(time.time()), model=model,
        data=await encoded(normalized(vectors) if order.normalize else vectors, order.encoding),
        usage=pooling_usage([(each.usage.prompt_tokens, each.usage.cached_tokens) for each in found]),
        warnings=warnings or UNSET,
    )  # fmt: skip
    headers = warning_headers(warnings) | _time_headers(found)
    if (info := found[0].adapter) is not None:
        headers[ADAPTER_HEADER] = header_value(info.name, info.digest)
    return EndpointReply(msgspec.json.encode(reply), headers=headers)


def embedding_order(asked: EmbeddingRequest, text: Text, card: ModelCard) -> EmbeddingOrder:
    """Raises `CallerError`."""
    _check_dimensions(asked, card)
    encoding = asked.encoding_format or "float"
    prompts = _prompts(asked, text, card)
    check_reply_size(len(prompts), card.hidden_size, encoding)
    normalize = asked.normalize if asked.normalize is not None else asked.use_activation
    return EmbeddingOrder(
        prompts, asked.pooling or "last", normalize is not False, encoding, read_priority_field(asked.priority)
    )


def _check_dimensions(asked: EmbeddingRequest, card: ModelCard) -> None:
    if asked.dimensions not in (None, card.hidden_size):
        raise InvalidRequest(
            f"dimensions must be {card.hidden_size}, the model's own, or be left out: the model was not trained to give "
            "shorter embeddings, and the first numbers of a vector alone mean little", param="dimensions",
        )  # fmt: skip


def _prompts(asked: EmbeddingRequest, text: Text, card: ModelCard) -> list[list[int]]:
    if (asked.input is None) == (asked.messages is None):
        raise InvalidRequest("give either input or messages", param="input")
    cut = _Cut.of(asked, card)
    if asked.messages is not None:
        prompt = text.encode_chat(
            template_messages(asked.messages),
            add_generation_prompt=asked.add_generation_prompt is True,
            extra=asked.chat_template_kwargs,
        )
        return [_checked(prompt, "messages", cut, card)]
    inputs = as_inputs(asked.input)
    special = asked.add_special_tokens is not False
    prompts = []
    for place, each in enumerate(inputs):
        name = "input" if len(inputs) == 1 else f"input[{place}]"
        prompt = each if isinstance(each, list) else _encode(each, name, text, cut, special)
        prompts.append(_checked(prompt, name, cut, card))
    return prompts


@dataclass(frozen=True, slots=True)
class _Cut:
    """How inputs that are too long are cut."""

    num_tokens: int | None  # None: not at all
    keeps_end: bool

    @classmethod
    def of(cls, asked: EmbeddingRequest, card: ModelCard) -> _Cut:
        most = asked.truncate_prompt_tokens
        if most is not None and (most == 0 or most < -1):
            raise InvalidRequest(
                "truncate_prompt_tokens must be 1 or more, or -1 for as many as the model takes",
                param="truncate_prompt_tokens",
            )
        if most is None:
            return cls(None, False)
        return cls(
            card.context_length if most == -1 else min(most, card.context_length), asked.truncation_side == "left"
        )

    def text(self, text: str) -> str:
        """As much of a text as can matter: tokens of what is cut off need not be found."""
        if self.num_tokens is None:
            return text
        most = self.num_tokens * CHARS_PER_TOKEN
        return text[-most:] if self.keeps_end else text[:most]

    def tokens(self, prompt: list[int]) -> list[int]:
        if self.num_tokens is None:
            return prompt
        return prompt[-self.num_tokens :] if self.keeps_end else prompt[: self.num_tokens]


def _encode(given: str, name: str, text: Text, cut: _Cut, special: bool) -> list[int]:
    try:
        return text.encode(cut.text(given), add_special_tokens=special)
    except ContextOverflow as error:  # far too long: it was not tokenized to its end
        message = error.message.replace("the prompt", name, 1).replace("Shorten the prompt", "Shorten it")
        raise ContextOverflow(message, param=name) from None


def _checked(prompt: list[int], name: str, cut: _Cut, card: ModelCard) -> list[int]:
    prompt = cut.tokens(prompt)
    check_prompt(prompt, name, card)
    check_fits(prompt, card.context_length, name)
    return prompt


def _time_headers(found: list[Embedding]) -> dict[str, str]:
    """As of an answer sent whole: the slowest's."""
    queue = max(each.timings.queue_s or 0.0 for each in found)
    prefill = max((each.timings.finished_s or 0.0) - (each.timings.scheduled_s or 0.0) for each in found)
    return {"x-queue-time": f"{queue:.6f}", "x-prefill-time": f"{prefill:.6f}"}


def _observe(replica: Replica, order: EmbeddingOrder, found: list[Embedding]) -> None:
    """`found` is empty if it came to nothing."""
    metrics = replica.metrics
    for each in found:
        timings = each.timings
        metrics.prompt_tokens.observe(each.usage.prompt_tokens)
        metrics.count_finished("stop")
        if timings.queue_s is None or timings.latency_s is None:
            continue
        metrics.queue.observe(timings.queue_s)
        metrics.e2e.observe(timings.latency_s)
        metrics.inference.observe(timings.latency_s - timings.queue_s)
    for _ in range(0 if found else len(order.prompts)):
        metrics.count_finished("abort")
