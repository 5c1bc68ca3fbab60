"""`AdapterConfig`: what adapter_config.json says about an adapter: ranks, scaling, and which matrices it changes.

Does: read what PEFT writes, with PEFT's meaning, and refuse by name each setting under which the folder's tensors alone do not
say what the adapter computes. Does not: read tensors. The file may come from anywhere: sizes, values and the time that its
patterns may take are bounded.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import regex

from tonle.config.model_json import read_json
from tonle.errors import ModelError
from tonle.models.adapters.adapter import MAX_RANK

_MAX_FILE_BYTES = 4 * 2**20
_MAX_PATTERNS = 2_000  # of one setting: a rank of its own for every matrix of a large model takes some hundreds
_MAX_PATTERN_LENGTH = 10_000  # letters
_PLAIN = re.compile(r"[\w.]+")  # a name: most keys are
_MATCHING_SECONDS = 1.0  # for all patterns together: one that was made to be slow holds up nothing else

MERGE = "merge the adapter into the model (merge_and_unload of peft) and serve the result"

# Settings that change what is computed, beyond adding B A to a matrix.
_REFUSED = {
    "use_dora": "DoRA adapters are not supported: they also rescale the model's own weights",
    "modules_to_save": "whole modules saved with an adapter (embeddings, lm_head, norms) are not supported",
    "trainable_token_indices": "trained embeddings of single tokens are not supported",
    "lora_bias": "biases are not supported",
    "fan_in_fan_out": "matrices stored as (in, out) are not supported",
    "layer_replication": "replicated layers are not supported",
    "target_parameters": "adapters of single parameters are not supported",
    "alora_invocation_tokens": "activated LoRA (aLoRA) is not supported",
    "use_qalora": "QALoRA adapters are not supported",
    "use_bdlora": "block-diagonal adapters are not supported",
    "arrow_config": "Arrow routing between adapters is not supported",
    "kasa_config": "KaSA adapters are not supported",
    "monteclora_config": "MonteCLoRA adapters are not supported",
}
# These start by changing the model's own weights, and the folder does not hold the change.
_CHANGED_BASES = ("pissa", "corda", "olora", "loftq", "lora_ga")


_T = TypeVar("_T", int, float)


class AdapterConfig:
    """One adapter's settings. A path is a module's in the model, such as model.layers.0.self_attn.q_proj."""

    def __init__(self, file: Path) -> None:
        """Raises `ModelError` naming the file and the setting."""
        if file.stat().st_size > _MAX_FILE_BYTES:
            raise ModelError(f"{file}: has {file.stat().st_size} bytes; adapter_config.json has some hundreds")
        self._file = file
        self._config = read_json(file)
        self._matching_until_s = time.monotonic() + _MATCHING_SECONDS
        self._refuse()
        self._rank = self._checked_rank("r", self._config.get("r", 8))
        self._alpha = self._checked_alpha("lora_alpha", self._config.get("lora_alpha", 8))
        self._ranks = self._patterns("rank_pattern", self._checked_rank)
        self._alphas = self._patterns("alpha_pattern", self._checked_alpha)
        self._targets = self._names("target_modules")
        self._excluded = self._names("exclude_modules") or frozenset()
        self._layers = self._layer_numbers()

    @property
    def base_model(self) -> str | None:
        """What the adapter was trained on; never opened."""
        name = self._config.get("base_model_name_or_path")
        return name if isinstance(name, str) and name else None

    @property
    def says_targets(self) -> bool:
        return self._targets is not None

    def rank(self, path: str) -> int:
        return next((rank for key, rank in self._ranks if self._ends_with(key, path)), self._rank)

    def scaling(self, path: str) -> float:
        """What B A is multiplied by."""
        alpha = next((alpha for key, alpha in self._alphas if self._ends_with(key, path)), self._alpha)
        rank = self.rank(path)
        return alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)

    def targets(self, path: str, layer: int) -> bool:
        """Whether it says that it changes this module; always, if it does not say which ones it changes."""
        if self._is_named(path, self._excluded):
            return False
        if self._targets is None or self._targets == "all-linear":
            return True
        if isinstance(self._targets, str):
            return self._matches(self._targets, path)  # PEFT ignores layers_to_transform beside a pattern
        return path in self._targets or (
            self._is_named(path, self._targets) and (self._layers is None or layer in self._layers)
        )

    def _refuse(self) -> None:
        kind = self._config.get("peft_type")
        if kind != "LORA":
            raise self._error("peft_type", f"is {shown(kind)}; only LORA adapters are supported; {MERGE}")
        for setting, reason in _REFUSED.items():
            if self._config.get(setting):
                raise self._error(setting, f"is {shown(self._config[setting])}: {reason}; {MERGE}")
        if self._config.get("bias", "none") != "none":
            raise self._error("bias", f"is {shown(self._config['bias'])}: biases are not supported; {MERGE}")
        start = str(self._config.get("init_lora_weights")).lower()
        if start.startswith(_CHANGED_BASES):
            raise self._error(
                "init_lora_weights",
                f"is {shown(start)}, which also changes the model's own weights; save it as plain LoRA "
                f"(path_initial_model_for_weight_conversion of peft's save_pretrained), or {MERGE}",
            )

    def _checked_rank(self, setting: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._error(setting, f"should be a whole number from 1 to {MAX_RANK}, not {shown(value)}")
        if value > MAX_RANK:
            raise self._error(setting, f"is {shown(value)}: ranks above {MAX_RANK} are not supported; {MERGE}")
        return value

    def _checked_alpha(self, setting: str, value: Any) -> float:
        try:
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                return float(value)
        except OverflowError:
            pass
        raise self._error(setting, f"should be a finite number, not {shown(value)}")

    def _patterns(self, setting: str, check: Callable[[str, Any], _T]) -> list[tuple[str, _T]]:
        patterns = self._config.get(setting) or {}
        if not isinstance(patterns, dict):
            raise self._error(setting, f"should be an object of names and numbers, not {shown(patterns)}")
        self._check_sizes(setting, patterns)
        return [(key, check(f"{setting} of {shown(key)}", value)) for key, value in patterns.items()]

    def _names(self, setting: str) -> frozenset[str] | str | None:
        """Names that a path may end with, or a pattern for all of it."""
        names = self._config.get(setting) or None
        if isinstance(names, str):
            self._check_sizes(setting, [names])
            return "all-linear" if names.lower() == "all-linear" else names
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise self._error(setting, f"should be a list of names or one pattern, not {shown(names)}")
        return None if names is None else frozenset(names)

    def _layer_numbers(self) -> frozenset[int] | None:
        layers = self._config.get("layers_to_transform")
        if layers is None or layers == []:
            return None
        numbers = layers if isinstance(layers, list) else [layers]
        if not all(isinstance(number, int) for number in numbers):
            raise self._error("layers_to_transform", f"should be layers' numbers, not {shown(layers)}")
        return frozenset(numbers)

    def _check_sizes(self, setting: str, patterns: Iterable[str]) -> None:
        for count, pattern in enumerate(patterns):
            if count == _MAX_PATTERNS or len(pattern) > _MAX_PATTERN_LENGTH:
                raise self._error(
                    setting, f"may hold {_MAX_PATTERNS} patterns of {_MAX_PATTERN_LENGTH} letters, this is more"
                )

    def _is_named(self, path: str, names: frozenset[str] | str) -> bool:
        if isinstance(names, str):
            return self._matches(names, path)
        words = path.split(".")
        return any(".".join(words[start:]) in names for start in range(len(words)))

    def _ends_with(self, key: str, path: str) -> bool:
        """Whether the path's last words match the key, which is most often a plain name."""
        if path == key or path.endswith(f".{key}"):
            return True
        return not _PLAIN.fullmatch(key) and self._matches(key, path, before=r"(.*\.)?")

    def _matches(self, pattern: str, path: str, *, before: str = "") -> bool:
        """Whether `before`, then the pattern, match the whole path."""
        left_s = max(self._matching_until_s - time.monotonic(), 1e-3)
        try:
            return regex.fullmatch(f"{before}({pattern})", path, timeout=left_s, concurrent=True) is not None
        except TimeoutError:
            raise ModelError(f"{self._file}: matching the pattern {shown(pattern)} takes too long") from None
        except (regex.error, RecursionError, OverflowError) as error:
            raise ModelError(f"{self._file}: {shown(pattern)} is not a valid pattern: {error}") from None

    def _error(self, setting: str, complaint: str) -> ModelError:
        return ModelError(f"{self._file}: {setting} {complaint}")


def shown(value: Any) -> str:
    """Something from a file, for a message: on one line, and not endless."""
    text = value if isinstance(value, str) and value and value.isprintable() else ascii(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
