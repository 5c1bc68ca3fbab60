"""A chat engine for a program of your own: one call per question, with a response cache, a bounded history and a latency target.

Does: cut old history, answer from the cache, share the computation of identical requests, say where each request's time went, and
whether the P95 latency meets its target. Does not: compute or cache by itself; `InferenceEngine` and `ResponseCache` do.
Runs: on the event loop of the engine's front; called from any thread and any event loop.

    from tonle.inference_optimizer import create_optimized_engine

    engine = create_optimized_engine()
    response, metadata = engine.generate("What is the capital of Cambodia?")

Importing it costs little: torch is loaded when the first engine is created.
"""

from __future__ import annotations

from tonle.cache import ResponseCache
from tonle.inference_optimizer.create import create_optimized_engine
from tonle.inference_optimizer.inference_config import InferenceConfig
from tonle.inference_optimizer.optimized_engine import OptimizedEngine
from tonle.inference_optimizer.streamed_answer import StreamedAnswer

__all__ = ["InferenceConfig", "OptimizedEngine", "ResponseCache", "StreamedAnswer", "create_optimized_engine"]
