"""Tonle serves language models: an engine of its own, an OpenAI-compatible server, one Python package.

    from tonle import LLM
    LLM().generate(["The capital of France is"])

Names are resolved on first use, so that `import tonle` costs nothing and `tonle bench` never loads torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "LLM": "tonle.engine",
    "InferenceEngine": "tonle.engine",
    "EngineConfig": "tonle.engine",
    "GenerationConfig": "tonle.engine",
    "GenerationResult": "tonle.engine",
    "RequestPriority": "tonle.engine",
    "StructuredOutput": "tonle.engine",
    "create_optimized_engine": "tonle.inference_optimizer",
    "InferenceConfig": "tonle.inference_optimizer",
    "ResponseCache": "tonle.cache",
    "PerformanceOptimizer": "tonle.performance_optimizer",
    "OptimizationConfig": "tonle.performance_optimizer",
    "OptimizationLevel": "tonle.performance_optimizer",
    "TonleError": "tonle.errors",
}

__all__ = ["LLM", "EngineConfig", "GenerationConfig", "GenerationResult", "InferenceConfig", "InferenceEngine",
           "OptimizationConfig", "OptimizationLevel", "PerformanceOptimizer", "RequestPriority", "ResponseCache",
           "StructuredOutput", "TonleError", "__version__", "create_optimized_engine"]  # fmt: skip

if TYPE_CHECKING:
    from tonle.cache import ResponseCache
    from tonle.engine import (
        LLM,
        EngineConfig,
        GenerationConfig,
        GenerationResult,
        InferenceEngine,
        RequestPriority,
        StructuredOutput,
    )
    from tonle.errors import TonleError
    from tonle.inference_optimizer import InferenceConfig, create_optimized_engine
    from tonle.performance_optimizer import OptimizationConfig, OptimizationLevel, PerformanceOptimizer


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tonle' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
