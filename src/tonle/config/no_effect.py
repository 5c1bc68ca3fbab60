"""Settings that are accepted although they change nothing here, or not what their name says: a sentence for each.

Readers of other engines' documents know them by name. Does: say what is true instead, in the log, once per process. Does
not: know which settings a class has.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

_WILL_NOT_HAPPEN, _ALWAYS_ON = logging.WARNING, logging.INFO
_ANY = object()  # whatever the value is

# By name, then by value. A value that is not here needs no explanation.
_SENTENCES: dict[str, dict[object, tuple[int, str]]] = {
    "enable_gradient_checkpointing": {
        True: (_WILL_NOT_HAPPEN, "gradient checkpointing has no meaning in inference, where no gradients are computed; to use "
                                 "less memory, lower memory_pool_size or max_num_batched_tokens"),
    },
    "memory_efficient_attention": {
        True: (_ALWAYS_ON, "memory-efficient attention is always on (paged attention)"),
        False: (_WILL_NOT_HAPPEN, "memory-efficient attention cannot be switched off: attention is always paged"),
    },
    "enable_kv_cache": {
        False: (_WILL_NOT_HAPPEN, "keys and values of running requests are always kept; what is off is their reuse by later "
                                  "requests, as with enable_prefix_caching=False"),
    },
    "enable_memory_pooling": {
        True: (_ALWAYS_ON, "memory pooling is always on: requests share one pool of KV blocks, allocated at the start"),
        False: (_WILL_NOT_HAPPEN, "memory pooling cannot be switched off: requests share one pool of KV blocks, allocated "
                                  "at the start"),
    },
    "compile_model": {
        True: (_ALWAYS_ON, "torch.compile is not used: the engine has compiled kernels of its own, on a GPU in CUDA graphs, "
                           "and always runs them where they know the model"),
        False: (_WILL_NOT_HAPPEN, "the engine's compiled kernels cannot be switched off"),
    },
    "batch_timeout_ms": {
        _ANY: (_ALWAYS_ON, "no request waits for a batch to fill: with continuous batching each one joins the next step. The "
                           "setting is for enable_continuous_batching=False"),
    },
    "gpu_memory_utilization": {
        _ANY: (_WILL_NOT_HAPPEN, "it has no effect while memory_pool_size (--kv-cache-memory) is set; set that to None"),
    },
}  # fmt: skip

_said: set[str] = set()  # by this process


def explain(name: str, value: Any) -> str | None:
    """What a setting with this value truly does. None: what it says."""
    found = _find(name, value)
    return None if found is None else found[1]


def explain_once(log: logging.Logger, names_and_values: Iterable[tuple[str, Any]]) -> None:
    """Log a line for each setting that needs one and has had none in this process."""
    for name, value in names_and_values:
        found = _find(name, value)
        if found is None:
            continue
        level, sentence = found
        line = f"{name}={value!r}: {sentence}"
        if line not in _said and log.isEnabledFor(level):
            _said.add(line)
            log.log(level, "%s", line)


def _find(name: str, value: Any) -> tuple[int, str] | None:
    by_value = _SENTENCES.get(name, {})
    return by_value.get(_ANY) or (by_value.get(value) if isinstance(value, bool) else None)
