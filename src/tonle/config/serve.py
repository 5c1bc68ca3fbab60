"""`ServeConfig`: every setting of a server, as one flat table.

The table is the only list there is: file keys, variables and flags are derived from it (`Knob`), so they cannot
diverge.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tonle.config import kinds, knobs
from tonle.config.audit import AuditConfig
from tonle.config.engine import EngineConfig
from tonle.config.kinds import Kind
from tonle.config.knobs import Knob, knob, knobs_of
from tonle.errors import ConfigError


def _server(default: Any, kind: Kind, help: str) -> Any:
    return knob("Server", default, kind, help)


def _engine(engine_field: str, kind: Kind, help: str) -> Any:
    """A knob of the engine: the default is the engine's own."""
    return knob("Engine", EngineConfig.__dataclass_fields__[engine_field].default, kind, help, engine=engine_field)


def _answers(engine_field: str, kind: Kind, help: str) -> Any:
    """A knob of how requests are answered."""
    return knob("Answers", EngineConfig.__dataclass_fields__[engine_field].default, kind, help, engine=engine_field)


_OWN_CONTEXT = kinds.optional(kinds.whole(2), none="the model's own context")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig(AuditConfig):
    """Settings of `tonle serve`; `tonle chat` and `tonle run` use the engine's part."""

    model: str | None = knob(
        "Model",
        None,
        kinds.optional(kinds.text(), none="SmolLM2-135M-Instruct"),
        "A folder with config.json, a .gguf file, or a hub name such as org/name.",
    )
    host: str = _server("127.0.0.1", kinds.text(), "Address to listen on; 0.0.0.0 for every network interface.")
    port: int = _server(8000, kinds.whole(0, 65535), "Port to listen on; 0 picks a free one.")
    served_model_name: tuple[str, ...] = _server(
        (), kinds.names(), "Name of the model in the API. Give it several times (or with commas) for aliases."
    )
    strict: bool = _server(
        False, kinds.switch(), "Refuse requests with fields the server does not know, rather than warn."
    )
    max_body_bytes: int = _server(8 * 1024**2, kinds.size(), "Largest request body accepted.")
    drain_s: float = _server(
        30.0, kinds.duration(), "How long running requests may still take after SIGTERM or Ctrl-C."
    )
    frontends: int = _server(
        1, kinds.whole(1, 256), "Processes that answer HTTP. More than one where the engine outruns it: a fast GPU."
    )
    write_timeout_s: float = _server(
        60.0, kinds.duration(), "Give up on a client that reads nothing of its answer for this long."
    )

    api_key: tuple[str, ...] = knobs.api_key()
    trusted_proxies: tuple[str, ...] = knobs.trusted_proxies()
    forwarded_header: str = knobs.forwarded_header()
    trust_salt: bool = knob(
        knobs.FRONT_DOOR,
        False,
        kinds.switch(),
        "Let X-Tonle-Salt say who shares cached prefixes. Only where nobody but a gateway can call.",
    )

    max_num_seqs: int | None = knob(
        "Engine",
        None,
        kinds.optional(kinds.whole(1), none="32 on a CPU, 256 on a GPU"),
        "Most requests computed together.",
        engine="max_batch_size",
    )
    max_num_batched_tokens: int | None = _engine(
        "max_num_batched_tokens",
        kinds.optional(kinds.whole(1), none="512 on a CPU, 4096 on a GPU"),
        "Most tokens computed in one step, prompts and answers together.",
    )
    max_model_len: int | None = knob(
        "Engine", None, _OWN_CONTEXT, "Longest request, prompt and answer, in tokens.", engine="max_sequence_length"
    )
    kv_cache_memory_bytes: int | None = knob(
        "Engine",
        None,
        kinds.optional(kinds.size(), none="640MiB on a CPU, what is free on a GPU"),
        "Memory for keys and values: 2GiB, 512MB, or bytes.",
        engine="memory_pool_size",
    )
    gpu_memory_utilization: float = _engine(
        "gpu_memory_utilization", kinds.share(), "Share of a GPU's memory to use, where kv-cache-memory is not given."
    )
    kv_cache_dtype: str = _engine(
        "kv_cache_dtype",
        kinds.choice("auto", "fp8"),
        "auto: as the weights; fp8: about half the bytes per token, on a GPU only.",
    )
    kv_cache_max_size: int | None = _engine(
        "kv_cache_max_size",
        kinds.optional(kinds.whole(0), none="all that fit"),
        "Most blocks kept for reuse that no request holds.",
    )
    gc_threshold: float = _engine(
        "gc_threshold", kinds.share(), "Above this share of the blocks in use, kept ones are dropped, oldest first."
    )
    block_size: int = _engine("block_size", kinds.whole(1), "Tokens per block of the KV cache.")
    long_prefill_token_threshold: int = _engine(
        "long_prefill_token_threshold",
        kinds.whole(0),
        "Most tokens of one prompt in a step while others run; 0 = half the step.",
    )
    prefix_caching: bool = _engine(
        "enable_prefix_caching", kinds.switch(), "Reuse what was computed for equal beginnings of prompts."
    )
    priority_ageing_s: float = _engine(
        "priority_ageing_s",
        kinds.duration(),
        "A request overtakes the next higher priority after waiting this much longer.",
    )
    device: str = _engine(
        "device",
        kinds.pattern(r"auto|cpu|cuda(:\d+)?", "auto, cpu, cuda or cuda:N"),
        "auto, cpu, cuda or cuda:N; auto takes a GPU if there is one.",
    )
    dtype: str = _engine(
        "dtype",
        kinds.choice("auto", "float32", "bfloat16", "float16"),
        "Precision of weights and cache: auto, float32, bfloat16 or float16.",
    )
    activation_bits: int = _engine(
        "activation_bits",
        kinds.whole(8, 16),
        "16: exact to 1e-4; 8: faster, to a percent. For 4- and 8-bit weights on a CPU with 8-bit dot products.",
    )
    load_format: str = _engine(
        "load_format",
        kinds.choice("auto", "random"),
        "auto: the model's files; random: made-up weights of its shape, to measure speed without them.",
    )

    generation_config: str = _answers(
        "generation_config",
        kinds.text(),
        "Where defaults of requests come from. auto: the model's generation_config.json; none: OpenAI's; or a folder.",
    )
    override_generation_config: dict[str, Any] | None = _answers(  # noqa: RUF009  (makes a field)
        "override_generation_config",
        kinds.optional(kinds.json_object(), none="nothing"),
        "Defaults of requests, over those of generation-config; max_new_tokens here limits every request.",
    )
    default_max_tokens: int | None = _answers(
        "default_max_tokens",
        kinds.optional(kinds.whole(1), none="1024 on a CPU, what the context leaves on a GPU"),
        "Longest answer to a chat that does not say how long it may get, in tokens.",
    )
    chat_template: str | None = _answers(
        "chat_template",
        kinds.optional(kinds.text(), none="the model's own"),
        "A file with a Jinja template to use instead of the model's chat template.",
    )

    log_level: str = knob(
        "Logging",
        "INFO",
        kinds.choice("DEBUG", "INFO", "WARNING", "ERROR"),
        "Least severity that is logged: DEBUG, INFO, WARNING or ERROR.",
        engine="log_level",
    )
    log_json: bool = knob("Logging", False, kinds.switch(), "Log JSON lines rather than lines for people.")

    def validate(self) -> None:
        """Raises `ConfigError` where settings do not go together."""
        if self.frontends > 1 and (self.api_key or self.audit_dir is not None):
            raise ConfigError(
                "keys and the audit trail are the state of one process and do not go with several front ends: serve "
                "without them on this machine alone, and put `tonle gateway --api-key … --audit-dir …` in front",
                param="frontends",
            )
        self.engine().validate()

    def engine(self) -> EngineConfig:
        """The engine's share of the settings."""
        return EngineConfig(**{knob.engine: getattr(self, knob.field) for knob in KNOBS.values() if knob.engine})


KNOBS: dict[str, Knob] = knobs_of(ServeConfig)
