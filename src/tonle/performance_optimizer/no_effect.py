"""Settings of `OptimizationConfig` that change nothing here: what is true instead, in one sentence each.

Does: the sentences, and saying each once per process in the log. Does not: refuse anything.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

_SPECULATION = "no effect in this version: there is no draft model, each step adds one token to each sequence"
# By name: what to say of True and of False; None = nothing, the engine does just that.
_SENTENCES: dict[str, tuple[str | None, str | None]] = {
    "enable_speculative_decoding": (_SPECULATION, None),
    "enable_memory_pooling": (
        "always on: the KV cache is one pool, allocated when the engine starts",
        "no effect: the KV cache is always one pool, allocated when the engine starts",
    ),
    "compile_model": (
        "always on: the engine's kernels are compiled and kept on disk; torch.compile is not used",
        "no effect: the engine's kernels are always compiled (not by torch.compile)",
    ),
    "enable_gradient_checkpointing": (
        "no effect: it saves memory in training; generating keeps no gradients",
        None,
    ),
    "memory_efficient_attention": (
        "always on: attention runs over the blocks of the KV cache",
        "no effect: attention always runs over the blocks of the KV cache",
    ),
}

_said: set[str] = set()
_lock = threading.Lock()


def explain(name: str, value: Any) -> str | None:
    """What is true of this setting; None: it does what it says."""
    if name == "speculation_length":
        return _SPECULATION
    of_true, of_false = _SENTENCES.get(name, (None, None))
    return of_true if value else of_false


def explain_once(log: logging.Logger, names_and_values: Mapping[str, Any]) -> None:
    """Say of these settings what is true of them, each sentence once per process: a warning where something was asked for
    that will not happen."""
    settings_of: dict[str, list[str]] = {}
    for name, value in names_and_values.items():
        if (sentence := explain(name, value)) is not None:
            settings_of.setdefault(sentence, []).append(f"{name}={value}")
    with _lock:
        new = [sentence for sentence in settings_of if sentence not in _said]
        _said.update(new)
    for sentence in new:
        level = logging.INFO if sentence.startswith("always") else logging.WARNING
        log.log(level, "%s: %s", ", ".join(settings_of[sentence]), sentence)
