"""The advice against the simulator: traces, fleets, the search for the fewest replicas, and corrections."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.advise.cases import CHAT, QUICK, question
from tonle.advise.advice import Advice, advise
from tonle.advise.check import fleet_of_sizing, run_check, trace_of
from tonle.advise.choose import all_options, choose, size_by_length, size_together
from tonle.advise.correct import _most_users, _search
from tonle.bench import Span
from tonle.errors import ConfigError


def test_a_trace_has_the_lengths_and_the_rate_of_the_workload() -> None:
    asked = question("qwen2.5-7b", "L4", CHAT, rate=5.0, shared_prefix=100)
    option = choose(asked, all_options(asked))
    assert option is not None
    trace = trace_of(asked.workload, size_together(asked, option))
    assert trace.users is None
    assert all(132 <= len(request.prompt) <= 500 for request in trace.requests)
    assert all(request.prompt[:100] == list(range(100)) for request in trace.requests)
    assert len({request.prompt[100] for request in trace.requests}) == len(trace.requests)
    last = trace.requests[-1].arrival_s
    assert last is not None
    assert len(trace.requests) / last == pytest.approx(5.0, rel=0.15)


def test_a_fleet_has_the_limits_of_its_groups() -> None:
    asked = question(rate=4.0, price_per_hour=3.0)
    option = choose(asked, all_options(asked))
    assert option is not None
    sizing = size_by_length(asked, option)
    assert sizing is not None
    fleet = fleet_of_sizing(asked, sizing)
    fleet.check()
    assert [replica.length for replica in fleet.replicas] == ["short"] * sizing.groups[0].replicas + [
        "long"
    ] * sizing.groups[1].replicas
    for replica in fleet.replicas:
        assert replica.max_concurrent == replica.limits.max_num_seqs
        assert replica.num_blocks * replica.limits.block_size >= replica.limits.context_length
        assert replica.price_per_hour == 3.0 * option.times.gpus


def test_a_closed_loop_on_one_replica_gives_about_what_the_rule_of_thumb_says() -> None:
    asked = question("qwen2.5-7b", "L40S", CHAT, price_per_hour=1.0)
    option = choose(asked, all_options(asked))
    assert option is not None
    assert option.settings is not None
    check = run_check(asked, size_together(asked, option), "full", users=option.settings.max_num_seqs)
    assert check.failed == 0
    assert check.holds is None
    assert check.requests_per_s == pytest.approx(option.requests_per_s, rel=0.15)
    assert check.tpot_mean_ms == pytest.approx(option.tpot_ms, rel=0.15)
    assert check.cost_per_million_output_tokens == pytest.approx(1e6 / 3600 / check.output_tokens_per_s)


@given(least=st.integers(1, 70), guess=st.integers(1, 40), low=st.integers(0, 40))
def test_the_search_finds_the_least_count(least: int, guess: int, low: int) -> None:
    low = min(low, guess - 1, least - 1)
    tried: list[int] = []

    def holds(count: int) -> bool:
        tried.append(count)
        return count >= least

    most = max(4, 4 * guess)
    assert _search(guess, most, holds, low) == (least if least <= most else None)
    assert all(1 <= count <= most for count in tried)
    assert len(set(tried)) <= 14


@given(most=st.integers(1, 300), limit=st.integers(0, 300))
def test_the_most_users_are_found_within_a_sixteenth(most: int, limit: int) -> None:
    found = _most_users(most, lambda users: users <= limit)
    if limit == 0:
        assert found is None
    else:
        assert found is not None
        assert found <= limit
        assert min(limit, most) - found <= max(1, min(limit, most) // 8)


def texts(advice: Advice, title: str) -> str:
    return " | ".join(
        f"{line.topic}: {line.verdict}. {line.reason}"
        for section in advice.sections
        if section.title.startswith(title)
        for line in section.lines
    )


def test_the_simulation_lowers_a_batch_that_would_miss_the_slo() -> None:
    advice = advise(question("qwen2.5-7b", "L4", QUICK, slo=("itl-p99=80ms", "ttft-p95=500ms")))
    assert advice.check is not None
    assert advice.check.holds
    assert advice.ok
    rule = next(option for option in advice.options if option.name == advice.chosen)
    assert rule.max_num_seqs is not None
    assert advice.groups[0].settings.max_num_seqs < rule.max_num_seqs
    assert "corrected by the simulation: admit" in texts(advice, "Checked")


def test_the_fewest_replicas_hold_the_slo_and_one_less_does_not() -> None:
    advice = advise(question("qwen2.5-1.5b", "L4", QUICK, users=300, slo=("ttft-p95=600ms", "tpot-p95=40ms")))
    assert advice.check is not None
    assert advice.check.holds
    below = [check for check in advice.tried if check.replicas == advice.check.replicas - 1]
    assert advice.check.replicas == 1 or [check.holds for check in below] == [False]


@pytest.mark.parametrize("slo", ["itl-p99=1s", "ttft-p95=5s"])
def test_no_fewer_replicas_than_keep_up_with_the_rate(slo: str) -> None:
    """The requests of a simulation come within a second: those that wait are answered in time."""
    advice = advise(question("qwen2.5-1.5b", "L4", QUICK, rate=600.0, slo=(slo,)))
    assert advice.check is not None and advice.check.holds
    (group,) = advice.groups
    chosen = next(option for option in advice.options if option.name == advice.chosen)
    assert chosen.gpu_s_per_request is not None
    assert 600.0 * chosen.gpu_s_per_request <= group.replicas * chosen.gpus


def test_more_replicas_than_are_simulated_are_refused() -> None:
    with pytest.raises(ConfigError, match="size a part of it"):
        advise(question("qwen2.5-1.5b", "L4", QUICK, rate=1e7, slo=("itl-p99=1s",)))


def test_an_slo_out_of_reach_is_said_and_not_searched_for() -> None:
    advice = advise(question("qwen2.5-1.5b", "L4", QUICK, rate=1.0, slo=("itl-p99=1ms",)))
    assert not advice.ok
    assert advice.check is not None
    assert advice.check.holds is False
    assert "no number of replicas" in texts(advice, "Checked")
    assert {check.replicas for check in advice.tried} == {advice.check.replicas}


def test_length_classes_serve_short_prompts_sooner() -> None:
    advice = advise(question("qwen2.5-1.5b", "L4", (Span(200, 20_000), Span(5, 20)), rate=4.0))
    assert [group.length for group in advice.groups] == ["short", "long"]
    assert "apart is better" in texts(advice, "Checked")
    apart, together = (
        next(check for check in advice.tried if check.label.endswith(kind)) for kind in ("by length", "all alike")
    )
    assert apart.gpus == together.gpus
    assert (apart.short_ttft_p95_ms or 0) < 0.8 * (together.short_ttft_p95_ms or 0)
    assert {"tonle-short.yaml", "tonle-long.yaml", "gateway.yaml"} == set(advice.settings_files)


def test_without_a_simulation_nothing_is_checked() -> None:
    advice = advise(question(rate=4.0), simulated=False)
    assert (advice.check, advice.tried, advice.ok) == (None, [], True)
    assert [group.length for group in advice.groups] == ["short", "long"]


def test_nothing_fits() -> None:
    advice = advise(question("llama-3.1-405b", "L4", CHAT))
    assert (advice.ok, advice.chosen, advice.groups, advice.commands) == (False, None, [], [])
    assert "nothing fits" in texts(advice, "Result")
