"""Where a request's time went, told by a real loop with a tiny model: moments are real ones, and parts add up to what passed."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.fakes.checkpoints import tiny_model
from tests.fakes.constraints import RuleCompiler
from tests.fakes.driver import Driver
from tonle import EngineConfig, GenerationConfig
from tonle.engine.request import Request
from tonle.telemetry.time_spent import TimeSpent

VOCABULARY = 384  # of the tiny models, at least


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


def config(**changes: Any) -> EngineConfig:
    settings = {"max_batch_size": 2, "max_num_batched_tokens": 64, "max_sequence_length": 256, **changes}
    return EngineConfig(**settings)


def run(driver: Driver, requests: list[Request]) -> dict[int, TimeSpent]:
    for request in requests:
        request.arrived_s = time.monotonic()
    driver.run(requests)
    spent: dict[int, TimeSpent] = {}
    for step in driver.steps:
        assert step.spent.keys() == step.finished.keys()
        spent |= step.spent
    return spent


@pytest.mark.parametrize("lag", [0, 1])
def test_parts_add_up_to_what_passed(model: Any, lag: int) -> None:
    driver = Driver(model, config(), lag=lag)
    answer = GenerationConfig(max_tokens=6, temperature=0.0, early_stopping=False)
    prompts = [[7 + place, *range(10, 10 + 60 * place)] for place in range(1, 4)]
    requests = [driver.ask(prompt, answer) for prompt in prompts]
    began = time.monotonic()
    spent = run(driver, requests)
    passed_s = time.monotonic() - began
    assert sorted(spent) == [1, 2, 3]
    for request in requests:
        own = spent[request.handle]
        assert 0 < own.total_s <= passed_s
        assert sum(wait.seconds for wait in own.waits) == pytest.approx(own.queue_s)
        assert own.num_steps == 6 and own.decode_s > 0 and own.prefill_s > 0
        assert own.computed_tokens == len(request.prompt) and own.cached_tokens == 0
        assert sum(own.missed.values()) == len(request.prompt)
    assert "rows" in {wait.why for wait in spent[3].waits}, "two run at a time"
    assert sum(own.device_s for own in spent.values()) <= passed_s
    stats = driver.stats
    assert sum(stats.prefix_missed.values()) + stats.prefix_hits == stats.prefix_queries == sum(map(len, prompts))


def test_statistics_that_a_front_keeps_do_not_change_afterwards(model: Any) -> None:
    driver = Driver(model, config())
    answer = GenerationConfig(max_tokens=2, temperature=0.0)
    driver.generate([[1, 2, 3]], answer)
    before = driver.steps[-1]
    kept = dict(before.stats.prefix_missed)
    driver.generate([[4, 5, 6, 7]], answer)
    assert before.stats.prefix_missed == kept == {"new": 0, "evicted": 0, "tail": 3, "off": 0}
    assert driver.stats.prefix_missed["tail"] == 7


@pytest.mark.parametrize("lag", [0, 1])
def test_a_grammar_that_is_compiled_is_a_wait_of_its_own(model: Any, lag: int) -> None:
    compiler = RuleCompiler(
        lambda request: lambda said: frozenset([3, 4] if len(said) % 2 else [5]), VOCABULARY, delay=4
    )
    driver = Driver(model, config(), lag=lag, compiler=compiler)
    answer = GenerationConfig(max_tokens=8, temperature=0.0, early_stopping=False)
    spent = run(driver, [driver.ask([1, 2, 3], answer, grammar="any"), driver.ask([4, 5, 6], answer)])
    waits = {wait.why: wait.seconds for wait in spent[1].waits}
    assert 0 < waits["grammar"] <= spent[1].queue_s == pytest.approx(sum(waits.values()))
    assert "grammar" not in {wait.why for wait in spent[2].waits}
    assert spent[1].num_steps == 8 - 4 if lag == 0 else spent[1].num_steps >= 4, (
        "a forced token needs no step of its own"
    )


def test_an_answer_without_a_choice_takes_no_step(model: Any) -> None:
    compiler = RuleCompiler(lambda request: lambda said: frozenset([5] if len(said) < 3 else []), VOCABULARY, delay=1)
    driver = Driver(model, config(), compiler=compiler)
    answer = GenerationConfig(max_tokens=8, temperature=0.0, early_stopping=False)
    spent = run(driver, [driver.ask([1, 2, 3], answer, grammar="any")])
    assert spent[1].queue_s > 0 and (spent[1].prefill_s, spent[1].decode_s, spent[1].device_s) == (0.0, 0.0, 0.0)
    assert [wait.why for wait in spent[1].waits] == ["step", "grammar"]
    assert sum(wait.seconds for wait in spent[1].waits) == pytest.approx(spent[1].queue_s)


def test_steps_go_on_being_noted_after_one_failed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(model, config())
    launch, count = driver.loop._runner.launch, 0

    def fails_once(plan: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2:
            raise RuntimeError("once")
        return launch(plan)

    monkeypatch.setattr(driver.loop._runner, "launch", fails_once)
    answer = GenerationConfig(max_tokens=4, temperature=0.0, early_stopping=False)
    spent = run(driver, [driver.ask([1, 2, 3], answer), driver.ask([4, 5, 6], answer)])
    notes = driver.loop._scheduler.notes
    assert notes is not None and not notes._in_flight, "the step that failed will never end"
    assert sorted(spent) == [1, 2] and all(own.num_preemptions >= 1 for own in spent.values())
    assert all(own.preempted_s <= own.prefill_s + own.decode_s for own in spent.values())
