"""The flags of `vllm serve` that `tonle serve` knows under another name, or refuses: one table.

Does: say which setting of ours has the same meaning, and why a flag is refused. Does not: list the flags that have the
same name here (`serve.py`, `server.py`); docs/from-vllm.md has all of them.

A flag is accepted only if it then means the same: it sets a setting of ours, or asks for what Tonle does anyway.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VllmFlag:
    name: str
    setting: str | None = None  # ours, with the same meaning
    read: Callable[[str], object] | None = None  # vLLM's text for a value to one of ours; None: the text itself
    read_all: Callable[[str], dict[str, object]] | None = None  # without a setting: that text to settings of ours
    anyway: tuple[str, ...] = ()  # without a setting: values that ask for what Tonle does anyway; "*": any
    refusal: str = ""  # of other values: what to do instead
    switch: bool = False  # takes no value: --name or --no-name
    many: bool = False  # takes several values, or can be given several times
    short: str | None = None  # -tp

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def translate(self, value: str | bool | list[str]) -> dict[str, object]:
        """The settings to change and their values; none, if there is nothing to change. `ValueError` says what to do."""
        if self.setting is not None:
            return {self.setting: self.read(value) if self.read and isinstance(value, str) else value}
        if self.read_all is not None:
            return self.read_all(str(value))
        if str(value).lower() not in self.anyway and "*" not in self.anyway:
            raise ValueError(self.refusal)
        return {}


def _origins(text: str) -> object:
    """vLLM takes a JSON list."""
    if not text.lstrip().startswith("["):
        return text
    try:
        return [str(origin) for origin in json.loads(text)]
    except ValueError:
        raise ValueError(f"must be a JSON list such as '[\"https://app.example.com\"]', not {text!r}") from None


def _gib(text: str) -> object:
    """vLLM counts in GiB."""
    try:
        return int(float(text) * 2**30)
    except (ValueError, OverflowError):
        raise ValueError(f"must be a number of GiB such as 8, not {text!r}") from None


def _role(text: str) -> object:
    """vLLM takes a JSON object."""
    roles = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}
    try:
        return roles[json.loads(text)["kv_role"]]
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            "must be a JSON object with kv_role kv_producer, kv_consumer or kv_both; the same is --role prefill, decode or both"
        ) from None


_NO_PIPELINE = (
    "layers are not spread over GPUs one after the other. --tensor-parallel-size N divides every layer between N GPUs of this "
    "machine, which takes as little memory on each"
)
_OTHER_DRAFTS = (
    "methods are suffix (or ngram: guesses from text seen before) and draft_model (a smaller model with the same tokenizer); use "
    "one of them, or leave it out"
)
_GUESSING = ("ngram", "suffix")  # methods of speculation that need no second model
_NO_DATA_PARALLEL = (
    "start one `tonle serve` per GPU, or group of GPUs, and put `tonle gateway --backend …` in front of them"
)
_ONE_MACHINE = (
    "the GPUs of one model are in one machine: --tensor-parallel-size N. For more machines, start one `tonle serve` on each and "
    "put `tonle gateway --backend …` in front of them"
)
_EXPERTS = "with --tensor-parallel-size N each GPU holds 1/N of the experts; leave it out"
_NO_REQUEST_LOG = "prompts and parameters are not logged. Use --audit-dir DIR to record every request"
_OWN_TOKENIZER = "the tokenizer is read from the model's own files; put the other one into the model's folder"
_REVISION = "fetch that revision yourself (hf download NAME --revision REV --local-dir DIR) and serve the folder"
_TASKS = "every model generates text, and gives embeddings and scores; leave it out"
_METHODS = "every method and header of the API is allowed for the origins in --cors-origins"
_COMPILED = "there is no compilation to configure; CUDA graphs and kernels are made for the model at the start"


def _speculative_config(text: str) -> dict[str, object]:
    """vLLM takes a JSON object."""
    try:
        config = json.loads(text)
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise ValueError(f'must be a JSON object such as \'{{"method": "suffix"}}\', not {text!r}')
    model = config.pop("model", None)
    method = config.pop("method", None if model is None else "draft_model")
    if method == "draft_model" and isinstance(model, str):
        found: dict[str, object] = {"speculation": "draft_model", "speculation_model": model}
    elif method in _GUESSING and model is None:
        found = {"speculation": "suffix"}
    else:
        raise ValueError(_OTHER_DRAFTS)
    if (length := config.pop("num_speculative_tokens", None)) is not None:
        found["speculation_length"] = length
    if config:
        raise ValueError(f"{', '.join(sorted(config))}: how guesses are made is not a setting here; leave it out")
    return found


def _speculative_model(text: str) -> dict[str, object]:
    """`[ngram]` in older versions of vLLM, or a model."""
    if text.strip("[]") in _GUESSING:
        return {"speculation": "suffix"}
    return {"speculation": "draft_model", "speculation_model": text}


_TABLE = (
    # the same meaning under another name
    VllmFlag("model", "model"),
    VllmFlag("enable_prefix_caching", "prefix_caching", switch=True),
    VllmFlag("kv_cache_memory_bytes", "kv_cache_memory"),
    VllmFlag("api_server_count", "frontends", short="-asc"),
    VllmFlag("allowed_origins", "cors_origins", read=_origins),
    VllmFlag("shutdown_timeout", "drain"),
    VllmFlag("lora_modules", "lora", many=True),
    VllmFlag("speculative_config", read_all=_speculative_config),
    VllmFlag("num_speculative_tokens", "speculation_length"),
    VllmFlag("kv_offloading_size", "kv_offload_memory", read=_gib),
    VllmFlag("kv_transfer_config", "role", read=_role),
    # what Tonle does anyway
    VllmFlag("enable_chunked_prefill", switch=True, anyway=("true",),
             refusal="long prompts are always computed in chunks; --max-num-batched-tokens sets their size"),
    VllmFlag("trust_remote_code", switch=True, anyway=("*",)),  # a permission that is never used
    VllmFlag("disable_log_requests", switch=True, anyway=("true",), refusal=_NO_REQUEST_LOG),
    VllmFlag("enable_log_requests", switch=True, anyway=("false",), refusal=_NO_REQUEST_LOG),
    VllmFlag("enable_log_outputs", switch=True, anyway=("false",), refusal=_NO_REQUEST_LOG),
    VllmFlag("max_log_len", anyway=("*",)),  # prompts are never logged
    VllmFlag("disable_uvicorn_access_log", switch=True, anyway=("false",),
             refusal="use --log-level WARNING, which leaves out the line per request"),
    VllmFlag("disable_log_stats", switch=True, anyway=("true",), refusal="statistics are not logged; they are at /metrics"),
    VllmFlag("uvicorn_log_level", anyway=("info",), refusal="use --log-level, which is for the whole server"),
    VllmFlag("enable_request_id_headers", switch=True, anyway=("true",), refusal="answers always have an X-Request-Id"),
    VllmFlag("enable_prompt_tokens_details", switch=True, anyway=("true",),
             refusal="usage always has prompt_tokens_details"),
    VllmFlag("scheduling_policy", anyway=("priority",),
             refusal="requests run by priority, and first come, first served within one; leave it out"),
    VllmFlag("lora_dtype", anyway=("auto",), refusal="adapters are computed in the model's own precision; leave it out"),
    VllmFlag("fully_sharded_loras", switch=True, anyway=("true",),
             refusal="adapters are divided between GPUs as the matrices that they change; leave it out"),
    VllmFlag("tokenizer_mode", anyway=("auto",), refusal=_OWN_TOKENIZER),
    VllmFlag("config_format", anyway=("auto", "hf"), refusal="models are read from config.json or a GGUF file"),
    VllmFlag("runner", anyway=("auto", "generate", "pooling"), refusal=_TASKS),
    VllmFlag("task", anyway=("auto", "generate", "embed", "embedding", "score"), refusal=_TASKS),
    VllmFlag("response_role", anyway=("assistant",), refusal="answers always have the role assistant"),
    VllmFlag("allowed_methods", anyway=('["*"]',), refusal=_METHODS),
    VllmFlag("allowed_headers", anyway=('["*"]',), refusal=_METHODS),
    VllmFlag("allow_credentials", switch=True, anyway=("false",),
             refusal="the API uses bearer tokens, not cookies; pages need no credentials mode. Leave it out"),
    VllmFlag("chat_template_content_format", anyway=("auto", "string"), refusal="message content is rendered as text"),
    VllmFlag("enable_expert_parallel", switch=True, anyway=("true",), refusal=_EXPERTS),
    VllmFlag("pipeline_parallel_size", short="-pp", anyway=("1",), refusal=_NO_PIPELINE),
    VllmFlag("data_parallel_size", short="-dp", anyway=("1",), refusal=_NO_DATA_PARALLEL),
    VllmFlag("nnodes", short="-n", anyway=("1",), refusal=_ONE_MACHINE),
    VllmFlag("node_rank", short="-r", anyway=("0",), refusal=_ONE_MACHINE),
    VllmFlag("master_addr", refusal=_ONE_MACHINE),
    VllmFlag("master_port", refusal=_ONE_MACHINE),
    VllmFlag("swap_space", anyway=("0",),
             refusal="there is no swap space: a request that has to make room is computed again. Leave it out"),
    VllmFlag("cpu_offload_gb", anyway=("0",),
             refusal="weights are not offloaded; use a smaller or a quantized model, or --quantization"),
    VllmFlag("enable_auto_tool_choice", switch=True, anyway=("true",),
             refusal="tools are always there for requests that send them; callers can send tool_choice none"),
    VllmFlag("exclude_tools_when_tool_choice_none", switch=True, anyway=("true",),
             refusal="with tool_choice none a model is never told about tools; leave it out"),
    VllmFlag("kv_offloading_backend", anyway=("native",), refusal="KV blocks are kept by the server itself; leave it out"),
    VllmFlag("guided_decoding_backend", anyway=("*",)),  # there is one grammar engine, whatever its name
    # refused
    VllmFlag("enforce_eager", switch=True, anyway=("false",),
             refusal="CUDA graphs are always used; --gpu-memory-utilization leaves memory for them. Leave it out"),
    VllmFlag("seed", refusal="send `seed` with each request"),
    VllmFlag("tokenizer", refusal=_OWN_TOKENIZER),
    VllmFlag("tokenizer_revision", refusal=_OWN_TOKENIZER),
    VllmFlag("revision", refusal=_REVISION),
    VllmFlag("code_revision", refusal="code from model repositories is never run; leave it out"),
    VllmFlag("download_dir",
             refusal="use --cache-dir DIR (models and compiled kernels), or HF_HUB_CACHE=DIR for hub downloads alone"),
    VllmFlag("hf_token", refusal="set the environment variable HF_TOKEN, or log in with `hf auth login`"),
    VllmFlag("hf_overrides", refusal="edit config.json in a copy of the model's folder"),
    VllmFlag("root_path", refusal="let the proxy in front remove the path prefix before it passes requests on"),
    VllmFlag("uds", refusal="Unix sockets are not supported; listen on --host 127.0.0.1"),
    VllmFlag("ssl_ciphers", refusal="OpenSSL's defaults are used, with TLS 1.2 and newer"),
    VllmFlag("middleware", refusal="there is no ASGI application to extend; put a proxy in front"),
    VllmFlag("disable_fastapi_docs", switch=True, anyway=("false",),
             refusal="/docs and /openapi.json cannot be switched off; block them in the proxy in front"),
    VllmFlag("num_gpu_blocks_override", refusal="use --kv-cache-memory SIZE"),
    VllmFlag("structured_outputs_config", refusal="structured output has nothing to configure; leave it out"),
    VllmFlag("speculative_model", read_all=_speculative_model),
    VllmFlag("draft_tensor_parallel_size", refusal="a draft model runs on one device; leave it out"),
    VllmFlag("limit_mm_per_prompt", refusal="this server reads and writes text only"),
    VllmFlag("compilation_config", short="-cc", refusal=_COMPILED),
    VllmFlag("attention_backend", refusal="attention has one implementation per device; there is nothing to choose"),
    VllmFlag("distributed_executor_backend", anyway=("mp",), refusal=_ONE_MACHINE),
)  # fmt: skip

VLLM_FLAGS: dict[str, VllmFlag] = {flag.name: flag for flag in _TABLE}
