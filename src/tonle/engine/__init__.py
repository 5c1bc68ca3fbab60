"""Tokens in, tokens out: continuous batching over a paged KV cache.

Does: template and tokenize (front), schedule, run, sample, detokenize. Does not: know about HTTP, wire types or other engines.
Runs: the front in the caller's process, the loop in its own process (serving) or a thread (library).

    InferenceEngine   use a model in your own process
    LLM               whole batches, offline
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tonle.config.engine import EngineConfig
from tonle.engine.request import GenerationConfig, GenerationResult, RequestPriority, StructuredOutput

if TYPE_CHECKING:
    from tonle.engine.inference_engine import InferenceEngine
    from tonle.engine.llm import LLM

__all__ = ["LLM", "EngineConfig", "GenerationConfig", "GenerationResult", "InferenceEngine", "RequestPriority",
           "StructuredOutput"]  # fmt: skip


def __getattr__(name: str) -> Any:
    # InferenceEngine and LLM import torch, which a server's front must not.
    if name == "InferenceEngine":
        from tonle.engine.inference_engine import InferenceEngine

        return InferenceEngine
    if name == "LLM":
        from tonle.engine.llm import LLM

        return LLM
    raise AttributeError(f"module 'tonle.engine' has no attribute {name!r}")
