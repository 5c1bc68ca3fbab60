"""Optimized engines on a tiny model, and a bounded wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tonle.inference_optimizer import OptimizedEngine, create_optimized_engine

SHORT: dict[str, Any] = {"max_tokens": 6, "early_stopping": False}
CONTEXT = 8192  # of the tiny model, tokens
LONG: dict[str, Any] = {"max_tokens": 8000, "early_stopping": False}  # several seconds: it does not end by itself
SUM_EPSILON_S = 1e-9


def small_engine(folder: Path, **settings: Any) -> OptimizedEngine:
    # float32: the plain torch path, which has nothing to compile
    given: dict[str, Any] = {"dtype": "float32", "memory_pool_size": 32 * 2**20, "warm_up": False}
    return create_optimized_engine(str(folder), "cpu", **(given | settings))


def wait_until(condition: Callable[[], object]) -> None:
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen within a minute")


def adds_up(metadata: dict[str, Any]) -> bool:
    parts = metadata["breakdown"]
    assert all(seconds >= 0 for seconds in parts.values()), parts
    return abs(sum(parts.values()) - metadata["latency"]) < SUM_EPSILON_S
