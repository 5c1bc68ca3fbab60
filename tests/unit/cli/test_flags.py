"""Flags made from settings, and the flags of `vllm serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tonle.cli.app import _one_value_each
from tonle.cli.flags import SERVE_FLAGS, with_flags
from tonle.config.load_settings import load
from tonle.config.serve import SETTINGS

ALL = {
    "host": "0.0.0.0", "port": "1", "served_model_name": "a", "max_body": "1MiB", "drain": "5s", "write_timeout": "2m",
    "max_num_seqs": "2", "max_num_batched_tokens": "3", "max_model_len": "4", "kv_cache_memory": "5GiB",
    "block_size": "6", "long_prefill_token_threshold": "7", "priority_ageing": "8s", "device": "cpu",
    "gpu_memory_utilization": "80%", "kv_cache_dtype": "fp8", "kv_cache_max_size": "9", "gc_threshold": "0.5",
    "kv_events_config": '{"enable_kv_cache_events": false}', "kv_offload_memory": "1GiB", "kv_offload_dir": "blocks",
    "kv_offload_disk": "2GiB", "kv_offload_redis": "redis://blocks:6379/0",
    "quantization": "int4", "quantization_group_size": "64",
    "activation_bits": "16", "target_itl": "50", "target_ttft": "1s",
    "load_format": "random", "hold_clusters": "always",
    "generation_config": "none", "override_generation_config": '{"temperature": 0.5}', "default_max_tokens": "9",
    "chat_template": "chat.jinja", "special_tokens_in_content": "special",
    "tool_call_parser": "hermes", "reasoning_parser": "none",
    "response_store": "off", "response_store_ttl": "60", "response_store_max_size": "5", "response_store_max": "1MiB",
    "dtype": "float16", "log_level": "debug", "step_log": "steps.jsonl", "api_key": "k", "audit_dir": "somewhere",
    "audit_fsync": "always", "audit_fsync_interval": "3s", "audit_on_full": "serve", "audit_min_free": "1GiB",
    "audit_max_queue": "5", "audit_linger": "1s", "audit_redact": "email,plate=[A-Z]{2,3}", "audit_omit": "messages",
    "audit_retention_days": "30", "audit_key_file": "key", "audit_fingerprint": "ab" * 32, "audit_anchor": "anchors",
    "audit_max_memory": "1MiB", "audit_refused_per_address": "3", "audit_refused_per_second": "30",
    "request_memory": "64MiB", "max_connections": "10", "allowed_hosts": "models.example",
    "trusted_proxies": "10.0.0.0/8,::1", "forwarded_header": "forwarded",
    "cors_origins": "https://a.example,https://b.example", "admin_key": "a", "ssl_keyfile_password": "secret",
    "requests_per_minute": "1", "tokens_per_minute": "2", "max_concurrent_per_key": "3", "tokens_per_day": "4",
    "cache": "off", "cache_max_size": "5", "cache_ttl": "6s", "cache_max": "7MiB", "cache_dir": "/somewhere",
    "state_db": "keys.db",
    "speculation": "draft_model", "speculation_length": "5", "speculation_model": "org/small", "lora": "khmer-qa=/adapters/khmer",
    "max_loras": "2", "max_lora_rank": "64", "max_cpu_loras": "3",
    "history_db": "history.db", "price_per_hour": "2.5", "sla_ttft_p95": "200ms", "sla_itl_p95": "50ms",
    "alert_webhook": "https://hooks.example/tonle", "alert_secret": "s", "otlp_endpoint": "http://127.0.0.1:4318",
    "otlp_sample": "10%",
    "role": "prefill", "kv_transfer_host": "10.0.0.1", "kv_transfer_port": "8101", "kv_transfer_timeout": "3s", "kv_lease": "60s",
    "sla_p95": "1s", "context_window": "8", "max_context_length": "32k",
    "workers": "asr,tts=/voices/km", "max_upload": "5MiB", "audio_seconds_per_minute": "60", "images_per_minute": "6",
    "audit_media": "none",
}  # fmt: skip
SWITCHES = {
    "strict": "--strict",
    "dashboard": "--no-dashboard",
    "enable_lora": "--enable-lora",
    "prefix_caching": "--no-prefix-caching",
    "log_json": "--log-json",
    "trust_salt": "--trust-salt",
    "cache_by_default": "--cache-by-default",
}
TLS = {"ssl_certfile", "ssl_keyfile", "ssl_ca_certs"}  # files that must be there; and they go together  # fmt: skip


def run(*args: str) -> tuple[Any, dict[str, Any]]:
    """How a verb with the server's flags ended, and what it received."""
    received: dict[str, Any] = {}

    @with_flags(*SERVE_FLAGS)
    def verb(word: str = "default", *, flags: dict[str, Any]) -> None:
        received.update(flags | {"word": word})

    app = typer.Typer()
    app.command()(verb)
    return CliRunner().invoke(app, args, env={"COLUMNS": "500"}), received


def flags_of(*args: str) -> dict[str, Any]:
    """What a verb with the server's flags receives."""
    done, received = run(*args)
    assert done.exit_code == 0, done.output
    return received


def test_a_verb_keeps_its_own_options_and_gets_only_what_was_given() -> None:
    assert flags_of() == {"word": "default"}
    assert flags_of("--word", "x", "--port", "9") == {"word": "x", "port": "9"}


def test_every_flag_reaches_its_setting(tmp_path: Path) -> None:
    (tmp_path / "pem").touch()
    every = ALL | {name: str(tmp_path / "pem") for name in TLS} | {"ssl_cert_reqs": "2"}
    assert set(every) | set(SWITCHES) | {"model", "frontends", "tensor_parallel_size"} == set(SETTINGS)
    given = flags_of(
        *(part for name, text in every.items() for part in (SETTINGS[name].flag, text)), *SWITCHES.values()
    )
    del given["word"]
    config = load(given, environ={})
    for name, text in every.items():
        assert getattr(config, SETTINGS[name].field) == SETTINGS[name].type.read(text) != SETTINGS[name].default
    assert (config.strict, config.prefix_caching, config.log_json) == (True, False, True)
    assert config.cache_by_default is True
    for name in ("frontends", "tensor_parallel_size"):  # which do not go with some of the others
        given = flags_of(SETTINGS[name].flag, "2")
        assert getattr(load({name: given[name]}, environ={}), name) == 2


@pytest.mark.parametrize("args", [("a", "--served-model-name", "b"), ("a,b",)])
def test_aliases(args: tuple[str, ...]) -> None:
    given = flags_of("--served-model-name", *args)
    assert load({"served_model_name": given["served_model_name"]}, environ={}).served_model_name == ("a", "b")


def test_a_switch_can_be_switched_back() -> None:
    given = flags_of("--no-strict")
    assert load({"strict": given["strict"]}, environ={"TONLE_STRICT": "yes"}).strict is False


@pytest.mark.parametrize(
    ("args", "flags"),
    [
        (["--no-enable-prefix-caching"], {"prefix_caching": False}),
        (["--enable-prefix-caching"], {"prefix_caching": True}),
        (["--kv-cache-memory-bytes", "4G"], {"kv_cache_memory": "4G"}),
        (["-asc", "4"], {"frontends": "4"}),
        (["--allowed-origins", '["https://a", "https://b"]'], {"cors_origins": ["https://a", "https://b"]}),
        (["--allowed-origins=*"], {"cors_origins": "*"}),
        (["--shutdown-timeout", "5"], {"drain": "5"}),
        (["--enable-lora", "--max-loras", "4"], {"enable_lora": True, "max_loras": "4"}),
        (["--lora-modules", "a=/x", "--lora-modules", '{"name": "b", "path": "/y"}'],
         {"lora": ["a=/x", '{"name": "b", "path": "/y"}']}),
        (["--model", "org/name"], {"model": "org/name"}),
        (["-tp", "2"], {"tensor_parallel_size": "2"}),
        (["--tensor-parallel-size", "4", "--enable-expert-parallel", "--distributed-executor-backend", "mp"],
         {"tensor_parallel_size": "4"}),
        (["--kv-transfer-config", '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'], {"role": "both"}),
        (["--max-model-len", "32K", "--dtype", "half"], {"max_model_len": "32K", "dtype": "half"}),
        (["--trust-remote-code", "--disable-log-requests", "--max-log-len", "10", "-pp", "1", "--swap-space=0",
          "--enable-chunked-prefill", "--uvicorn-log-level", "info", "--enable-auto-tool-choice",
          "--guided-decoding-backend", "xgrammar"], {}),
        (["--tool-call-parser", "hermes", "--reasoning-parser", "deepseek_r1"],
         {"tool_call_parser": "hermes", "reasoning_parser": "deepseek_r1"}),
    ],
)  # fmt: skip
def test_flags_of_vllm_with_the_same_meaning(args: list[str], flags: dict[str, Any]) -> None:
    given = flags_of(*args)
    assert given == flags | {"word": "default"}
    del given["word"]
    load(given, environ={})  # the values are ours, too


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["-pp", "2"], "--tensor-parallel-size N"),
        (["-dp", "2"], "tonle gateway --backend"),
        (["--nnodes", "2"], "one machine"),
        (["--distributed-executor-backend", "ray"], "one machine"),
        (["--swap-space", "4"], "Leave it out"),
        (["--quantization", "aqlm"], "auto, none, int8, int4, fp8"),
        (["--lora-modules", "x"], "NAME=PATH"),
        (["--lora-modules", "/x=/y"], "neither a path nor a URL"),
        (["--lora", "a=/x", "--lora-modules", "b=/y"], "give one of them"),
        (["--no-fully-sharded-loras"], "divided between GPUs"),
        (["--no-enable-chunked-prefill"], "--max-num-batched-tokens"),
        (["--enable-log-requests"], "--audit-dir"),
        (["--uvicorn-log-level", "debug"], "--log-level"),
        (["--download-dir", "x"], "--cache-dir"),
        (["--seed", "0"], "send `seed` with each request"),
        (["--no-enable-auto-tool-choice"], "tool_choice none"),
        (["--structured-outputs-config", "{}"], "leave it out"),
        (["--allowed-origins", "[1"], "must be a JSON list"),
        (["--kv-cache-memory-bytes", "big"], "must be a size"),
        (["--prefix-caching", "--enable-prefix-caching"], "give one of them"),
        (["--enable-prefix-cachin"], "--enable-prefix-caching"),
    ],
)
def test_other_flags_of_vllm_are_refused_with_what_to_do(args: list[str], said: str) -> None:
    done, received = run(*args)
    assert done.exit_code == 2 and not received
    assert said in done.output and args[0].removeprefix("--no-").strip("-")[:2] in done.output


def test_lora_modules_takes_several_values_as_in_vllm() -> None:
    args = ["MODEL", "--lora-modules", "a=/x", '{"name": "b", "path": "/y"}', "--port", "1"]
    assert _one_value_each(args) == [
        "MODEL", "--lora-modules", "a=/x", "--lora-modules", '{"name": "b", "path": "/y"}', "--port", "1",
    ]  # fmt: skip
    assert _one_value_each(["--lora-modules", "a=/x", "MODEL"]) == ["--lora-modules", "a=/x", "MODEL"]
    assert _one_value_each(["--lora-modules=a=/x", "b=/y"]) == ["--lora-modules=a=/x", "b=/y"], "that is the model"


def test_flags_of_vllm_are_not_in_help() -> None:
    assert "--swap-space" not in run("--help")[0].output
