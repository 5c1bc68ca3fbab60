"""OpenVINO GenAI's continuous batching, alone in a process: requests in, tokens of each step out.

Does: hold the pipeline, add requests between steps, send one message per step.
Does not: know HTTP or text. `step` never lets go of Python's lock, so nothing else may live in this process.
"""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import openvino
import openvino_genai

CACHE_GIB = 1  # for keys and values, as much as Tonle takes by default
MAX_NUM_SEQS = 64


class NewRequest(NamedTuple):
    """To the pipeline. `None` in its place ends the process."""

    request_id: int
    prompt_ids: list[int]
    max_tokens: int
    ignore_eos: bool


class NewTokens(NamedTuple):
    """From the pipeline: what one step brought for one request. A list of these is one message."""

    request_id: int
    token_ids: list[int]
    finish_reason: str | None  # None: more will come


_FINISH_REASONS = {
    openvino_genai.GenerationFinishReason.STOP: "stop",
    openvino_genai.GenerationFinishReason.LENGTH: "length",
}


def run_pipeline(folder: str, mail: Connection) -> None:
    """Load the model, send an empty list for "ready", then serve until told to end or the other side is gone."""
    pipeline = openvino_genai.ContinuousBatchingPipeline(folder, _scheduling(), "CPU", {})
    mail.send([])
    handles: dict[int, Any] = {}
    try:
        while True:
            while not handles or mail.poll():  # waits only when there is nothing to compute
                request = mail.recv()
                if request is None:
                    return
                handles[request.request_id] = _add(pipeline, request)
            pipeline.step()
            fresh = [news for request_id, handle in handles.items() for news in _read(request_id, handle)]
            for news in fresh:
                if news.finish_reason is not None:
                    del handles[news.request_id]
            mail.send(fresh)
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return


def _scheduling() -> openvino_genai.SchedulerConfig:
    """The library's defaults, but with prefix caching (off by default here, and all other servers have it on)."""
    config = openvino_genai.SchedulerConfig()
    config.cache_size = CACHE_GIB
    config.max_num_seqs = MAX_NUM_SEQS
    config.enable_prefix_caching = True
    return config


def _add(pipeline: Any, request: NewRequest) -> Any:
    config = openvino_genai.GenerationConfig()
    config.do_sample = False
    config.max_new_tokens = request.max_tokens
    config.ignore_eos = request.ignore_eos
    if not request.ignore_eos:
        config.set_eos_token_id(pipeline.get_config().eos_token_id)
    prompt = openvino.Tensor(np.array([request.prompt_ids], dtype=np.int64))  # (1, tokens)
    return pipeline.add_request(request.request_id, prompt, config)


def _read(request_id: int, handle: Any) -> Iterator[NewTokens]:
    while handle.can_read():
        for output in handle.read().values():
            yield NewTokens(request_id, output.generated_ids, _FINISH_REASONS.get(output.finish_reason))
