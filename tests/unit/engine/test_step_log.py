"""The step log: what its steps computed adds up, and its moments are in order."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.checkpoints import tiny_model
from tests.fakes.driver import Driver
from tonle import EngineConfig, GenerationConfig, InferenceEngine
from tonle.engine.plan import Plan
from tonle.engine.step_log import read_step_log
from tonle.errors import ConfigError

PROMPTS = [[7 + place, *range(10, 10 + 30 * place)] for place in range(1, 6)]  # none begins like another
LENGTHS = [3, 9, 1, 6, 12]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


def test_the_work_of_its_steps_is_what_was_computed(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    config = EngineConfig(step_log=str(path), max_batch_size=4, max_num_batched_tokens=64, max_sequence_length=256)
    with InferenceEngine(model, None, config) as engine:
        ids = [
            engine.submit_request(prompt, GenerationConfig(max_length=length, do_sample=False, early_stopping=False))
            for prompt, length in zip(PROMPTS, LENGTHS, strict=True)
        ]
        for request_id in ids:
            engine.result(request_id, timeout=60)
    log = read_step_log(path)

    prompt_tokens = sum(len(prompt) for prompt in PROMPTS)
    assert sum(step.rows + step.tokens for step in log.steps) == prompt_tokens + sum(LENGTHS) - len(LENGTHS)
    assert sum(step.samples for step in log.steps) == sum(LENGTHS)
    assert all(step.rows + step.tokens <= 64 and step.rows + step.prompts <= 4 for step in log.steps)
    assert max(step.prompts for step in log.steps) > 1, "prompts were computed beside each other"
    assert any(step.prompts and step.rows for step in log.steps), "and beside answers"
    for step in log.steps:
        moments = (step.planned_s, step.launching_s, step.launched_s, step.waited_s, step.collected_s, step.published_s)
        assert list(moments) == sorted(moments)
    assert [step.collected_s for step in log.steps] == sorted(step.collected_s for step in log.steps)
    assert (log.steps[-1].running, log.steps[-1].waiting) == (0, 0)

    assert sorted(request.prompt_tokens for request in log.requests) == sorted(len(prompt) for prompt in PROMPTS)
    ends = {step.collected_s for step in log.steps}
    for request in log.requests:
        assert request.arrived_s <= request.taken_s < request.first_s
        assert request.first_s in ends

    assert (log.engine.max_num_seqs, log.engine.max_num_batched_tokens, log.engine.long_prefill_tokens) == (4, 64, 32)
    assert (log.engine.device, log.engine.lag, log.engine.context_length) == ("cpu", 0, 256)
    assert log.engine.settings["max_num_batched_tokens"] == 64
    assert "block_size" not in log.engine.settings


def test_a_file_that_cannot_be_written_is_an_error_that_says_so(model: Any, tmp_path: Path) -> None:
    config = EngineConfig(step_log=str(tmp_path / "missing" / "steps.jsonl"))
    with pytest.raises(ConfigError, match=r"step_log: cannot write .*steps.jsonl: No such file"):
        InferenceEngine(model, None, config).start()


def test_a_log_that_can_no_longer_be_written_ends_and_the_engine_goes_on(model: Any, caplog: Any) -> None:
    config = EngineConfig(step_log="/dev/full")
    with InferenceEngine(model, None, config) as engine:
        asked = GenerationConfig(max_length=4, early_stopping=False)
        for _ in range(2):
            assert len(engine.result(engine.submit_request([5, 6, 7], asked), timeout=60).output_ids[0]) == 4
    assert [record.getMessage() for record in caplog.records if "step log" in record.getMessage()] == [
        "the step log /dev/full ends here: No space left on device"
    ]


def test_a_file_that_is_no_step_log_is_an_error_that_says_so(tmp_path: Path) -> None:
    other = tmp_path / "other"
    for text in ("", "{}\n", '{"line": "step"}\n', "nothing like it\n"):
        other.write_text(text)
        with pytest.raises(ConfigError, match="is not a step log"):
            read_step_log(other)
    with pytest.raises(ConfigError, match="cannot read the step log"):
        read_step_log(tmp_path / "none")


def test_the_last_line_may_be_cut(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    with InferenceEngine(model, None, EngineConfig(step_log=str(path))) as engine:
        engine.result(
            engine.submit_request([5, 6, 7], GenerationConfig(max_length=4, early_stopping=False)), timeout=60
        )
    steps = read_step_log(path).steps
    path.write_bytes(path.read_bytes()[:-20])
    assert read_step_log(path).steps == steps[:-1]


def test_ahead_of_the_host_the_work_adds_up_and_steps_overlap(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    config = EngineConfig(step_log=str(path), max_num_batched_tokens=64, max_sequence_length=256)
    driver = Driver(model, config, lag=1)
    plain = Driver(model, replace(config, step_log=None), lag=1)
    requests = [
        driver.ask(prompt, GenerationConfig(max_length=length, do_sample=False, early_stopping=False))
        for prompt, length in zip(PROMPTS, LENGTHS, strict=True)
    ]
    assert driver.run(requests) == plain.run(requests), "a log changes no answer"
    driver.loop._step_log.close()  # type: ignore[attr-defined]
    log = read_step_log(path)
    assert log.engine.lag == 1
    prompt_tokens = sum(len(prompt) for prompt in PROMPTS)
    assert sum(step.rows + step.tokens for step in log.steps) == prompt_tokens + sum(LENGTHS) - len(LENGTHS)
    assert any(later.launched_s < earlier.collected_s for earlier, later in pairwise(log.steps))
    assert len(log.requests) == len(PROMPTS)


@pytest.mark.parametrize("lag", [0, 1])
def test_a_step_that_fails_has_no_line_and_the_others_keep_theirs(model: Any, tmp_path: Path, lag: int) -> None:
    path = tmp_path / "steps.jsonl"
    driver = Driver(model, EngineConfig(step_log=str(path), max_num_batched_tokens=64), lag=lag)
    launch, victim = driver.loop._runner.launch, 2

    def launch_or_fail(plan: Plan) -> Any:
        if any(sequence.request.handle == victim and sequence.num_output >= 3 for sequence in plan.sequences):
            raise RuntimeError("poisoned")
        return launch(plan)

    driver.loop._runner.launch = launch_or_fail  # type: ignore[method-assign]
    outputs = driver.generate(PROMPTS, GenerationConfig(max_length=8, do_sample=False, early_stopping=False))
    assert [len(output) for output in outputs] == [8, 3, 8, 8, 8]
    driver.loop._step_log.close()  # type: ignore[attr-defined]
    log = read_step_log(path)
    assert len(log.requests) == len(PROMPTS)
    assert sum(step.samples for step in log.steps) >= 35
    for step in log.steps:
        moments = (step.planned_s, step.launching_s, step.launched_s, step.waited_s, step.collected_s, step.published_s)
        assert list(moments) == sorted(moments), "each line has the moments of one step"
