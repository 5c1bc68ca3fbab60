"""Adapters in the compiled step: the same as weights they were merged into, whatever else is in the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.fakes.cpu_models import RandomModel, of_row, plain_layer, spec_of, step_of
from tonle.models.adapters import MODULES, Adapter, AdapterPart
from tonle.models.cpu import cpu_decoder
from tonle.models.cpu.cpu_decoder import CpuDecoder
from tonle.models.cpu.team import Team
from tonle.models.decoder import Decoder
from tonle.models.inputs import KVCache, StepInputs

MIXED = [
    (20, 21),
    (0, 1),
    (33, 34),
    (0, 19),
    (5, 40),
    (0, 7),
]  # decoding, first chunks, a chunk on top of cached tokens
SLOTS = [2, -1, 0, 1, 2, -1]  # not sorted, and base rows among them


@pytest.fixture(scope="module")
def model() -> RandomModel:
    return RandomModel(spec_of(plain_layer(qkv_bias=True), plain_layer(window=24)))


@pytest.fixture(scope="module")
def fast(model: RandomModel) -> CpuDecoder:
    return with_adapters(model)


def with_adapters(model: RandomModel, *, threads: int = 2) -> CpuDecoder:
    decoder = model.fast(team=Team(threads), activation_bits=16)
    decoder.enable_adapters(num_slots=3, max_rank=256)
    return decoder


def adapter_for(
    model: RandomModel, rank: int | dict[str, int], seed: int = 0, *, modules: tuple[str, ...] = MODULES, short: bool = False
) -> Adapter:  # fmt: skip
    """As strong as the weights it changes. short: its numbers are bfloat16."""
    generator, spec = torch.Generator().manual_seed(seed), model.spec
    sizes = {"q": (spec.q_size, 64), "k": (spec.kv_size, 64), "v": (spec.kv_size, 64), "o": (64, spec.q_size),
             "gate": (96, 64), "up": (96, 64), "down": (64, 96)}  # fmt: skip
    parts = {}
    for layer in range(spec.num_layers):
        for module in modules:
            rows, columns = sizes[module]
            own = rank if isinstance(rank, int) else rank[module]
            drawn = (
                torch.randn(shape, generator=generator) * shape[1] ** -0.5 for shape in ((own, columns), (rows, own))
            )
            parts[layer, module] = AdapterPart(*(each.bfloat16().float() if short else each for each in drawn))
    return Adapter(f"{seed:064x}", parts)


class Expected:
    """Torch in float32 with merged weights, every row alone; `past`: the cache before the step, `kv` after it."""

    @torch.inference_mode()
    def __init__(self, model: RandomModel, adapters: list[Adapter | None], inputs: StepInputs) -> None:
        self.kv, self.past, logits = model.cache(), model.cache(), []
        merged: dict[int, Decoder] = {}
        for row, slot in enumerate(inputs.adapter_slots or [-1] * len(inputs.context_lens)):
            if slot not in merged:
                merged[slot] = model.torch(adapters[slot] if slot >= 0 else None)
            if start := int(inputs.positions[inputs.row_starts[row]]):
                for cache in (self.kv, self.past):
                    merged[slot].forward(step_of([(0, start)], rows=[row]), cache)
            logits.append(merged[slot].forward(of_row(inputs, row), self.kv))
        self.logits = torch.cat(logits)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((found - expected).norm() / expected.norm()) < 1e-3
    best = found.gather(-1, expected.argmax(-1, keepdim=True)).squeeze(-1)  # two may be as good as equal
    assert bool((found.amax(-1) - best < 0.02 * expected.abs().max()).all())
    assert float((found.log_softmax(-1) - expected.log_softmax(-1)).abs().max()) < 2e-2


@torch.inference_mode()
def compare(model: RandomModel, fast: CpuDecoder, adapters: list[Adapter | None], inputs: StepInputs) -> None:
    for slot, adapter in enumerate(adapters):
        fast.set_adapter(slot, adapter)
    expected = Expected(model, adapters, inputs)
    assert_close(fast.forward(inputs, expected.past), expected.logits[inputs.logit_indices])
    for ours, theirs in ((expected.past.k, expected.kv.k), (expected.past.v, expected.kv.v)):
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-3


@pytest.mark.parametrize(("rank", "short"), [(1, True), (3, False), (16, True), (16, False), (64, False), (256, True)])
def test_a_mixed_batch_equals_merged_weights_alone(
    model: RandomModel, fast: CpuDecoder, rank: int, short: bool
) -> None:
    compare(model, fast, [adapter_for(model, rank, seed, short=short) for seed in range(3)], step_of(MIXED, SLOTS))


@pytest.mark.parametrize("modules", [("q", "v"), ("k",), ("o", "down"), ("up",)], ids="".join)
def test_adapters_of_some_modules(model: RandomModel, fast: CpuDecoder, modules: tuple[str, ...]) -> None:
    adapters = [
        adapter_for(model, 4),
        adapter_for(model, 6, 1, modules=modules),
        adapter_for(model, 3, 2, modules=modules),
    ]
    compare(model, fast, adapters, step_of(MIXED, SLOTS))  # type: ignore[arg-type]


def test_modules_of_one_adapter_may_have_different_ranks(model: RandomModel, fast: CpuDecoder) -> None:
    ranks = {module: 1 + 3 * i for i, module in enumerate(MODULES)}
    compare(model, fast, [adapter_for(model, ranks, seed) for seed in range(3)], step_of(MIXED, SLOTS))


@pytest.mark.parametrize("threads", [1, 3])
def test_any_number_of_threads_and_long_runs(model: RandomModel, threads: int) -> None:
    """More tokens than a thread takes at a time, of several rows with one adapter."""
    inputs = step_of([(90, 91), (0, 70), (0, 100), (3, 68)], [0, 1, 0, 0])
    compare(model, with_adapters(model, threads=threads), [adapter_for(model, 5, seed) for seed in range(2)], inputs)


def test_matrices_that_meet_inside_half_a_block() -> None:
    """16 rows of keys, then 16 of values: B has zeros for one in the pass of the other."""
    model = RandomModel(spec_of(plain_layer(head_dim=8), plain_layer(head_dim=8)))
    compare(model, with_adapters(model), [adapter_for(model, 5, seed) for seed in range(3)], step_of(MIXED, SLOTS))


def test_logits_come_in_the_order_they_are_asked_for(model: RandomModel, fast: CpuDecoder) -> None:
    inputs = step_of(MIXED, SLOTS)
    last = torch.tensor(inputs.row_starts[1:]) - 1
    for asked in (last, last.flip(0), torch.cat((last, torch.arange(4, 30))), torch.arange(0)):
        inputs.logit_indices = asked
        expected = Expected(model, three_adapters(model), step_of(MIXED, SLOTS))
        for slot, adapter in enumerate(three_adapters(model)):
            fast.set_adapter(slot, adapter)
        with torch.inference_mode():
            found = fast.forward(inputs, expected.past)
        assert found.shape == (len(asked), 200)
        if len(asked):
            assert_close(found, expected.logits[asked])
        assert float((expected.past.k - expected.kv.k).norm() / expected.kv.k.norm()) < 1e-3


def three_adapters(model: RandomModel) -> list[Adapter | None]:
    return [adapter_for(model, 8, seed) for seed in range(3)]


@torch.inference_mode()
def test_slots_change_between_steps(model: RandomModel, fast: CpuDecoder) -> None:
    inputs = step_of([(0, 9), (0, 9)], [0, 1])
    one, two = adapter_for(model, 4, 1), adapter_for(model, 12, 2)
    for adapters in ([one, two], [two, one], [None, two], [one, None], [one, one]):
        compare(model, fast, [*adapters, None], inputs)


@torch.inference_mode()
def test_a_prompt_in_chunks_equals_the_whole(model: RandomModel, fast: CpuDecoder) -> None:
    fast.set_adapter(1, adapter_for(model, 16, 3))
    whole = fast.forward(step_of([(0, 60)], [1]), model.cache()).clone()
    kv = model.cache()
    parts = [fast.forward(step_of([span], [1]), kv).clone() for span in ((0, 13), (13, 45), (45, 60))]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_steps_without_adapters_run_the_code_of_a_server_without(
    model: RandomModel, fast: CpuDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast.set_adapter(0, adapter_for(model, 16))
    given: list[Any] = []
    run = cpu_decoder.forward
    monkeypatch.setattr(cpu_decoder, "forward", lambda *args: (given.append(args[3]), run(*args)))
    inputs = step_of([(0, 20), (0, 5)])
    plain = model.fast(team=Team(2)).forward(inputs, model.cache()).clone()
    assert torch.equal(fast.forward(inputs, model.cache()), plain)
    assert given == [None] * 4  # two threads, two steps


@torch.inference_mode()
def test_base_rows_beside_adapters_are_what_they_are_alone(model: RandomModel, fast: CpuDecoder) -> None:
    fast.set_adapter(0, adapter_for(model, 16))
    alone = fast.forward(step_of([(0, 20)], rows=[1]), model.cache()).clone()
    both = fast.forward(step_of([(0, 20), (0, 20)], [0, -1]), model.cache())
    torch.testing.assert_close(both[20:], alone, rtol=1e-5, atol=1e-5)
    assert float((both[:20] - alone).norm() / alone.norm()) > 0.1


class SlowLane:
    """Stands for torch's decoder: says what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def enable_adapters(self, num_slots: int, max_rank: int) -> None:
        self.told.append((num_slots, max_rank))

    def set_adapter(self, slot: int, adapter: Adapter | None) -> None:
        self.told.append((slot, adapter))

    def forward(self, inputs: StepInputs, kv: KVCache) -> torch.Tensor:
        self.told.append(("forward", inputs.adapter_slots))
        return torch.zeros(0)


@torch.inference_mode()
def test_torch_takes_adapters_until_their_kernels_are_compiled(
    model: RandomModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: dict[str, Callable[[], None]] = {}
    monkeypatch.setattr(cpu_decoder, "is_warm", lambda types: not types.endswith("adapters"))
    monkeypatch.setattr(cpu_decoder, "warm_later", lambda types, done: waiting.update({types: done}))
    monkeypatch.setattr(CpuDecoder, "_measure", lambda self: 1000)
    lanes: list[SlowLane] = []
    decoder = model.fast()
    decoder._load_slow = lambda: lanes.append(SlowLane()) or lanes[-1]  # type: ignore[assignment, func-returns-value, return-value]
    decoder.enable_adapters(2, 16)
    one = adapter_for(model, 4)
    decoder.set_adapter(1, one)
    assert lanes[0].told == [(2, 16), (1, one)]
    adapted, base = step_of([(0, 5)], [1]), step_of([(0, 5)])
    decoder.forward(adapted, model.cache())
    decoder.forward(base, model.cache())  # its kernels are there
    assert lanes[0].told[2:] == [("forward", [1])]
    [done] = waiting.values()
    done()
    decoder.forward(adapted, model.cache())
    assert decoder._slow is None and len(lanes[0].told) == 3

    decoder.crossover = 3  # as if torch were faster for larger steps: what it is loaded for then has the adapters too
    with decoder._lanes:
        decoder._open_slow_lane()
    assert lanes[1].told == [(2, 16), (1, one)]
    decoder.set_adapter(1, None)
    assert lanes[1].told[2:] == [(1, None)] and not decoder._resident


def test_what_has_no_room_is_refused(model: RandomModel) -> None:
    decoder = model.fast()
    decoder.enable_adapters(num_slots=2, max_rank=8)
    decoder.set_adapter(0, adapter_for(model, 8))
    with pytest.raises(ValueError, match="rank is 9; there is room for 8"):
        decoder.set_adapter(1, adapter_for(model, 9))
    with pytest.raises(ValueError, match="no slot 2"):
        decoder.forward(step_of([(0, 5)], [2]), model.cache())


def test_adapters_are_enabled_first(model: RandomModel) -> None:
    with pytest.raises(RuntimeError, match="enable_adapters comes first"):
        model.fast().set_adapter(0, None)
