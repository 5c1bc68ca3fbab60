"""What an engine keeps of answers for guesses, and what callers get of a step whose guesses go beyond an end."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.checkpoints import tiny_model
from tests.fakes.driver import Driver
from tests.fakes.guesses import Oracle
from tonle.config.engine import EngineConfig
from tonle.engine.messages import DropCache, ReleaseMemory, Submit
from tonle.engine.plan import Plan
from tonle.engine.request import GenerationConfig
from tonle.engine.schedule import Drafts, Sequence
from tonle.engine.speculate import Speculator

LONG = GenerationConfig(max_length=40, do_sample=False, early_stopping=False)


class Knowing(Oracle):
    """Guesses as much as it may, and is always right."""

    def __init__(self, answer: list[int]) -> None:
        super().__init__(0, 320)
        self._answer = answer

    def begin_step(self, plan: Plan) -> bool:
        return True

    def propose_all(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [self._answer[s.num_output : s.num_output + most] for s, most in wanted]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


def engine(model: Any, **settings: Any) -> Driver:
    return Driver(model, EngineConfig(max_sequence_length=128, max_batch_size=4, **settings))


def kept(driver: Driver) -> int:
    """Tokens of answers, for guesses in later ones."""
    drafts = driver.loop._scheduler.drafts
    assert drafts is not None and isinstance(drafts._drafter.drafter, Speculator)
    return len(drafts._drafter.drafter.answers)


def test_a_request_that_wants_no_guesses_leaves_no_text_for_others(model: Any) -> None:
    driver = engine(model)
    driver.generate([[5, 6, 7, 8]], GenerationConfig(max_length=40, do_sample=False, speculate=False))
    assert kept(driver) == 0
    driver.generate([[5, 6, 7, 8]], LONG)
    assert kept(driver) > 30


@pytest.mark.parametrize("message", [DropCache, ReleaseMemory])
def test_answers_are_forgotten_with_the_prefix_cache(
    model: Any, message: type[DropCache] | type[ReleaseMemory]
) -> None:
    driver = engine(model)
    driver.generate([[5, 6, 7, 8]], LONG)
    assert kept(driver) > 30
    driver.mailbox.put(message())
    driver.loop.step()
    assert kept(driver) == 0
    driver.generate([[5, 6, 7, 8]], LONG)
    assert kept(driver) > 30, "those that come later are kept again"


def test_log_probabilities_end_where_the_answer_ends(model: Any) -> None:
    """Steps check guesses beyond a stop token: these have log-probabilities that no caller asked for."""
    config = GenerationConfig(max_length=40, do_sample=False, early_stopping=False, logprobs=1)
    plain = engine(model, speculation="off")
    (whole,) = plain.generate([[5, 6, 7, 8]], config)
    num_accepted = 0
    for cut in range(1, 30, 3):
        asked = GenerationConfig(max_length=40, do_sample=False, early_stopping=False, logprobs=1,
                                 stop_token_ids=[whole[cut]])  # fmt: skip
        guessed = engine(model, speculation="off")
        guessed.loop._scheduler.drafts = drafts = Drafts(Knowing(whole))
        (answer,) = guessed.generate([[5, 6, 7, 8]], asked)
        assert answer == whole[: whole.index(whole[cut]) + 1]
        told = [record.token for step in guessed.steps for records in step.logprobs.values() for record in records]
        assert told == answer
        num_accepted += drafts.num_accepted
    assert num_accepted > 30


def test_what_is_known_for_guesses_is_not_held_while_a_sequence_waits(model: Any) -> None:
    """Any number may wait, and the index of a text takes a hundred times the memory of the text."""
    block = 16 * 2 * 2 * 2 * 16 * 4
    driver = engine(model, memory_pool_size=9 * block)  # one sequence fits, three do not
    scheduler = driver.loop._scheduler
    driver.mailbox.put(Submit([driver.ask([5 + n, 6, 7] * 6, LONG) for n in range(3)]))
    num_waited = 0
    driver.loop.step()
    while not scheduler.idle:
        driver.loop.step()
        waiting = [scheduler.waiting._waiting.get(handle) for handle in (1, 2, 3)]
        assert all(each is None or each.own_text is None for each in waiting)
        num_waited += sum(each is not None and each.num_output > 0 for each in waiting)
    assert scheduler.num_preemptions > 0 and num_waited > 0
