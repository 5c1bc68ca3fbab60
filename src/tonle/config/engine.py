"""`EngineConfig`: the settings of one engine. Each has an effect, or the log says at the start why it has none."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, fields
from typing import Any

from tonle.config.adapter_names import wrong_adapter_name
from tonle.config.kv_events import read_kv_events
from tonle.config.setting_names import named_settings, unknown_setting
from tonle.config.stores import REDIS, scheme_of
from tonle.config.types import wrong_type
from tonle.errors import ConfigError

GIB = 1024**3
GENERATION_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens", "eos_token_id")
MAX_LORA_RANK = 256
MAX_DRAFT = 32  # guesses for one sequence in a step
_AT_LEAST_ONE = (
    "max_batch_size", "max_num_batched_tokens", "block_size", "default_max_tokens", "tensor_parallel_size",
)  # fmt: skip


@named_settings
@dataclass(slots=True, kw_only=True)
class EngineConfig:
    """Settings of `InferenceEngine`. The engine copies and checks them when it is built; later edits have no effect on it."""

    # Batching
    max_batch_size: int | None = 32  # sequences computed together (vLLM: max_num_seqs); None = what suits the device
    max_num_batched_tokens: int | None = None  # tokens computed in one step, prefill and decode together; None likewise
    max_sequence_length: int | None = 2048  # prompt + output, tokens; None = all the model was trained for
    long_prefill_token_threshold: int = 0  # cap on one prompt's share of a step while others run; 0 = half the step
    enable_dynamic_batching: bool = True  # False: one request at a time
    enable_continuous_batching: bool = True  # False: a batch is formed, runs to its end, then the next one is formed
    batch_timeout_ms: float = 50.0  # longest wait for a batch to fill; only without continuous batching
    priority_ageing_s: float = 5.0  # a request overtakes the next higher priority after waiting this much longer

    # Adaptive
    adaptive: bool | None = None  # move the limits of a step toward the targets as it runs; None = if a target is set
    target_itl_ms: float | None = None  # between two tokens of an answer, 99 of 100 times; comes before target_ttft_ms
    target_ttft_ms: float | None = None  # from a request's arrival to its first token, 95 of 100 times

    # Speculative decoding: guesses that a step checks besides, so that it may bring several tokens; answers stay the same
    speculation: str = "auto"  # auto = suffix | suffix: guesses from text seen before | draft_model | off
    speculation_model: str | None = None  # a smaller model with the same tokenizer, whose guesses are checked; on a CPU
    speculation_length: int | None = None  # most guesses for one sequence in a step; None = 32; fewer where fewer pay
    enable_speculative_decoding: bool | None = None  # another name: True = suffix, False = off, None = as `speculation`

    # KV cache
    enable_kv_cache: bool = True  # False: as enable_prefix_caching=False
    enable_prefix_caching: bool = True  # reuse KV blocks of equal prompt prefixes
    block_size: int = 16  # tokens per KV block
    memory_pool_size: int | None = GIB  # bytes of KV cache; None = 640 MiB on a CPU, 320 in int8; what is free on a GPU
    gpu_memory_utilization: float = 0.9  # share of a GPU's memory to use, when memory_pool_size is None
    # auto = on a CPU int8 where weights are multiplied as integers with 8-bit activations and attention has kernels for it;
    # else as the model computes | float32 | fp8: on CUDA | int8: on a CPU
    kv_cache_dtype: str = "auto"
    kv_cache_max_size: int | None = None  # most idle blocks kept for reuse; None = all that fit
    gc_threshold: float = 1.0  # share of the pool above which idle cached blocks are dropped, oldest first
    kv_events_config: dict[str, Any] | None = None  # where to announce cached blocks (vLLM's keys: `KvEventsConfig`)
    kv_offload_memory: int = 0  # bytes of host memory for blocks evicted from the device; 0 = none
    kv_offload_dir: str | None = None  # a folder for blocks evicted from there; survives a restart, may be shared
    kv_offload_disk: int = 10 * GIB  # bytes that folder may hold
    kv_offload_redis: str | None = None  # a Redis for evicted blocks, which engines share: redis://HOST:6379/0

    # With other engines (docs/scale.md)
    role: str | None = None  # prefill | decode | both: compute prompts for other engines, fetch theirs, or both
    kv_transfer_host: str = "127.0.0.1"  # address of this machine at which other engines fetch prompts
    kv_transfer_port: int = 0  # and the port; 0 = any
    kv_transfer_timeout_s: float = 10.0  # a prompt that was not fetched within this time is computed
    kv_lease_s: float = 30.0  # how long a prompt is kept for the engine that fetches it

    # Model
    device: str = "auto"  # auto | cpu | cuda | cuda:N
    tensor_parallel_size: int = 1  # devices that compute the model together, a process on each; more than 1 needs files
    dtype: str = "auto"  # auto | float32 | bfloat16 | float16
    quantization: str = (
        "auto"  # auto = as stored | none = unpacked to dtype | int8 | int4 | fp8: made when it is loaded
    )
    quantization_group_size: int = 128  # int8, int4: weights that share a scale; 0 = all of an output
    activation_bits: int = (
        8  # 8 | 16: what 4- and 8-bit weights are multiplied with on a CPU that has dot products of bytes
    )
    load_format: str = "auto"  # auto = the files | random: weights made on the device, to measure speed without files

    # Adapters (LoRA)
    lora: dict[str, str] = field(default_factory=dict)  # name -> a PEFT folder: loaded at the start
    enable_lora: bool = (
        False  # allow adapters to be loaded and unloaded while it runs; implied by `lora` (over HTTP, with keys)
    )
    max_loras: int = 8  # slots on the device: adapters computed together in one step
    max_lora_rank: int = 16  # largest rank that fits a slot; raised to the largest of `lora`
    max_cpu_loras: int = 32  # adapters kept in the host's memory, at least max_loras; others are read again when needed

    # Answers
    hold_clusters: str = "auto"  # auto | always: whether a stream's last letter waits where no mark is likely to follow
    generation_config: str = "auto"  # auto = the model's generation_config.json | none | a folder with one
    override_generation_config: dict[str, Any] | None = None  # over it: see GENERATION_KEYS
    default_max_tokens: int | None = None  # of a chat; None = 1,024 on a CPU, what the context leaves on a GPU
    chat_template: str | None = None  # a Jinja file used instead of the model's template
    special_tokens_in_content: str = "text"  # text | special: what `<|im_end|>` in a chat message is

    # Watching
    enable_metrics: bool = True
    profile_performance: bool = False  # time the parts of every step; get_stats()["profile"]
    step_log: str | None = None  # a file that gets one line of JSON per step: its work and its moments
    log_level: str = "INFO"

    # Known from other engines: accepted, and explained in the log (`no_effect.py`)
    enable_gradient_checkpointing: bool = False
    memory_efficient_attention: bool | None = None  # always on

    def validate(self) -> None:
        """Raise `ConfigError` naming the field, its value and what to do."""
        if (wrong := wrong_type(self)) is not None:
            raise ConfigError(wrong[1], param=wrong[0])
        for name in _AT_LEAST_ONE:
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}", param=name)
        for name in ("long_prefill_token_threshold", "batch_timeout_ms", "priority_ageing_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be at least 0, not {getattr(self, name)}", param=name)
        if self.max_sequence_length is not None and self.max_sequence_length < 2:
            raise ConfigError(f"max_sequence_length must be at least 2, not {self.max_sequence_length}",
                              param="max_sequence_length")  # fmt: skip
        if self.kv_cache_max_size is not None and self.kv_cache_max_size < 0:
            raise ConfigError(f"kv_cache_max_size must be at least 0, not {self.kv_cache_max_size}",
                              param="kv_cache_max_size")  # fmt: skip
        if self.memory_pool_size is not None and self.memory_pool_size < 1:
            raise ConfigError(
                f"memory_pool_size must be at least 1, not {self.memory_pool_size}", param="memory_pool_size"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization must be more than 0 and at most 1, not {self.gpu_memory_utilization}",
                              param="gpu_memory_utilization")  # fmt: skip
        if self.activation_bits not in (8, 16):
            raise ConfigError(f"activation_bits must be 8 or 16, not {self.activation_bits}", param="activation_bits")
        self._check_quantization()
        if self.load_format not in ("auto", "random"):
            raise ConfigError(f"load_format must be auto or random, not {self.load_format!r}", param="load_format")
        if self.hold_clusters not in ("auto", "always"):
            raise ConfigError(
                f"hold_clusters must be auto or always, not {self.hold_clusters!r}", param="hold_clusters"
            )
        if self.special_tokens_in_content not in ("text", "special"):
            raise ConfigError(
                f"special_tokens_in_content must be text or special, not {self.special_tokens_in_content!r}",
                param="special_tokens_in_content",
            )
        if unknown := sorted(set(self.override_generation_config or ()) - set(GENERATION_KEYS)):
            raise ConfigError(
                f"override_generation_config has unknown keys: {', '.join(unknown)}; known: {', '.join(GENERATION_KEYS)}",
                param="override_generation_config",
            )
        if not 0 < self.gc_threshold <= 1:
            raise ConfigError(
                f"gc_threshold must be more than 0 and at most 1, not {self.gc_threshold}", param="gc_threshold"
            )
        if not isinstance(logging.getLevelName(self.log_level.upper()), int):
            raise ConfigError(
                f"log_level must be DEBUG, INFO, WARNING or ERROR, not {self.log_level!r}", param="log_level"
            )
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ConfigError(f"dtype must be auto, float32, bfloat16 or float16, not {self.dtype!r}", param="dtype")
        self._check_adaptive()
        self._check_adapters()
        self._check_speculation()
        self._check_kv()
        self._check_transfers()

    def __setattr__(self, name: str, value: Any) -> None:
        """A name that is no setting raises `AttributeError`, with the closest one that is."""
        if name not in self.__slots__:
            raise AttributeError(unknown_setting("EngineConfig", name, self.__slots__))
        object.__setattr__(self, name, value)

    @property
    def reuses_prefixes(self) -> bool:
        """Whether requests reuse the KV blocks of earlier ones."""
        return self.enable_prefix_caching and self.enable_kv_cache

    def without_effect(self) -> list[tuple[str, Any]]:
        """Settings, and their values, that may change nothing or not what their name says: `no_effect.py` has the words."""
        names = ["enable_kv_cache", "enable_gradient_checkpointing", "memory_efficient_attention"]
        if self.enable_continuous_batching and self.batch_timeout_ms != _default("batch_timeout_ms"):
            names.append("batch_timeout_ms")
        if self.memory_pool_size is not None and self.gpu_memory_utilization != _default("gpu_memory_utilization"):
            names.append("gpu_memory_utilization")
        return [(name, getattr(self, name)) for name in names]

    def _check_quantization(self) -> None:
        if self.quantization not in ("auto", "none", "int8", "int4", "fp8"):
            raise ConfigError(
                f"quantization must be auto, none, int8, int4 or fp8, not {self.quantization!r}", param="quantization"
            )
        size = self.quantization_group_size
        if size and (size < 32 or size & (size - 1)):
            raise ConfigError(
                f"quantization_group_size must be 0 (one scale for each output) or a power of two from 32 on, not {size}",
                param="quantization_group_size",
            )

    def _check_adaptive(self) -> None:
        for name in ("target_itl_ms", "target_ttft_ms"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name} must be a number of milliseconds above 0, not {value}", param=name)
        if self.adaptive and self.target_itl_ms is None and self.target_ttft_ms is None:
            raise ConfigError(
                "adaptive=True needs a target to tune for: set target_itl_ms (time between two tokens of an answer), "
                "target_ttft_ms (time to the first one) or both, in milliseconds",
                param="adaptive",
            )

    def _check_adapters(self) -> None:
        for name in self.lora:
            if (wrong := wrong_adapter_name(name)) is not None:
                raise ConfigError(wrong, param="lora")
            if not self.lora[name]:
                raise ConfigError(f"lora has no path for adapter {name}; give the folder with its files", param="lora")
        for name in ("max_loras", "max_cpu_loras"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}", param=name)
        if not 1 <= self.max_lora_rank <= MAX_LORA_RANK:
            raise ConfigError(
                f"max_lora_rank must be between 1 and {MAX_LORA_RANK}, not {self.max_lora_rank}", param="max_lora_rank"
            )

    def _check_speculation(self) -> None:
        if self.speculation not in ("auto", "suffix", "draft_model", "off"):
            raise ConfigError(
                f"speculation must be auto, suffix, draft_model or off, not {self.speculation!r}", param="speculation"
            )
        if self.speculation == "draft_model" and self.speculation_model is None:
            raise ConfigError("speculation draft_model needs a speculation_model", param="speculation_model")
        if self.speculation_model is not None and self.guesses_by != "draft_model":
            raise ConfigError(
                f"speculation_model is for speculation draft_model, which is {self.guesses_by}; leave one of them out",
                param="speculation_model",
            )
        if self.speculation_model is not None and self.tensor_parallel_size > 1:
            raise ConfigError(
                "speculation_model is for a model on one device; leave it out, or tensor_parallel_size",
                param="speculation_model",
            )
        length = self.speculation_length
        if length is not None and not 1 <= length <= MAX_DRAFT:
            raise ConfigError(
                f"speculation_length must be between 1 and {MAX_DRAFT}, not {length}", param="speculation_length"
            )
        if self.speculation not in ("auto", "suffix" if self.enable_speculative_decoding else "off") and (
            self.enable_speculative_decoding is not None
        ):
            raise ConfigError(
                f"enable_speculative_decoding={self.enable_speculative_decoding} and speculation={self.speculation!r} "
                "contradict each other; give one of them",
                param="speculation",
            )

    @property
    def guesses_by(self) -> str:
        """auto, suffix, draft_model or off: `speculation`, by any of its names."""
        if self.enable_speculative_decoding is None:
            return "draft_model" if self.speculation == "auto" and self.speculation_model else self.speculation
        return "suffix" if self.enable_speculative_decoding else "off"

    def _check_kv(self) -> None:
        if self.kv_cache_dtype not in ("auto", "float32", "fp8", "int8"):
            raise ConfigError(
                f"kv_cache_dtype must be auto, float32, fp8 or int8, not {self.kv_cache_dtype!r}",
                param="kv_cache_dtype",
            )
        read_kv_events(self.kv_events_config)
        if self.offloads_kv and self.tensor_parallel_size > 1:
            raise ConfigError(
                "KV tiers (kv_offload_…) are for a model on one device: with tensor_parallel_size above 1 each rank has a part "
                "of every block; leave one of them out", param="kv_offload_memory",
            )  # fmt: skip
        for name, low in (("kv_offload_memory", 0), ("kv_offload_disk", 1)):
            if getattr(self, name) < low:
                raise ConfigError(f"{name} must be at least {low}, not {getattr(self, name)}", param=name)
        if self.kv_offload_redis is not None and scheme_of(self.kv_offload_redis) not in REDIS:
            raise ConfigError("kv_offload_redis must be a URL such as redis://HOST:6379/0", param="kv_offload_redis")

    @property
    def offloads_kv(self) -> bool:
        """Whether blocks evicted from the device are kept elsewhere."""
        return bool(self.kv_offload_memory or self.kv_offload_dir or self.kv_offload_redis)

    def _check_transfers(self) -> None:
        if self.role not in (None, "prefill", "decode", "both"):
            raise ConfigError(f"role must be prefill, decode or both, not {self.role!r}", param="role")
        if self.role is not None and self.tensor_parallel_size > 1:
            raise ConfigError(
                "prefill and decode apart (role) is for a model on one device: with tensor_parallel_size above 1 each rank has a "
                "part of every block; leave one of them out", param="role",
            )  # fmt: skip
        if not 0 <= self.kv_transfer_port < 65536:
            raise ConfigError(f"kv_transfer_port must be from 0 to 65535, not {self.kv_transfer_port}",
                              param="kv_transfer_port")  # fmt: skip
        if self.kv_transfer_host in ("", "0.0.0.0", "::"):
            raise ConfigError(
                f"kv_transfer_host must be an address at which other engines reach this machine, not {self.kv_transfer_host!r}",
                param="kv_transfer_host",
            )
        for name in ("kv_transfer_timeout_s", "kv_lease_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} must be a number of seconds above 0, not {getattr(self, name)}", param=name)

    @property
    def uses_adapters(self) -> bool:
        """Whether requests may name an adapter."""
        return self.enable_lora or bool(self.lora)

    @property
    def tunes_itself(self) -> bool:
        """Whether adaptive tuning is on: where a target is set, unless `adaptive` is False."""
        return self.adaptive is not False and (self.target_itl_ms is not None or self.target_ttft_ms is not None)

    def batch_limits(self, *, gpu: bool) -> tuple[int, int]:
        """Rows of the batch, and tokens of a step, on a GPU or a CPU. Every row must be able to advance in each step."""
        rows = self.max_batch_size or (256 if gpu else 32)
        rows = rows if self.enable_dynamic_batching else 1
        return rows, max(rows, self.max_num_batched_tokens or (4096 if gpu else 512))

    def changed(self) -> dict[str, Any]:
        """Settings that differ from the defaults."""
        usual = EngineConfig()
        return {name: value for name in self.names() if (value := getattr(self, name)) != getattr(usual, name)}

    @classmethod
    def names(cls) -> list[str]:
        return [field.name for field in fields(cls)]


def _default(name: str) -> Any:
    return EngineConfig.__dataclass_fields__[name].default
