"""Flags made from knobs."""

from __future__ import annotations

from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tonle.cli.flags import SERVE_FLAGS, with_flags
from tonle.config.load import load
from tonle.config.serve import KNOBS

ALL = {
    "host": "0.0.0.0", "port": "1", "served_model_name": "a", "max_body": "1MiB", "drain": "5s", "write_timeout": "2m",
    "max_num_seqs": "2", "max_num_batched_tokens": "3", "max_model_len": "4", "kv_cache_memory": "5GiB",
    "block_size": "6", "long_prefill_token_threshold": "7", "priority_ageing": "8s", "device": "cpu",
    "gpu_memory_utilization": "80%", "kv_cache_dtype": "fp8", "kv_cache_max_size": "9", "gc_threshold": "0.5",
    "activation_bits": "8",
    "load_format": "random",
    "generation_config": "none", "override_generation_config": '{"temperature": 0.5}', "default_max_tokens": "9",
    "chat_template": "chat.jinja",
    "dtype": "float16", "log_level": "debug", "api_key": "k", "audit_dir": "somewhere",
    "audit_fsync": "always", "audit_fsync_interval": "3s", "audit_on_full": "serve", "audit_min_free": "1GiB",
    "audit_max_queue": "5", "audit_linger": "1s", "audit_redact": "email,plate=[A-Z]{2,3}", "audit_omit": "messages",
    "audit_retention_days": "30", "audit_key_file": "key",
    "trusted_proxies": "10.0.0.0/8,::1", "forwarded_header": "forwarded",
}  # fmt: skip
SWITCHES = {"strict": "--strict", "prefix_caching": "--no-prefix-caching", "log_json": "--log-json",
            "trust_salt": "--trust-salt"}  # fmt: skip


def flags_of(*args: str) -> dict[str, Any]:
    """What a verb with the server's flags receives."""
    received: list[dict[str, Any]] = []

    @with_flags(*SERVE_FLAGS)
    def verb(word: str = "default", *, flags: dict[str, Any]) -> None:
        received.append(flags | {"word": word})

    app = typer.Typer()
    app.command()(verb)
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output
    return received[0]


def test_a_verb_keeps_its_own_options_and_gets_only_what_was_given() -> None:
    assert flags_of() == {"word": "default"}
    assert flags_of("--word", "x", "--port", "9") == {"word": "x", "port": "9"}


def test_every_flag_reaches_its_setting() -> None:
    assert set(ALL) | set(SWITCHES) | {"model", "frontends"} == set(KNOBS)
    given = flags_of(*(part for name, text in ALL.items() for part in (KNOBS[name].flag, text)), *SWITCHES.values())
    del given["word"]
    config = load(given, environ={})
    for name, text in ALL.items():
        assert getattr(config, KNOBS[name].field) == KNOBS[name].kind.read(text) != KNOBS[name].default
    assert (config.strict, config.prefix_caching, config.log_json) == (True, False, True)
    assert load({"frontends": flags_of("--frontends", "2")["frontends"]}, environ={}).frontends == 2


@pytest.mark.parametrize("args", [("a", "--served-model-name", "b"), ("a,b",)])
def test_aliases(args: tuple[str, ...]) -> None:
    given = flags_of("--served-model-name", *args)
    assert load({"served_model_name": given["served_model_name"]}, environ={}).served_model_name == ("a", "b")


def test_a_switch_can_be_switched_back() -> None:
    given = flags_of("--no-strict")
    assert load({"strict": given["strict"]}, environ={"TONLE_STRICT": "yes"}).strict is False
