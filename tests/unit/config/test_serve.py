"""The table of settings agrees with what it sets."""

from __future__ import annotations

import shlex
from dataclasses import fields
from typing import Any

import pytest

from tonle.config.engine import EngineConfig
from tonle.config.gateway import SETTINGS as GATEWAY_SETTINGS
from tonle.config.gateway import GatewayConfig
from tonle.config.load_settings import load, load_gateway
from tonle.config.serve import SETTINGS, ServeConfig, Setting
from tonle.errors import ConfigError
from tonle.models.default_model import NAME


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_a_default_reads_as_itself(setting: Setting) -> None:
    assert setting.type.read(setting.default if setting.default is not None else "none") == setting.default


def test_public_names_are_unique_and_carry_no_unit() -> None:
    assert len(SETTINGS) == len(fields(ServeConfig))
    assert not [name for name in SETTINGS if name.endswith(("_s", "_bytes"))]


def test_one_setting_has_three_spellings() -> None:
    setting = SETTINGS["kv_cache_memory"]
    assert (setting.field, setting.env, setting.flag) == (
        "kv_cache_memory_bytes", "TONLE_KV_CACHE_MEMORY", "--kv-cache-memory"
    )  # fmt: skip


def test_the_engine_gets_its_share() -> None:
    engine = ServeConfig(max_num_seqs=7, kv_cache_memory_bytes=123, prefix_caching=False, device="cpu").engine()
    assert (engine.max_batch_size, engine.memory_pool_size, engine.enable_prefix_caching) == (7, 123, False)
    engine.validate()


def test_a_server_differs_from_a_bare_engine_only_in_what_suits_the_model_and_the_device() -> None:
    served, bare = ServeConfig().engine(), EngineConfig()
    different = {name for name in EngineConfig.names() if getattr(served, name) != getattr(bare, name)}
    assert different == {"max_sequence_length", "max_batch_size", "memory_pool_size"}
    assert served.max_sequence_length is None and served.max_batch_size is None and served.memory_pool_size is None
    assert served.batch_limits(gpu=False) == bare.batch_limits(gpu=False) == (32, 512)
    assert served.batch_limits(gpu=True) == (256, 4096)


def test_help_names_the_default_model() -> None:
    assert SETTINGS["model"].type.show(None) == NAME


def test_what_a_server_does_not_offer_of_the_engine_is_left_out_on_purpose() -> None:
    offered = {setting.engine for setting in SETTINGS.values()}
    one_request_at_a_time = {"enable_dynamic_batching"}  # max_num_seqs: 1
    batches_that_wait = {"enable_continuous_batching", "batch_timeout_ms"}  # to study them, in a program of one's own
    for_programs = {"enable_metrics", "profile_performance"}  # of get_stats(); a server has /metrics
    without_effect = {"enable_gradient_checkpointing", "memory_efficient_attention"}
    another_name = {"enable_kv_cache", "enable_speculative_decoding"}  # prefix_caching: false; speculation
    turned_on_by_a_target = {"adaptive"}
    left_out = (
        one_request_at_a_time | batches_that_wait | for_programs | without_effect | another_name | turned_on_by_a_target
    )
    assert offered | left_out == {*EngineConfig.names(), None} and not offered & left_out


@pytest.mark.parametrize(
    "settings",
    [{"api_key": ("hush",)}, {"admin_key": ("hush",)}, {"audit_dir": "audit"}, {"requests_per_minute": 3},
     {"state_db": "keys.db"}],
)  # fmt: skip
def test_what_one_process_does_needs_one_front_end_or_a_gateway(settings: dict[str, Any]) -> None:
    ServeConfig(**settings).validate()
    ServeConfig(frontends=2).validate()
    with pytest.raises(ConfigError, match="tonle gateway") as refused:
        ServeConfig(frontends=2, **settings).validate()
    assert refused.value.param == "frontends" and next(iter(settings)) in refused.value.message


def test_the_two_commands_of_that_refusal_can_be_run() -> None:
    config = ServeConfig(
        model="org/name", frontends=4, host="0.0.0.0", port=0, api_key=("hush",), audit_dir="audit",
        requests_per_minute=3, admin_key=("a",),
    )  # fmt: skip
    with pytest.raises(ConfigError) as refused:
        config.validate()
    serve, gateway = (line.split() for line in refused.value.message.splitlines()[1:])
    assert "hush" not in refused.value.message
    assert serve[:3] == ["tonle", "serve", "org/name"] and gateway[:2] == ["tonle", "gateway"]
    behind = load(_flags(serve[3:]), environ={})
    assert (behind.frontends, behind.host, behind.port, behind.trust_salt) == (4, "127.0.0.1", 8000, True)
    front = load_gateway(_flags(gateway[2:]), environ={})
    assert front.backends[0].url == "http://127.0.0.1:8000"
    assert (front.host, front.api_key, front.audit_dir) == ("0.0.0.0", ("KEY",), "audit")
    assert (front.requests_per_minute, front.admin_key) == (3, ("KEY",))


def test_the_commands_of_that_refusal_keep_the_adapters() -> None:
    given = {"lora": (("d", "demo adapter"), ("e", "/x,y")), "enable_lora": True, "max_loras": 2}
    with pytest.raises(ConfigError) as refused:
        ServeConfig(model="org/name", frontends=2, api_key=("hush",), **given).validate()
    serve, gateway = refused.value.message.splitlines()[1:]
    words = shlex.split(serve)
    assert [words[at + 1] for at, word in enumerate(words) if word == "--lora"] == ["d=demo adapter", "e=/x,y"]
    assert "--enable-lora" in words and words[words.index("--max-loras") + 1] == "2"
    assert "--max-lora-rank" not in words and "lora" not in gateway


def _flags(words: list[str]) -> dict[str, Any]:
    """By public name; the only switch is `--trust-salt`."""
    names = {setting.flag: name for table in (GATEWAY_SETTINGS, SETTINGS) for name, setting in table.items()}
    words = [part for word in words for part in ([word, "true"] if word == "--trust-salt" else [word])]
    return {names[flag]: value for flag, value in zip(words[::2], words[1::2], strict=True)}


@pytest.mark.parametrize("origin", ["app.example.com", "https://a.example/path", "", "https://"])
def test_an_origin_has_a_scheme_and_no_path(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"is not an origin such as https://app\.example\.com"):
        ServeConfig(cors_origins=(origin,)).validate()
    ServeConfig(cors_origins=("*", "https://a.example:8443", "http://localhost:3000", "null")).validate()


@pytest.mark.parametrize("name", ["sla_p95", "sla_ttft_p95", "sla_itl_p95"])
@pytest.mark.parametrize("settings", [ServeConfig, GatewayConfig])
def test_a_target_is_more_than_nothing(name: str, settings: type[ServeConfig | GatewayConfig]) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be more than 0"):
        settings(**{f"{name}_s": 0.0}).validate()


def test_a_price_that_nothing_costs_is_a_mistake() -> None:
    ServeConfig(price_per_hour=1e9).validate()
    with pytest.raises(ConfigError, match=r"price_per_hour must be at most 1,000,000,000, not 1e\+308"):
        ServeConfig(price_per_hour=1e308).validate()


def test_a_secret_needs_posts_to_sign() -> None:
    GatewayConfig(alert_secret="long enough", alert_webhook="http://127.0.0.1:1/").validate()
    with pytest.raises(ConfigError, match="alert_secret is set but alert_webhook is not"):
        GatewayConfig(alert_secret="long enough").validate()
