"""A request that breaks a step fails alone: those computed with it go on, with the tokens they would have had."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.checkpoints import tiny_model
from tests.fakes.driver import Driver
from tonle.config.engine import EngineConfig
from tonle.engine.messages import Cancel, Submit
from tonle.engine.plan import Plan
from tonle.engine.request import GenerationConfig, Request

MODEL = tiny_model("llama")
CONFIG = GenerationConfig(max_length=12, seed=7, temperature=0.8, early_stopping=False, repetition_penalty=1.1)
PROMPTS = [[5, 6, 7], list(range(3, 60)), [9] * 20, [11, 12]]


def driver(lag: int, **settings: Any) -> Driver:
    return Driver(MODEL, EngineConfig(max_num_batched_tokens=32, block_size=4, **settings), lag=lag)


def poison(own: Driver, is_bad: Any) -> list[int]:
    """Steps with such a plan raise. Returns the list of how many rows those had."""
    runner, sizes = own.loop._runner, list[int]()
    launch = runner.launch

    def launch_or_fail(plan: Plan) -> Any:
        if is_bad(plan):
            sizes.append(len(plan.rows))
            raise RuntimeError("poisoned")
        return launch(plan)

    runner.launch = launch_or_fail  # type: ignore[method-assign]
    return sizes


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("after", [0, 5])
@pytest.mark.parametrize("victim", [1, 2, 4])
def test_a_poisoned_request_fails_alone(lag: int, after: int, victim: int) -> None:
    expected = driver(lag).generate(PROMPTS, CONFIG)
    own = driver(lag)
    poison(own, lambda plan: any(s.request.handle == victim and s.num_output >= after for s in plan.sequences))
    outputs = own.generate(PROMPTS, CONFIG)
    finished = {handle: reason for step in own.steps for handle, (reason, _) in step.finished.items()}
    assert finished == {handle: "error" if handle == victim else "length" for handle in range(1, 5)}
    for handle, (output, whole) in enumerate(zip(outputs, expected, strict=True), 1):
        assert output == (whole[: len(output)] if handle == victim else whole), f"request {handle}"
    assert len(outputs[victim - 1]) == after
    assert own.generate(PROMPTS[:1], CONFIG) == expected[:1], "the engine goes on"


def test_a_fault_of_all_ends_all() -> None:
    own = driver(0)
    sizes = poison(own, lambda plan: True)
    own.generate(PROMPTS, CONFIG)
    assert sizes[-1] == 1 and len(sizes) <= 2 * len(PROMPTS)


def test_a_fault_of_company_does_not_go_on_for_ever() -> None:
    """Each is well alone, and no two together: after a few attempts they end."""
    own = driver(0)
    sizes = poison(own, lambda plan: len(plan.rows) > 1)
    own.generate(PROMPTS, CONFIG)
    assert len(sizes) <= 8


def test_waiting_requests_are_no_obstacle() -> None:
    own = driver(0, max_batch_size=2)  # more requests than rows
    poison(own, lambda plan: any(s.request.handle == 1 for s in plan.sequences))
    own.generate(PROMPTS * 2, CONFIG)
    finished = {handle: reason for step in own.steps for handle, (reason, _) in step.finished.items()}
    assert finished == {1: "error"} | dict.fromkeys(range(2, 9), "length")


def test_a_suspect_can_be_cancelled() -> None:
    own = driver(0)
    poison(own, lambda plan: len(plan.rows) > 1)
    for handle in (1, 2):
        own.mailbox.put(Submit([Request(handle=handle, prompt=[5, 6], config=CONFIG.resolved())]))
    own.loop.step()  # fails
    own.mailbox.put(Cancel([1]))
    own.mailbox.put(Cancel([2]))
    own.loop.step()
    own.loop._scheduler.verify()
    assert own.loop._scheduler.idle and not own.loop._scheduler._suspects
