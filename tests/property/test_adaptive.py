"""Whatever a machine costs and a target asks, tuned limits stay within bounds and every request is answered."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.step_simulator import Machine, Simulation, limits
from tonle.engine.plan import Plan
from tonle.engine.schedule import Controller, Targets

SECONDS = st.floats(1e-6, 0.5)


@settings(max_examples=60, deadline=None)
@given(
    bounds=st.fixed_dictionaries(
        {
            "max_num_seqs": st.integers(1, 8),
            "max_num_batched_tokens": st.integers(8, 300),
            "block_size": st.sampled_from([1, 16, 64]),
            "long_prefill_tokens": st.integers(1, 300),
            "continuous": st.booleans(),
        }
    ),
    targets=st.tuples(st.none() | st.floats(1e-4, 2.0), st.none() | st.floats(1e-3, 5.0)).filter(any),
    costs=st.tuples(SECONDS, SECONDS, st.floats(0, 0.01), st.floats(0, 1e-4), st.floats(0, 0.5), st.floats(0, 0.1)),
    asked=st.lists(st.tuples(st.floats(0, 30), st.integers(1, 400), st.integers(1, 60)), min_size=1, max_size=25),
    lag=st.integers(0, 1),
    num_blocks=st.integers(500, 2000),
)
def test_bounds_hold_and_every_request_is_answered(
    bounds: dict[str, int],
    targets: tuple[float | None, float | None],
    costs: tuple[float, float, float, float, float, float],
    asked: list[tuple[float, int, int]],
    lag: int,
    num_blocks: int,
) -> None:
    within = limits(**bounds, context_length=460)
    controller = Controller(Targets(*targets), within)
    fixed_s, row_s, token_s, read_s, noise, hiccups = costs
    simulation = Simulation(
        Machine(fixed_s, row_s, token_s, read_s, noise, hiccups), within, controller, lag=lag, num_blocks=num_blocks
    )
    for at, size, new in asked:
        simulation.ask(at, size, new)

    def watch(plan: Plan) -> None:
        allowed = controller.limits
        assert 1 <= allowed.max_num_seqs <= within.max_num_seqs
        assert min(within.block_size, within.max_num_batched_tokens) <= allowed.max_num_batched_tokens
        assert allowed.max_num_batched_tokens <= within.max_num_batched_tokens
        assert 0.5 <= allowed.prefill_share <= 1
        assert plan.num_tokens <= within.max_num_batched_tokens
        if len(simulation.scheduler.running) > 1:
            assert max(len(chunk or "x") for chunk in plan.chunks) <= max(1, within.long_prefill_tokens)
        planned = {sequence.request.handle for sequence in plan.sequences}
        for handle, sequence in simulation.scheduler.running.items():
            decoding = sequence.num_output > 0 and sequence.num_remaining == 1 and not sequence.complete
            assert handle in planned or not decoding, "a sequence that decodes was left out"

    simulation.run(watch=watch)
    assert len(simulation.ttfts) == len(asked), "a request starved"
    simulation.scheduler.verify()
