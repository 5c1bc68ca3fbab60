"""POST /v1/embeddings of a pool of encoders: texts in, vectors out.

Does: parse, tokenize, check each input against the model, have the pool compute all, encode the reply. Each input is a job of
its own: the pool batches them with those of other requests. Does not: compute.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from msgspec import UNSET

from tonle.edge.client import Sink
from tonle.errors import InvalidRequest
from tonle.protocol.embeddings import EncodedEmbeddings, EncoderRequest
from tonle.protocol.parse import parse
from tonle.protocol.pooling_bodies import as_inputs, check_reply_size, encoded, pooling_usage
from tonle.workers.encoders.text import Cut, EncoderText, Tokens
from tonle.workers.encoders.token_job import token_job
from tonle.workers.endpoints.encoder_pool import answer_id, check_strict, on_thread, run_jobs, send, text_of
from tonle.workers.kind import Job
from tonle.workers.pool import WorkerPool
from tonle.workers.worker_request import WorkerRequest


@dataclass(frozen=True, slots=True)
class EmbeddingJobs:
    """What one HTTP request asks of the pool."""

    jobs: list[Job]  # one for each input; their size is in tokens
    encoding: str


async def embeddings(request: WorkerRequest, pool: WorkerPool, sink: Sink) -> None:
    asked, warnings = parse(request.body, EncoderRequest)
    check_strict(request, warnings)
    text = await text_of(pool)
    order = await on_thread(request, lambda: embedding_jobs(asked, text))
    results = await run_jobs(pool, order.jobs)
    vectors = np.stack([np.frombuffer(result.media[0], "<f4") for result in results])
    reply = EncodedEmbeddings(
        id=answer_id(request, "embd"), created=int(time.time()), model=pool.model,
        data=await encoded(vectors, order.encoding), usage=pooling_usage([(job.size, 0) for job in order.jobs]),
        warnings=warnings or UNSET,
    )  # fmt: skip
    send(sink, reply, warnings)


def embedding_jobs(asked: EncoderRequest, text: EncoderText) -> EmbeddingJobs:
    """Raises `CallerError`."""
    if asked.input is None:
        raise InvalidRequest("input is missing", param="input")
    if asked.prompt_name is not None and asked.input_type is not None:
        raise InvalidRequest("give either prompt_name or input_type", param="prompt_name")
    dimensions = _dimensions(asked, text)
    inputs = as_inputs(asked.input)
    encoding = asked.encoding_format or "float"
    check_reply_size(len(inputs), dimensions, encoding)
    normalize = asked.normalize if asked.normalize is not None else asked.use_activation
    fields = {"normalize": normalize is not False, "dimensions": dimensions}
    return EmbeddingJobs([token_job(tokens, **fields) for tokens in _tokens(asked, inputs, text)], encoding)


def _dimensions(asked: EncoderRequest, text: EncoderText) -> int:
    """Raises `InvalidRequest`."""
    own, trained = text.facts.dimensions, text.facts.matryoshka
    wanted = own if asked.dimensions is None else asked.dimensions
    if wanted == own or (trained is not None and (wanted in trained or (not trained and 0 < wanted < own))):
        return wanted
    if trained is None:
        raise InvalidRequest(
            f"dimensions must be {own}, the model's own, or be left out: the model was not trained to give shorter "
            "embeddings, and the first numbers of a vector alone mean little", param="dimensions",
        )  # fmt: skip
    allowed = ", ".join(map(str, sorted({*trained, own}))) if trained else f"1 to {own}"
    raise InvalidRequest(
        f"dimensions must be one of those that the model was trained for: {allowed}", param="dimensions"
    )


def _tokens(asked: EncoderRequest, inputs: list[str | list[int]], text: EncoderText) -> list[Tokens]:
    names = ["input"] if len(inputs) == 1 else [f"input[{place}]" for place in range(len(inputs))]
    cut = _cut(asked, text)
    texts = [each for each in inputs if isinstance(each, str)]
    if len(texts) == len(inputs):  # they are all texts, or all ids
        prompt = text.prompt(asked.prompt_name, asked.input_type)
        return text.encode(texts, names, prompt=prompt, cut=cut, special=asked.add_special_tokens is not False)
    found = []
    for each, name in zip(inputs, names, strict=True):
        try:
            ids = np.array(each, np.int32)
        except OverflowError:
            raise InvalidRequest(f"{name}: the model has tokens 0 to {text.facts.vocab_size - 1}", param=name) from None
        if cut is not None:
            ids = ids[-cut.num_tokens :] if cut.keeps_end else ids[: cut.num_tokens]
        found.append(text.checked(ids, name))
    return found


def _cut(asked: EncoderRequest, text: EncoderText) -> Cut | None:
    most = asked.truncate_prompt_tokens
    if most is None:
        return None
    if most == 0 or most < -1:
        raise InvalidRequest(
            "truncate_prompt_tokens must be 1 or more, or -1 for as many as the model takes",
            param="truncate_prompt_tokens",
        )
    longest = text.facts.max_tokens
    return Cut(longest if most == -1 else min(most, longest), asked.truncation_side == "left")
