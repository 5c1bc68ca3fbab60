"""A drafter that raises costs guesses, and nothing else: answers are those without, wherever it happens."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.fakes.checkpoints import tiny_model
from tests.fakes.driver import Driver
from tests.fakes.guesses import AheadOracle
from tonle.config.engine import EngineConfig
from tonle.engine.messages import ReleaseMemory
from tonle.engine.plan import Plan
from tonle.engine.request import GenerationConfig
from tonle.engine.schedule import Drafts, Sequence

PROMPTS = [[5, 6, 7, 8], [9, 10, 11] * 5, [40 + n for n in range(20)]]
ASKED = GenerationConfig(max_length=40, do_sample=False, early_stopping=False)
PLACES = ("begin_step", "propose_all", "step_ended", "ended")
AHEAD_PLACES = (*PLACES, "choose", "look_ahead")


class Breaking(AheadOracle):
    """Knows what comes, and raises when `place` is called for the `at`-th time, with its work half done."""

    def __init__(self, place: str, at: int, answers: dict[int, list[int]]) -> None:
        super().__init__(3, 320, answers)
        self.calls: Counter[str] = Counter()
        self._place, self._at = place, at

    def _call(self, place: str) -> None:
        self.calls[place] += 1
        if place == self._place and self.calls[place] >= self._at:
            raise RuntimeError(f"broken in {place}")

    def begin_step(self, plan: Plan) -> bool:
        self._call("begin_step")
        return not plan.prompts

    def propose_all(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        found = super().propose_all(wanted)
        self._call("propose_all")
        return found

    def step_ended(self, plan: Plan, seconds: float, num_accepted: int) -> None:
        super().step_ended(plan, seconds, num_accepted)
        self._call("step_ended")

    def ended(self, sequence: Sequence) -> None:
        self._call("ended")

    def forget_texts(self) -> None:
        self._call("forget_texts")

    def release_memory(self) -> None:
        self._call("release_memory")

    def choose(self, sequences: list[Sequence]) -> list[Sequence]:
        self._call("choose")
        return sequences

    def look_ahead(self, sequences: list[Sequence], num_rows: int) -> list[Sequence]:
        self._call("look_ahead")
        return super().look_ahead(sequences, num_rows)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def plain(model: Any) -> list[list[int]]:
    return engine(model).generate(PROMPTS, ASKED)


def engine(model: Any, lag: int = 0, drafter: Breaking | None = None) -> Driver:
    driver = Driver(model, EngineConfig(max_sequence_length=128, max_batch_size=4, speculation="off"), lag=lag)
    if drafter is not None:
        driver.loop._scheduler.drafts = Drafts(drafter, ahead=drafter if lag else None)
    return driver


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize(("lag", "place"), [*((0, place) for place in PLACES), *((1, place) for place in AHEAD_PLACES)])
def test_answers_are_those_without_guesses(
    model: Any, plain: list[list[int]], caplog: pytest.LogCaptureFixture, lag: int, place: str, at: int
) -> None:
    drafter = Breaking(place, at, dict(enumerate(plain, 1)))
    driver = engine(model, lag, drafter)
    assert driver.generate(PROMPTS, ASKED) == plain
    drafts = driver.loop._scheduler.drafts
    assert drafts is not None and drafter.calls[place] == at
    before, calls = drafts.num_drafts, drafter.calls.copy()
    assert driver.generate(PROMPTS, ASKED) == plain, "the engine goes on"
    assert drafts.num_drafts == before and drafter.calls == calls, "it is asked no more"
    pool = driver.loop._scheduler.pool
    assert pool.num_held == 0 and not driver.loop._scheduler.running
    (said,) = [record for record in caplog.records if "speculative decoding" in record.message]
    assert said.exc_info is not None and f"broken in {place}" in str(said.exc_info[1])


@pytest.mark.parametrize("place", ["forget_texts", "release_memory"])
def test_memory_is_released_all_the_same(model: Any, plain: list[list[int]], place: str) -> None:
    driver = engine(model, drafter=Breaking(place, 1, {}))
    driver.mailbox.put(ReleaseMemory())
    assert driver.generate(PROMPTS, ASKED) == plain


def test_a_broken_drafter_lets_go_of_its_memory(model: Any) -> None:
    driver = engine(model, drafter=Breaking("begin_step", 1, {}))
    driver.generate(PROMPTS[:1], ASKED)
    drafts = driver.loop._scheduler.drafts
    assert drafts is not None and drafts._drafter.drafter is None
