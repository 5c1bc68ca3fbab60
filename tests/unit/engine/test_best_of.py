"""`n` and `best_of`: candidates share the prompt's blocks, and those with the best mean log-probability are returned."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.fakes.checkpoints import tiny_model
from tests.fakes.driver import Driver
from tonle.config.engine import EngineConfig
from tonle.engine import GenerationConfig, InferenceEngine
from tonle.engine.best_of import BestOf
from tonle.engine.messages import Submit
from tonle.engine.request import Delta, TokenLogprob
from tonle.errors import InvalidRequest

SAMPLED = GenerationConfig(max_length=8, temperature=1.0, seed=3, early_stopping=False)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


def test_the_best_of_several_are_those_that_sorting_all_of_them_gives(model: Any) -> None:
    with InferenceEngine(model, None, EngineConfig(max_sequence_length=256)) as engine:

        def run(**changes: Any) -> Any:
            config = msgspec.structs.replace(SAMPLED, **changes)
            return engine.result(engine.submit_request([5, 6, 7, 8], config), timeout=60)

        every = run(n=6, logprobs=2)
        means = [sum(each.logprob for each in own) / len(own) for own in every.logprobs]
        order = sorted(range(6), key=lambda place: -means[place])
        assert order[:2] != [0, 1], "this would pass without sorting"
        best = run(n=2, best_of=6, logprobs=2)
        assert best.output_ids == [every.output_ids[place] for place in order[:2]]
        for own, place in zip(best.logprobs, order, strict=False):
            assert [each.logprob for each in own] == pytest.approx(
                [each.logprob for each in every.logprobs[place]], abs=1e-4
            )
            assert all(len(each.top) == 2 for each in own)
        assert best.usage.completion_tokens == 6 * 8, "all that were computed count"
        one = run(best_of=6)
        assert one.output_ids == best.output_ids[:1] and one.logprobs is None
        assert run(n=2, best_of=2).output_ids == every.output_ids[:2], "as they come, if all are returned"


def test_the_mean_decides_and_not_the_sum() -> None:
    """Of answers of different lengths: the sum would prefer short ones."""
    best_of = BestOf(GenerationConfig(n=2, best_of=4))
    for index, (length, mean) in enumerate([(2, -1.0), (8, -0.5), (1, -1.5), (5, -0.7)]):
        records = [TokenLogprob(7, mean + (0.1 if n % 2 else -0.1) * (length > 1), []) for n in range(length)]
        chosen = best_of.add(Delta(index, "x" * length, [7] * length, records, finish_reason="stop"))
    assert [delta.text for delta in chosen] == ["x" * 8, "x" * 5]


@pytest.mark.parametrize(("config", "words"), [
    (GenerationConfig(n=3, best_of=2), "best_of must be at least n"), (GenerationConfig(best_of=65), "between 1 and 64"),
    (GenerationConfig(best_of=0), "between 1 and 64"),
])  # fmt: skip
def test_a_number_of_candidates_that_cannot_be_is_refused(config: GenerationConfig, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        config.validate()
    assert caught.value.param == "best_of"


def test_eight_answers_to_a_long_prompt_hold_and_compute_it_once() -> None:
    """2,000 tokens are 125 blocks of 16: the last one, which each computes for itself, is not shared."""
    model = tiny_model("llama", max_position_embeddings=4096)
    driver = Driver(model, EngineConfig(max_sequence_length=2100, max_batch_size=8, memory_pool_size=400 * 8192))
    prompt = [3 + number % 300 for number in range(2000)]
    config = GenerationConfig(max_length=12, early_stopping=False, seed=1)
    requests = [driver.ask(prompt, config) for _ in range(8)]
    driver.mailbox.put(Submit(requests))
    scheduler = driver.loop._scheduler
    most = 0
    for _ in range(30):
        driver.loop.step()
        if len(scheduler.running) == 8 and all(s.num_output >= 1 for s in scheduler.running.values()):
            most = max(most, scheduler.pool.num_held)
        if scheduler.idle:
            break
    assert 0 < most <= 124 + 8 * 2
    assert scheduler.prompt_tokens <= 2000 + 7 * 16, "seven more answers compute a block each, not the prompt"


def test_no_log_probabilities_come_where_nothing_is_chosen(model: Any) -> None:
    """Many clients send best_of: 1."""
    with InferenceEngine(model, None, EngineConfig(max_sequence_length=256)) as engine:

        async def deltas() -> list[Any]:
            config = msgspec.structs.replace(SAMPLED, best_of=1)
            return [delta async for delta in engine.front.submit([5, 6, 7, 8], config)]

        assert {delta.logprobs for delta in engine.on_front(deltas()).result(60)} == {None}
