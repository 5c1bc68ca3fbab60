"""`ServeConfig`: the settings of a server, on top of those it shares with `tonle gateway` (`server.py`).

A setting is declared here and nowhere else: its file key, variable and flag are derived from it (`Setting`), so they
cannot diverge.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tonle.config import values
from tonle.config.adapter_names import check_not_models
from tonle.config.adapter_settings import adapters
from tonle.config.behind_gateway import behind_gateway
from tonle.config.engine import MAX_DRAFT, EngineConfig
from tonle.config.server import cache_by_default_setting, log_level_setting
from tonle.config.setting import (
    ADAPTERS,
    ANSWERS,
    CACHE,
    LOGGING,
    MODEL,
    SCHEDULING,
    SECURITY,
    SERVER,
    TRANSFER,
    Setting,
    setting,
    settings_of,
)
from tonle.config.values import ValueType
from tonle.config.workers import WorkerSettings
from tonle.errors import ConfigError

# Values of vLLM's flag that name the form a checkpoint is stored in: it is read from the files
_STORED_FORMS = dict.fromkeys(("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "mxfp4"), "auto")


def _server(default: Any, type: ValueType, help: str) -> Any:
    return setting(SERVER, default, type, help)


def _engine(engine_field: str, type: ValueType, help: str, *, group: str = SCHEDULING) -> Any:
    """A setting of the engine: the default is the engine's own."""
    default = EngineConfig.__dataclass_fields__[engine_field].default
    return setting(group, default, type, help, engine=engine_field)


def _answers(engine_field: str, type: ValueType, help: str) -> Any:
    """A setting of how requests are answered."""
    return _engine(engine_field, type, help, group=ANSWERS)


def _transfer(engine_field: str, type: ValueType, help: str) -> Any:
    """A setting of what engines send each other."""
    return _engine(engine_field, type, help, group=TRANSFER)


def _adapters(engine_field: str, type: ValueType, help: str) -> Any:
    """A setting of LoRA adapters."""
    return _engine(engine_field, type, help, group=ADAPTERS)


_OWN_CONTEXT = values.optional(values.tokens(2), none="the model's own context", also=("auto", "-1"))
_GUESSES = values.choice("auto", "suffix", "draft_model", "off", also={"ngram": "suffix"})
_DRAFT = values.optional(values.integer(1, MAX_DRAFT), none="32")

# What one process must do for all requests, so that it does not go with several front ends.
_OF_ONE_PROCESS = (
    "api_key", "admin_key", "audit_dir", "requests_per_minute", "tokens_per_minute", "max_concurrent_per_key",
    "tokens_per_day", "audio_seconds_per_minute", "images_per_minute", "state_db", "alert_webhook",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig(WorkerSettings):
    """Settings of `tonle serve`; `tonle chat` and `tonle run` use the engine's part."""

    model: str | None = setting(
        MODEL,
        None,
        values.optional(values.text(), none="SmolLM2-135M-Instruct"),
        "A folder with config.json, a .gguf file, or a hub name such as org/name.",
    )
    served_model_name: tuple[str, ...] = setting(
        MODEL,
        (),
        values.names(),
        "Name of the model in the API, instead of its own. Repeat the flag (or use commas) for aliases.",
    )
    frontends: int = _server(
        1,
        values.integer(1, 256),
        "HTTP processes in front of the engine; a fast GPU needs several. For keys, limits or an audit trail with more "
        "than one, keep this server on 127.0.0.1 and put `tonle gateway --backend http://127.0.0.1:8000 --api-key KEY` in "
        "front of it.",
    )

    trust_salt: bool = setting(
        SECURITY,
        False,
        values.boolean(),
        "Let the X-Tonle-Salt header decide which requests share cached prefixes. Only for a server that callers reach "
        "through a gateway.",
    )

    cache_dir: str | None = setting(
        CACHE,
        None,
        values.optional(values.path(), none="$XDG_CACHE_HOME/tonle or ~/.cache/tonle"),
        "Folder for downloaded models and compiled kernels. If set, hub models are kept there, too.",
    )
    cache_by_default: bool = cache_by_default_setting(False)

    max_num_seqs: int | None = setting(
        SCHEDULING,
        None,
        values.optional(values.integer(1), none="32 on a CPU, 256 on a GPU"),
        "Most requests computed at the same time.",
        engine="max_batch_size",
    )
    max_num_batched_tokens: int | None = _engine(
        "max_num_batched_tokens",
        values.optional(values.tokens(1), none="512 on a CPU, 4096 on a GPU"),
        "Most tokens computed in one step, prompts and answers together.",
    )
    max_model_len: int | None = setting(
        SCHEDULING,
        None,
        _OWN_CONTEXT,
        "Longest request, prompt plus answer: 8192, 32k (32,000) or 32K (32,768).",
        engine="max_sequence_length",
    )
    kv_cache_memory_bytes: int | None = setting(
        SCHEDULING,
        None,
        values.optional(values.size(), none="640MiB on a CPU, 320MiB if it is in int8; all free memory on a GPU"),
        "Memory for the KV cache: 2GiB, 512MB, or a number of bytes.",
        engine="memory_pool_size",
    )
    gpu_memory_utilization: float = _engine(
        "gpu_memory_utilization",
        values.fraction(),
        "Fraction of the GPU's memory to use, unless --kv-cache-memory is given.",
    )
    kv_cache_dtype: str = _engine(
        "kv_cache_dtype",
        values.choice("auto", "float32", "fp8", "int8", also={"fp8_e4m3": "fp8"}),
        "auto (int8 on a CPU with quantized weights, else as the model computes), float32, fp8 (GPU) or int8 (CPU). fp8 takes "
        "half the memory per token, int8 a quarter; details: docs/quantization.md.",
    )
    kv_cache_max_size: int | None = _engine(
        "kv_cache_max_size",
        values.optional(values.integer(0), none="all that fit"),
        "Most blocks of finished requests kept for prefix caching.",
    )
    gc_threshold: float = _engine(
        "gc_threshold", values.fraction(), "Drop the oldest cached blocks once this fraction of the KV cache is full."
    )
    block_size: int = _engine("block_size", values.integer(1), "Tokens per KV cache block.")
    long_prefill_token_threshold: int = _engine(
        "long_prefill_token_threshold",
        values.tokens(0),
        "Most tokens of one prompt computed in a step while other requests run; 0 = half the step.",
    )
    target_itl: float | None = _engine(
        "target_itl_ms",
        values.optional(values.milliseconds(), none="not tuned for"),
        "Wanted time between two tokens of an answer, for 99 of 100 tokens. Turns adaptive tuning on: prompts are computed in "
        "smaller steps and, if need be, fewer requests at a time.",
    )
    target_ttft: float | None = _engine(
        "target_ttft_ms",
        values.optional(values.milliseconds(), none="not tuned for"),
        "Wanted time to the first token, for 95 of 100 requests. Turns adaptive tuning on; --target-itl comes first.",
    )
    speculation: str = _engine(
        "speculation", _GUESSES, "Speculative decoding: steps check guesses from text seen before. auto: as suffix."
    )
    speculation_model: str | None = _engine(
        "speculation_model",
        values.optional(values.text(), none="none"),
        "A smaller model with the same tokenizer (a folder, a .gguf file or a hub name) whose guesses steps check. On a CPU.",
    )
    speculation_length: int | None = _engine("speculation_length", _DRAFT, "Most guesses per request and step.")
    prefix_caching: bool = _engine(
        "enable_prefix_caching", values.boolean(), "Reuse the KV cache of prompts that begin alike."
    )
    priority_ageing_s: float = _engine(
        "priority_ageing_s",
        values.duration(),
        "Waiting time after which a request counts as one priority level higher.",
    )
    device: str = _engine(
        "device",
        values.pattern(r"auto|cpu|cuda(:\d+)?", "auto, cpu, cuda or cuda:N"),
        "auto (a GPU if there is one), cpu, cuda or cuda:N.",
        group=MODEL,
    )
    tensor_parallel_size: int = setting(
        MODEL,
        1,
        values.integer(1, 64),
        "GPUs of this machine that compute the model together; each holds a part of the weights and of the KV cache. On a CPU, "
        "processes.",
        engine="tensor_parallel_size",
        short="-tp",
    )
    dtype: str = _engine(
        "dtype",
        values.choice("auto", "float32", "bfloat16", "float16", also={"half": "float16", "float": "float32"}),
        "Precision to compute in: auto, float32, bfloat16 or float16.",
        group=MODEL,
    )
    quantization: str = _engine(
        "quantization",
        values.choice("auto", "none", "int8", "int4", "fp8", also=_STORED_FORMS),
        "auto (weights as they are stored), none (unpacked to --dtype), or what to make of them as they are loaded: int8, int4 "
        "or fp8. A checkpoint that is quantized already needs no flag.",
        group=MODEL,
    )
    quantization_group_size: int = _engine(
        "quantization_group_size",
        values.integer(0),
        "For --quantization int8 or int4: how many weights share a scale. 0 = all of an output. Fewer are more accurate and take "
        "more memory.",
        group=MODEL,
    )
    activation_bits: int = _engine(
        "activation_bits",
        values.integer(8, 16),
        "For 4- and 8-bit weights on a CPU with 8-bit dot products: 8 (numbers that stand out stay exact) or 16 (slower, "
        "accurate to 1e-4).",
        group=MODEL,
    )
    load_format: str = _engine(
        "load_format",
        values.choice("auto", "random", also={"dummy": "random"}),
        "auto (the model's files) or random (made-up weights of the right shape, to measure speed without files).",
        group=MODEL,
    )
    role: str | None = _transfer(
        "role",
        values.optional(values.choice("prefill", "decode", "both"), none="neither"),
        "prefill: compute prompts that other servers fetch. decode: fetch prompts that others have computed. both: either, as "
        "each request says. Only for a server that callers reach through a gateway: requests say where to fetch from.",
    )
    kv_transfer_host: str = _transfer(
        "kv_transfer_host",
        values.text("ADDRESS"),
        "With --role prefill or both: the address of this machine at which other servers fetch prompts.",
    )
    kv_transfer_port: int = _transfer(
        "kv_transfer_port", values.integer(0, 65535), "The port at that address; 0 = any that is free."
    )
    kv_transfer_timeout_s: float = _transfer(
        "kv_transfer_timeout_s",
        values.duration(),
        "With --role decode or both: a prompt that was not fetched within this time is computed by this server.",
    )
    kv_lease_s: float = _transfer(
        "kv_lease_s",
        values.duration(),
        "With --role prefill or both: how long a prompt is kept for the server that fetches it.",
    )
    hold_clusters: str = _engine(
        "hold_clusters",
        values.choice("auto", "always"),
        "When a stream holds back its last letter until the next one begins. auto: where a mark may follow, as in Khmer "
        "or emoji; the first decomposed letter of a text can be split. always: after every letter.",
    )

    lora: tuple[tuple[str, str], ...] = setting(
        ADAPTERS,
        (),
        adapters(),
        "LoRA adapter to serve: the name that requests give as model, and its PEFT folder. Repeat the flag for more.",
        engine="lora",
    )
    enable_lora: bool = _adapters(
        "enable_lora",
        values.boolean(),
        "Allow adapters to be loaded and removed while the server runs (POST /v1/load_lora_adapter). With keys, this needs one "
        "with scope admin, and --lora implies it; without keys, every caller may do it.",
    )
    max_loras: int = _adapters("max_loras", values.integer(1), "Most different adapters computed at the same time.")
    max_lora_rank: int = _adapters(
        "max_lora_rank",
        values.integer(1, 256),
        "Largest rank of an adapter; raised to the largest among those given with --lora.",
    )
    max_cpu_loras: int = _adapters(
        "max_cpu_loras", values.integer(1), "Most adapters kept in memory; others are read from their folders again."
    )

    generation_config: str = _answers(
        "generation_config",
        values.text("auto|none|FOLDER"),
        "Where defaults of requests come from: the model's generation_config.json (auto), OpenAI's API (none), or a folder.",
    )
    override_generation_config: dict[str, Any] | None = _answers(  # noqa: RUF009  (makes a field)
        "override_generation_config",
        values.optional(values.json_object(), none="nothing"),
        "Defaults of requests, overriding --generation-config; max_new_tokens here limits every request.",
    )
    default_max_tokens: int | None = _answers(
        "default_max_tokens",
        values.optional(values.tokens(1), none="1024 on a CPU, the rest of the context on a GPU"),
        "Longest answer, in tokens, to a chat request that names no limit.",
    )
    chat_template: str | None = _answers(
        "chat_template",
        values.optional(values.path(), none="the model's own"),
        "A file with a Jinja template to use instead of the model's chat template.",
    )
    special_tokens_in_content: str = _answers(
        "special_tokens_in_content",
        values.choice("text", "special"),
        "What a special token such as <|im_end|> in a chat message is. text: text, so that no caller can end a turn and begin "
        "another. special: the token itself. Prompts of /v1/completions always have special tokens.",
    )
    tool_call_parser: str = setting(
        ANSWERS,
        "auto",
        values.text("NAME"),
        "How the model writes tool calls. auto: as its chat template says. Or a format such as hermes, llama3 or json; "
        "docs/tools.md has them all.",
    )
    reasoning_parser: str = setting(
        ANSWERS,
        "auto",
        values.text("NAME"),
        "How the model marks its thoughts, which become reasoning_content. auto: as its chat template says. none: thoughts stay "
        "in content. Or a format such as think.",
    )

    log_level: str = log_level_setting(engine="log_level")
    step_log: str | None = _engine(
        "step_log",
        values.optional(values.path(), none="no such file"),
        "Write one line of JSON per step of the engine to this file: what it computed and when. `tonle profile` reads it.",
        group=LOGGING,
    )

    def validate(self) -> None:
        """Check settings against each other. Raises `ConfigError`."""
        self.check_tls()
        self.check_origins()
        self.check_requests()
        self.check_observed()
        self.check_cache()
        self.check_responses()
        check_not_models(dict(self.lora), *self.served_model_name)
        self.check_workers(frontends=self.frontends)
        if self.frontends > 1:
            self._check_frontends()
        self.engine().validate()

    def _check_frontends(self) -> None:
        for name in _OF_ONE_PROCESS:
            if getattr(self, name):
                serve, gateway = behind_gateway(self, SETTINGS, _OF_ONE_PROCESS)
                raise ConfigError(
                    f"--frontends {self.frontends} does not work with {name}: keys, limits, records and alerts are the "
                    f"work of one process. Let that be a gateway in front of the server, with these two commands:\n"
                    f"  {serve}\n  {gateway}",
                    param="frontends",
                )

    def engine(self) -> EngineConfig:
        """The engine's share of the settings."""
        own = {each.engine: getattr(self, each.field) for each in SETTINGS.values() if each.engine}
        return EngineConfig(**own | {"lora": dict(self.lora)})


SETTINGS: dict[str, Setting] = settings_of(ServeConfig)
