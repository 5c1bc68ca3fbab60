"""What is read from the text of a backend's /metrics."""

from __future__ import annotations

from tonle.observe.backend_state import BackendState, read_metrics

VLLM = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a} 7 {b"} 2.0
vllm:num_requests_running{engine="1",model_name="a} 7 {b"} 3.0
vllm:num_requests_waiting{engine="0"} 4.0
vllm:num_requests_waiting_by_reason{reason="capacity"} 99.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.75
vllm:prefix_cache_queries_total{engine="0"} 1.5e+06
vllm:prefix_cache_queries_created{engine="0"} 1.7e+09
vllm:prefix_cache_hits_total{engine="0"} 500000.0
vllm:prompt_tokens_total{engine="0"} 3000000.0 1700000000000
vllm:generation_tokens_total{engine="0"} 1234567.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} 100.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 80.0
"""


def test_a_vllm_server() -> None:
    assert read_metrics("b", VLLM, 5.0) == BackendState(
        name="b", running=5, waiting=4, kv_usage=0.5, prefix_hits=500_000, prefix_queries=1_500_000,
        generation_tokens=1_234_567, prompt_tokens=3_000_000, draft_tokens=100, accepted_tokens=80, at=5.0,
    )  # fmt: skip


def test_names_that_older_servers_have() -> None:
    old = b"vllm:gpu_cache_usage_perc 0.5\nvllm:gpu_prefix_cache_hits_total 3\nvllm:gpu_prefix_cache_queries_total 4"
    state = read_metrics("b", old, 0.0)
    assert (state.kv_usage, state.prefix_hits, state.prefix_queries, state.running) == (0.5, 3, 4, None)


def test_a_tonle_server() -> None:
    text = b"""tonle:gpu_utilization{model_name="m"} 0.9
tonle:gpu_memory_used_bytes{model_name="m"} 1.5e+10
tonle:gpu_memory_total_bytes{model_name="m"} 2e+10
tonle:prefix_cache_missed_tokens_total{model_name="m",reason="new"} 12.0
tonle:prefix_cache_missed_tokens_total{model_name="m",reason="evicted"} 3.0
"""
    state = read_metrics("b", text, 0.0)
    assert state.gpu_utilization == 0.9 and state.gpu_memory_used == 15_000_000_000
    assert state.prefix_missed == {"new": 12, "evicted": 3} and state.generation_tokens is None


def test_anything_else_is_nothing() -> None:
    odd = (b"", b"<html>", b"\xff\xfe\n" * 100, b"vllm:num_requests_running", b"vllm:num_requests_running{", b"}\n} 4",
           b"vllm:num_requests_running NaN\nvllm:generation_tokens_total -5\nvllm:prompt_tokens_total +Inf",
           b"vllm:num_requests_running{a=\"b\"}\nvllm:num_requests_running 1e999")  # fmt: skip
    for text in odd:
        assert read_metrics("b", text, 0.0) == BackendState(name="b", at=0.0), text


def test_a_server_that_tells_nonsense_is_held_within_bounds() -> None:
    """Such figures are added up, encoded and stored for a month."""
    text = b"vllm:num_requests_running 1e300\nvllm:kv_cache_usage_perc 1e19\n"
    text += b'vllm:generation_tokens_total{engine="0"} 2e14\n' * 100_000
    text += b"".join(b'tonle:prefix_cache_missed_tokens_total{reason="%d"} 1\n' % number for number in range(1000))
    text += b'tonle:prefix_cache_missed_tokens_total{reason="new"} 2e14\n' * 10
    state = read_metrics("b", text, 0.0)
    most = 1 << 48
    assert (state.running, state.kv_usage) == (None, None)
    assert (state.generation_tokens, state.prefix_missed) == (most, {"new": most})
