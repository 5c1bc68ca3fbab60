"""`OptimizationConfig`: the settings of a `PerformanceOptimizer`.

A field that was not set has the value of its level. Does: check names and values when they are set, make the
`EngineConfig`, explain both. Does not: hold the values of the levels (`levels.py`).
"""

from __future__ import annotations

from typing import Any

from tonle.config.engine import EngineConfig
from tonle.config.setting_names import unknown_setting
from tonle.engine.request import MAX_N
from tonle.errors import ConfigError
from tonle.performance_optimizer.explain import explain
from tonle.performance_optimizer.levels import PRESETS, OptimizationLevel

_DEFAULTS: dict[str, Any] = {  # the same at every level
    "enable_speculative_decoding": True, "speculation_length": 4, "num_parallel_samples": 4,
    "enable_memory_pooling": True, "compile_model": True,
    "enable_gradient_checkpointing": False, "memory_efficient_attention": True, "device": "auto",
}  # fmt: skip
ENGINE_FIELDS = ("max_batch_size", "max_num_batched_tokens", "memory_pool_size", "kv_cache_dtype", "activation_bits",
                 "enable_speculative_decoding", "speculation_length")  # fmt: skip
_FP8_CAPABILITY = (8, 9)  # of a GPU


class OptimizationConfig:
    """Give what should differ from the level; None = as the level has it. A `PerformanceOptimizer` copies it: later edits
    have no effect on that one."""

    level: OptimizationLevel
    # Candidates: several continuations of each prompt are sampled, and the one with the best mean log-probability returned.
    enable_parallel_sampling: bool
    num_parallel_samples: int
    # Fields of `EngineConfig`, which says what they are.
    max_batch_size: int
    max_num_batched_tokens: int
    memory_pool_size: int | None
    kv_cache_dtype: str
    activation_bits: int
    device: str
    enable_speculative_decoding: bool
    speculation_length: int
    # Without effect, or always on: see `config/no_effect.py`.
    enable_memory_pooling: bool
    compile_model: bool
    enable_gradient_checkpointing: bool
    memory_efficient_attention: bool

    def __init__(
        self,
        *,
        level: OptimizationLevel | str = OptimizationLevel.BALANCED,
        enable_speculative_decoding: bool | None = None,
        speculation_length: int | None = None,
        enable_parallel_sampling: bool | None = None,
        num_parallel_samples: int | None = None,
        enable_memory_pooling: bool | None = None,
        compile_model: bool | None = None,
        enable_gradient_checkpointing: bool | None = None,
        memory_efficient_attention: bool | None = None,
        max_batch_size: int | None = None,
        max_num_batched_tokens: int | None = None,
        memory_pool_size: int | None = None,
        kv_cache_dtype: str | None = None,
        activation_bits: int | None = None,
        device: str | None = None,
        **misspelt: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in FIELDS}
        for name in misspelt:
            raise TypeError(unknown_setting("OptimizationConfig", name, FIELDS))
        for name, value in given.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises `AttributeError` for a name that is no field, `ConfigError` for a value that makes no sense."""
        if name not in FIELDS:
            raise AttributeError(unknown_setting("OptimizationConfig", name, FIELDS))
        if name == "level":
            value = _level(value)
        elif value is None:
            self.__dict__.pop(name, None)
            return
        else:
            _check(name, value)
        self.__dict__[name] = value

    def __getattr__(self, name: str) -> Any:
        """Of a field that was not set: the level's value, on the device that "auto" or `device` means here."""
        if name not in FIELDS:
            raise AttributeError(unknown_setting("OptimizationConfig", name, FIELDS))
        return self.value(name)

    def value(self, name: str, *, gpu: bool | None = None) -> Any:
        """A field's value as set, else as the level has it on a GPU (`gpu`) or a CPU; None: on this machine."""
        if name in self.__dict__:
            return self.__dict__[name]
        if name in _DEFAULTS:
            return _DEFAULTS[name]
        if name == "enable_parallel_sampling" and self.__dict__.get("num_parallel_samples", 1) > 1:
            return True
        gpu = self.on_gpu() if gpu is None else gpu
        found = PRESETS[self.level].value(name, gpu=gpu)
        return "auto" if found == "fp8" and not _has_fp8(self.device) else found

    def is_set(self, name: str) -> bool:
        """Whether the field was given, rather than left to the level."""
        return name in self.__dict__

    def asked_for(self) -> list[tuple[str, Any]]:
        """The settings that were given, for the log: what has no effect is worth a line only then."""
        return [(name, value) for name, value in vars(self).items() if name != "level"]

    @property
    def num_candidates(self) -> int:
        """Continuations of each prompt, where tokens are sampled."""
        return self.num_parallel_samples if self.enable_parallel_sampling else 1

    def on_gpu(self) -> bool:
        """Whether the model will run on a GPU. With "auto" that is not said of a live one, which stays where it is."""
        if self.device != "auto":
            return self.device.startswith("cuda")
        import torch

        return torch.cuda.is_available()

    def engine_config(self, *, gpu: bool | None = None) -> EngineConfig:
        """What the engine is built with. `gpu`: for a model on a GPU or a CPU; None: on this machine."""
        settings = {name: self.value(name, gpu=gpu) for name in ENGINE_FIELDS}
        if not self.is_set("enable_speculative_decoding"):
            settings["enable_speculative_decoding"] = None  # on devices where it was measured; True: on any
        return EngineConfig(**settings, device=self.device, max_sequence_length=None)

    def explain(self, *, gpu: bool | None = None) -> str:
        """Every setting with its value, where that comes from and what it does, as text to print."""
        return explain(self, gpu=self.on_gpu() if gpu is None else gpu)

    def __repr__(self) -> str:
        given = [f"level={self.level.name}", *(f"{name}={v!r}" for name, v in vars(self).items() if name != "level")]
        return f"OptimizationConfig({', '.join(given)})"

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if isinstance(other, OptimizationConfig) else NotImplemented

    __hash__ = None  # type: ignore[assignment]


FIELDS = tuple(OptimizationConfig.__annotations__)


def _level(value: Any) -> OptimizationLevel:
    if isinstance(value, OptimizationLevel):
        return value
    if isinstance(value, str) and value.upper() in OptimizationLevel.__members__:
        return OptimizationLevel[value.upper()]
    raise ConfigError(f"level must be one of {', '.join(OptimizationLevel.__members__)}, not {value!r}", param="level")


def _check(name: str, value: Any) -> None:
    """Raises `ConfigError`. The engine's own settings are checked as the engine checks them."""
    if name in ENGINE_FIELDS or name == "device":
        EngineConfig(**{name: value}).validate()
    elif name == "num_parallel_samples":
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_N:
            raise ConfigError(f"{name} must be a whole number between 1 and {MAX_N}, not {value!r}", param=name)
    elif not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, not {value!r}", param=name)


def _has_fp8(device: str) -> bool:
    import torch

    if not torch.cuda.is_available():
        return False
    found: tuple[int, int] = torch.cuda.get_device_capability(device if device.startswith("cuda") else None)
    return found >= _FP8_CAPABILITY
