"""The controller around the real scheduler, on a clock that a formula of what steps cost moves on."""

from __future__ import annotations

import logging

import pytest

from tests.fakes.step_simulator import Machine, Simulation, limits
from tonle.engine.plan import Plan
from tonle.engine.schedule import Controller, Targets, TunedLimits

ITL_S = 0.1


def simulate(machine: Machine, targets: Targets | None, *, lag: int = 0, **bounds: object) -> Simulation:
    """None: the limits an engine has by default, fixed."""
    within = limits(**{"long_prefill_tokens": 256 if targets is None else 512, **bounds})
    return Simulation(machine, within, None if targets is None else Controller(targets, within), lag=lag)


def steady(simulation: Simulation, seconds: float, *, size: int = 300, every: float = 2.0, decoders: int = 4) -> None:
    """Sequences that decode all the time, and prompts that keep coming, two at a time."""
    for _ in range(decoders):
        simulation.ask(0.0, 20, 4000)
    for count in range(int(seconds / every)):
        simulation.ask(1.0 + count * every, size, 8)
        simulation.ask(1.0 + count * every, size, 8)


def bursts(simulation: Simulation) -> None:
    """Four sequences decode; every 12 seconds four long prompts arrive at once."""
    for _ in range(4):
        simulation.ask(0.0, 40, 3000)
    for burst in range(5):
        for _ in range(4):
            simulation.ask(3.0 + 12 * burst, 1200, 16)


@pytest.mark.parametrize("lag", [0, 1])
def test_bursts_of_long_prompts_break_the_target_with_fixed_limits_only(lag: int) -> None:
    results = {}
    for name, targets in (("fixed", None), ("adaptive", Targets(itl_s=ITL_S))):
        simulation = simulate(Machine(noise=0.05, hiccups=0.002), targets, lag=lag)
        bursts(simulation)
        simulation.run()
        results[name] = simulation
    fixed, adaptive = results["fixed"], results["adaptive"]
    assert fixed.gap_ms() > 5 * ITL_S * 1e3
    assert adaptive.gap_ms() < ITL_S * 1e3
    assert adaptive.now < 1.05 * fixed.now, "the work takes as long, in smaller steps"
    assert len(adaptive.gaps) == len(fixed.gaps)


@pytest.mark.parametrize(
    ("itl_s", "least", "most"),
    [(0.05, 20, 64), (0.3, 120, 300), (5.0, 512, 512)],
    ids=["from above", "from below", "up to the limit"],
)
def test_the_budget_converges_on_what_the_target_allows(itl_s: float, least: int, most: int) -> None:
    """A token at the end of a 300-token prompt takes 1.1 ms; four rows and the fixed part take 10 to 12."""
    simulation = simulate(Machine(noise=0.03), Targets(itl_s=itl_s))
    steady(simulation, 60, size=300, every=1.0)
    simulation.run(until=60)
    assert simulation.controller is not None
    assert least <= simulation.controller.limits.max_num_batched_tokens <= most
    assert simulation.gap_ms(after=20) < itl_s * 1e3
    if most < 512:
        assert simulation.gap_ms(after=20) > 0.55 * itl_s * 1e3, "more would have fitted"


def test_it_follows_a_machine_that_becomes_slower_and_faster_again() -> None:
    machine = Machine(noise=0.03)
    simulation = simulate(machine, Targets(itl_s=0.2))
    steady(simulation, 180, size=200, every=1.2)
    budgets = []
    for until, factor in ((60, 1.0), (120, 3.0), (180, 1.0)):
        machine.token_s, machine.row_s, machine.fixed_s = 0.0008 * factor, 0.001 * factor, 0.006 * factor
        simulation.run(until=until)
        assert simulation.controller is not None
        budgets.append(simulation.controller.limits.max_num_batched_tokens)
        assert simulation.gap_ms(after=until - 30) < 200
    assert budgets[1] < 0.6 * budgets[0] and budgets[2] > 1.3 * budgets[1]


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("num_cold", [1, 3])
def test_cold_first_steps_hardly_cut_anything_and_no_target_is_said_to_be_out_of_reach(
    caplog: pytest.LogCaptureFixture, num_cold: int, lag: int
) -> None:
    """Warm, 64 tokens fit in 100 ms; the first few steps of each kind take up to 1.5 s. Most of the time nothing is asked."""
    caplog.set_level(logging.WARNING, "tonle.engine")
    simulation = simulate(Machine(noise=0.03, num_cold=num_cold), Targets(itl_s=ITL_S), lag=lag)
    for count in range(4):
        simulation.ask(10.0 * count, 5, 30)
    for count in range(4):
        simulation.ask(50.0 + 10 * count, 5, 60)
        simulation.ask(50.1 + 10 * count, 300, 30)
    simulation.run()
    assert simulation.controller is not None
    assert all(tuned.max_num_batched_tokens > 40 and tuned.max_num_seqs == 32 for _, tuned in simulation.changes)
    assert simulation.controller.limits.max_num_batched_tokens > 60
    assert not caplog.records
    stats = simulation.controller.stats
    assert stats.step_ms is not None and stats.row_ms is not None and stats.token_ms is not None
    assert 6 < stats.step_ms + stats.row_ms < 9 and 0.5 < stats.token_ms < 1.2


def test_costs_that_are_not_known_yet_are_not_stated() -> None:
    simulation = simulate(Machine(num_cold=1), Targets(itl_s=ITL_S))
    simulation.ask(0.0, 5, 40)
    simulation.run()
    assert simulation.controller is not None
    stats = simulation.controller.stats
    assert stats.step_ms == pytest.approx(7, abs=0.5), "of decoding"
    assert stats.token_ms is None and stats.read_ms is None, "one prompt says nothing"


@pytest.mark.parametrize("every", [1.0, 6.0], ids=["prompts all the time", "now and then"])
def test_a_machine_that_becomes_five_times_faster_is_believed_within_seconds(every: float) -> None:
    """As it does when the compiled kernels are ready. First a block hardly fits in 100 ms, then some 70 tokens do."""
    machine = Machine(noise=0.03, slower=5.0)
    simulation = simulate(machine, Targets(itl_s=ITL_S))
    steady(simulation, 60, size=200, every=every, decoders=2)
    simulation.run(until=30)
    assert simulation.controller is not None
    assert simulation.controller.limits.max_num_batched_tokens == 16
    machine.slower = 1.0
    simulation.run(until=36)
    stats = simulation.controller.stats
    assert stats.max_num_batched_tokens >= 28, "raised by a quarter about every second"
    assert stats.step_ms is not None and stats.row_ms is not None
    assert stats.step_ms + 2 * stats.row_ms < 12, "decoding took 45"
    simulation.run(until=60)
    assert simulation.controller.limits.max_num_batched_tokens >= 50
    assert simulation.controller.stats.unreachable == []
    assert simulation.gap_ms(after=36) < ITL_S * 1e3


def test_steps_that_were_slow_before_the_machine_became_faster_are_not_held_against_the_target() -> None:
    machine = Machine(slower=20.0)
    simulation = simulate(machine, Targets(itl_s=ITL_S))
    simulation.ask(0.0, 20, 3000)
    simulation.run(until=30)
    assert simulation.controller is not None
    assert simulation.controller.stats.slow_share > 0.5 and simulation.controller.stats.unreachable == ["target_itl"]
    machine.slower = 1.0
    simulation.run(until=31)
    assert simulation.controller.stats.slow_share == 0.0
    simulation.run(until=36)
    assert simulation.controller.stats.unreachable == []


def test_noise_does_not_make_it_waver() -> None:
    simulation = simulate(Machine(noise=0.15, hiccups=0.01), Targets(itl_s=0.15, ttft_s=3.0))
    steady(simulation, 240, size=400, every=2.0)
    simulation.run(until=240)
    assert len(simulation.changes) <= 20
    assert sum(when > 120 for when, _ in simulation.changes) <= 6
    assert simulation.gap_ms(after=30) < 150


def test_admission_is_held_back_when_decoding_alone_is_too_slow() -> None:
    """32 rows take 38 ms and more, and 30 ms are wanted: about ten rows and a block of a prompt fit."""
    simulation = simulate(Machine(noise=0.02), Targets(itl_s=0.03))
    for count in range(400):
        simulation.ask(0.05 * count, 20, 60)
    simulation.run()
    assert simulation.controller is not None
    assert 3 <= simulation.controller.limits.max_num_seqs <= 12
    assert simulation.controller.stats.unreachable == []
    assert simulation.gap_ms(after=15) < 30
    assert len(simulation.ttfts) == 400, "all were answered"


@pytest.mark.parametrize("lag", [0, 1])
def test_prompts_progress_and_one_line_is_said_when_the_target_is_impossible(
    caplog: pytest.LogCaptureFixture, lag: int
) -> None:
    simulation = simulate(Machine(), Targets(itl_s=0.001), lag=lag)
    for count in range(12):
        simulation.ask(0.2 * count, 300, 100)

    def watch(plan: Plan) -> None:
        decoding = sum(chunk is None or len(chunk) == 1 for chunk in plan.chunks)
        prompts_waited = any(sequence.num_remaining > 1 for sequence in simulation.scheduler.running.values())
        assert not prompts_waited or plan.num_tokens > decoding, "a prompt was there and got nothing"

    with caplog.at_level(logging.INFO, "tonle.engine"):
        simulation.run(watch=watch)
    assert len(simulation.ttfts) == 12
    assert simulation.controller is not None
    assert simulation.controller.limits.max_num_seqs == 32, "to hold any back would not help"
    assert simulation.controller.limits.max_num_batched_tokens == 16
    assert simulation.controller.stats.unreachable == ["target_itl"]
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and "target_itl 1 ms is out of reach" in warnings[0]
    assert warnings[0].endswith("Raise target_itl_ms (--target-itl)")
    (cut,) = (record.getMessage() for record in caplog.records if "→" in record.getMessage())
    assert "64 → 16 (even the least step (16 tokens) is expected to take " in cut and cut.endswith("target 1)")


def test_however_tight_every_answer_advances_and_so_does_a_prompt() -> None:
    """More sequences decode than a mixed step may have tokens."""
    simulation = simulate(Machine(), Targets(itl_s=0.0001))
    for _ in range(24):
        simulation.ask(0.0, 5, 300)
    long = simulation.ask(2.0, 400, 5)
    sizes = set()

    def watch(plan: Plan) -> None:
        if long in (handles := [sequence.request.handle for sequence in plan.sequences]) and simulation.now < 4:
            assert len(handles) == 25
            sizes.add(plan.num_tokens)

    simulation.run(watch=watch)
    assert simulation.controller is not None and simulation.controller.limits.max_num_batched_tokens == 16
    assert 24 + 16 in sizes and len(simulation.ttfts) == 25


def test_ttft_gets_what_itl_leaves_and_one_line_when_that_is_not_enough(caplog: pytest.LogCaptureFixture) -> None:
    simulation = simulate(Machine(noise=0.05), Targets(itl_s=ITL_S, ttft_s=0.5))
    steady(simulation, 60, size=900, every=3.0)  # more prompts than such small steps can take
    with caplog.at_level(logging.INFO, "tonle.engine"):
        simulation.run(until=60)
    assert simulation.controller is not None
    stats = simulation.controller.stats
    assert stats.prefill_share == 1.0 and stats.unreachable == ["target_ttft"]
    assert simulation.gap_ms(after=5) < ITL_S * 1e3, "ITL comes first"
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and "prompts have all that target_itl allows" in warnings[0]


def test_with_slack_prompts_share_steps_again() -> None:
    simulation = simulate(Machine(), Targets(ttft_s=1.0))
    for count in range(60):  # more than there is time for, then few
        simulation.ask(0.1 * count, 400, 4)
    for count in range(300):
        simulation.ask(60.0 + count, 60, 4)
    simulation.run(until=12)
    assert simulation.controller is not None and simulation.controller.limits.prefill_share == 1.0
    simulation.run()
    assert simulation.controller.limits.prefill_share == 0.5
    assert simulation.controller.limits.max_num_batched_tokens == 512, "no ITL is wanted: steps stay whole"


def test_every_change_is_one_line_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    simulation = simulate(Machine(noise=0.05), Targets(itl_s=0.05))
    steady(simulation, 30)
    with caplog.at_level(logging.INFO, "tonle.engine"):
        simulation.run(until=30)
    lines = [record.getMessage() for record in caplog.records if "→" in record.getMessage()]
    assert simulation.controller is not None
    assert len(lines) == len(simulation.changes) == simulation.controller.stats.num_changes > 0
    assert lines[0].startswith("adaptive tuning: tokens of a mixed step 64 → ") and lines[0].endswith("target 50)")


def _plans(tuned: TunedLimits | None, long_prefill_tokens: int) -> list[tuple[list[int], list[int]]]:
    simulation = simulate(Machine(), None, long_prefill_tokens=long_prefill_tokens)
    simulation.scheduler.tuned = tuned
    bursts(simulation)
    plans: list[tuple[list[int], list[int]]] = []
    simulation.run(until=30, watch=lambda plan: plans.append((list(plan.rows), [len(c or "x") for c in plan.chunks])))
    return plans


def test_limits_that_allow_everything_give_the_plans_of_none() -> None:
    assert _plans(TunedLimits(512, 0.5, 32), 512) == _plans(None, 256)
    assert _plans(TunedLimits(100, 0.5, 32), 512) != _plans(None, 256)
