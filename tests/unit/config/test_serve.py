"""The table of settings agrees with what it sets."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from tonle.config.engine import EngineConfig
from tonle.config.serve import KNOBS, Knob, ServeConfig
from tonle.errors import ConfigError
from tonle.models.default_model import NAME


@pytest.mark.parametrize("knob", KNOBS.values(), ids=KNOBS)
def test_a_default_reads_as_itself(knob: Knob) -> None:
    assert knob.kind.read(knob.default if knob.default is not None else "none") == knob.default


def test_public_names_are_unique_and_carry_no_unit() -> None:
    assert len(KNOBS) == len(fields(ServeConfig))
    assert not [name for name in KNOBS if name.endswith(("_s", "_bytes"))]


def test_one_setting_has_three_spellings() -> None:
    knob = KNOBS["kv_cache_memory"]
    assert (knob.field, knob.env, knob.flag) == (
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
    assert KNOBS["model"].kind.show(None) == NAME


def test_what_a_server_does_not_offer_of_the_engine_is_left_out_on_purpose() -> None:
    offered = {knob.engine for knob in KNOBS.values()}
    one_request_at_a_time = {"enable_dynamic_batching"}  # max_num_seqs: 1
    batches_that_wait = {"enable_continuous_batching", "batch_timeout_ms"}  # to study them, in a program of one's own
    for_programs = {"enable_metrics", "profile_performance"}  # of get_stats(); a server has /metrics
    refused = {"enable_kv_cache", "enable_speculative_decoding", "enable_gradient_checkpointing",
               "memory_efficient_attention"}  # fmt: skip
    left_out = one_request_at_a_time | batches_that_wait | for_programs | refused
    assert offered | left_out == {*EngineConfig.names(), None} and not offered & left_out


@pytest.mark.parametrize("door", [{"api_key": ("k",)}, {"audit_dir": "audit"}])
def test_keys_and_audit_need_one_front_end_or_a_gateway(door: dict[str, Any]) -> None:
    ServeConfig(**door).validate()
    ServeConfig(frontends=2).validate()
    with pytest.raises(ConfigError, match="tonle gateway") as refused:
        ServeConfig(frontends=2, **door).validate()
    assert refused.value.param == "frontends"
