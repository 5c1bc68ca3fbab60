"""Which option is chosen, with the reasons of an operator's notes on a 70B model: long mixed prompts on H100s and H200s."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.advise.cases import CHAT, LONG_MIX, question
from tonle.advise.choose import Question, all_options, choose, size_by_length, size_together
from tonle.advise.option import Option
from tonle.advise.precision import SERVED_ARCHITECTURES
from tonle.bench import Span
from tonle.errors import ConfigError
from tonle.models.families import FAMILIES

MIDDLE = (Span(2000, 5000), Span(100, 2000))


def options_of(asked: Question) -> dict[tuple[str, int], Option]:
    return {(option.times.precision.name, option.times.gpus): option for option in all_options(asked)}


def fewest(options: dict[tuple[str, int], Option], precision: str) -> int:
    return min(gpus for (name, gpus), option in options.items() if name == precision and option.fits)


def chosen(asked: Question) -> Option:
    found = choose(asked, all_options(asked))
    assert found is not None
    return found


def test_gpus_per_replica_of_a_70b_model_on_h100() -> None:
    options = options_of(question())
    assert {name: fewest(options, name) for name in ("int4", "fp8", "bf16")} == {"int4": 1, "fp8": 2, "bf16": 4}
    assert "141 GB" in options["bf16", 1].why_not
    assert "22,224 tokens of KV are left" in options["bf16", 2].why_not
    assert "longest request" in options["fp8", 1].why_not


def test_an_h200_needs_fewer() -> None:
    options = options_of(question(gpu="H200"))
    assert {name: fewest(options, name) for name in ("int4", "fp8", "bf16")} == {"int4": 1, "fp8": 1, "bf16": 2}


def test_int4_gains_little_from_a_second_gpu() -> None:
    """One replica on two GPUs does less for one user than two, and at no less GPU time than two replicas on an H200."""
    options = options_of(question(gpu="H200", lengths=MIDDLE))
    one, two = options["int4", 1], options["int4", 2]
    assert one.decode_one_ms / two.decode_one_ms < 1.5
    assert two.gpu_s > one.gpu_s
    assert chosen(question(gpu="H200", lengths=MIDDLE, precisions=("int4",))).times.gpus == 1


def test_48_to_64_requests_at_a_time_with_prompts_of_2000_to_5000() -> None:
    for gpu, precision, gpus in (("H100", "fp8", 2), ("H200", "int4", 1)):
        option = options_of(question(gpu=gpu, lengths=MIDDLE))[precision, gpus]
        assert option.settings is not None
        assert 48 <= option.settings.max_num_seqs <= 64, option.name


def test_a_small_load_takes_the_single_gpu_and_a_large_one_the_cheapest_token() -> None:
    assert chosen(question(rate=0.1)).name == "int4 × 1 H100"
    assert chosen(question(rate=10.0)).name == "fp8 × 2 H100"


def test_what_tonle_serves_comes_first_unless_another_engine_is_asked_for() -> None:
    ours = chosen(question("qwen2.5-7b", lengths=CHAT))
    assert (ours.times.precision.name, ours.times.gpus, ours.not_served) == ("bf16", 1, "")
    other = chosen(question("qwen2.5-7b", lengths=CHAT, engine="vllm"))
    assert other.times.precision.name == "fp8"
    assert "has no times of it for them yet" in other.not_served
    asked = question(engine="tonle")
    assert choose(asked, all_options(asked)) is None


@pytest.mark.parametrize(
    ("model", "gpu", "words"),
    [
        ("qwen2.5-7b", "MI300X", "no kernels for AMD"),
        ("llama-3.1-70b", "H200", "divides a model between GPUs without its CUDA kernels"),
    ],
)
def test_what_tonle_does_not_serve_is_said(model: str, gpu: str, words: str) -> None:
    assert words in chosen(question(model, gpu, CHAT, precisions=("bf16",))).not_served


def test_what_tonle_serves_is_what_the_engine_has_a_family_for() -> None:
    assert sorted(SERVED_ARCHITECTURES) == sorted(FAMILIES)
    assert chosen(question("mixtral-8x7b", "H200", CHAT, precisions=("bf16",))).not_served == ""


def test_a_tighter_slo_never_allows_a_larger_batch_or_step() -> None:
    before = (10**9, 10**9)
    for limit in ("1s", "300ms", "150ms", "80ms", "50ms"):
        option = options_of(question(lengths=MIDDLE, slo=(f"itl-p99={limit}",)))["fp8", 2]
        assert option.settings is not None
        now = (option.settings.max_num_seqs, option.settings.max_num_batched_tokens)
        assert now[0] <= before[0]
        assert now[1] <= before[1]
        assert option.mixed_ms <= float(limit.rstrip("ms")) * (1000 if limit == "1s" else 1)
        before = now


def test_a_ttft_bound_can_demand_more_gpus_per_replica() -> None:
    loose, tight = (chosen(question(slo=(f"ttft-p95={limit}",), precisions=("int4",))) for limit in ("10s", "2s"))
    assert (loose.times.gpus, tight.times.gpus) == (1, 4)
    missed = options_of(question(slo=("ttft-p95=2s",)))["int4", 1]
    assert missed.misses
    assert "TTFT p95 ≤ 2 s: at least" in missed.misses[0]


def test_fp8_keys_and_values_only_where_16_bits_do_not_fit() -> None:
    assert chosen(question("qwen2.5-7b", lengths=CHAT)).times.kv.name == "bf16"
    packed = options_of(question("llama-3.1-8b", "L4", (Span(5000, 5000), Span(500, 500))))["bf16", 1]
    assert packed.times.kv.name == "fp8"
    assert packed.fits
    assert options_of(question("qwen2.5-7b", lengths=CHAT, kv="fp8"))["bf16", 1].times.kv.name == "fp8"


def test_a_quantized_checkpoint_is_sized_as_it_is_stored() -> None:
    import msgspec

    asked = question(lengths=CHAT)
    stored = msgspec.structs.replace(asked.shape, stored_as="fp8")
    found = all_options(Question(shape=stored, gpu=asked.gpu, workload=asked.workload))
    assert {option.times.precision.name for option in found} == {"fp8"}


def test_replicas_follow_the_load() -> None:
    option = chosen(asked := question(rate=4.0))
    assert size_together(asked, option).replicas == -(-4.0 * option.request_s // 0.8)
    option = chosen(asked := question(lengths=CHAT, users=1000, model="qwen2.5-7b"))
    assert option.settings is not None
    assert size_together(asked, option).replicas == -(-1000 // option.settings.max_num_seqs)


def test_long_and_short_prompts_get_limits_of_their_own() -> None:
    asked = question(rate=4.0, slo=("itl-p99=250ms",))
    sizing = size_by_length(asked, chosen(asked))
    assert sizing is not None
    short, long = sizing.groups
    assert (short.length, long.length) == ("short", "long")
    assert short.settings.max_num_seqs > 3 * long.settings.max_num_seqs
    assert short.replicas < long.replicas
    alike = question(lengths=CHAT)
    assert size_by_length(alike, chosen(alike)) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"precisions": ("fp4",)}, "'fp4' is not known"),
        ({"kv": "int4"}, "--kv-dtype"),
        ({"engine": "sglang"}, "--engine"),
        ({"price_per_hour": 0.0}, "--price"),
        ({"gpu_counts": (3,)}, "--gpus-per-replica"),
        ({"length_threshold": 0}, "--length-threshold"),
        ({"lengths": (Span(200_000, 200_000), Span(10, 10))}, "do not fit the context"),
    ],
)
def test_questions_that_make_no_sense_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        question(**changes).validate()


def test_the_longest_requests_decide_the_context() -> None:
    assert question(lengths=LONG_MIX).context_length == 22_528  # 22,000 at most, in steps of 1,024
    assert question("llama-3-8b", lengths=(Span(8000, 8000), Span(100, 100))).context_length == 8192
