"""Guesses on the CUDA path: the same tokens with them as without, whoever guesses, and steps saved where guesses are right.

In float32, where rounding decides nothing. Guesses come from a record of the plain answers, with errors at a stated rate.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu.cases import CUDA, INTERPRETED, Case, make_case, prompts

pytest.importorskip("triton")
if not CUDA and not INTERPRETED:
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)

from benchmarks.scripted_guesses import ScriptedSpeculator

from tests.fakes.adapters import write_adapter
from tests.fakes.driver import Driver
from tests.fakes.guesses import AheadOracle
from tonle.engine.request import GenerationConfig, Request
from tonle.engine.schedule import Drafts

pytestmark = pytest.mark.gpu
NEW = 48 if CUDA else 10
ROWS = 24 if CUDA else 3
GREEDY = GenerationConfig(max_length=NEW, do_sample=False, early_stopping=False)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case("biases", torch.float32, tmp_path_factory.mktemp("model"))


def driver_of(case: Case, speculation: str, **more: Any) -> Driver:
    sizes = {"max_batch_size": ROWS, "max_num_batched_tokens": 256 if CUDA else 40}
    return case.driver(**{**sizes, "speculation": speculation, **more})


def use(driver: Driver, drafter: Any) -> Drafts:
    """This drafter in place of the engine's own."""
    scheduler, runner = driver.loop._scheduler, driver.loop._runner
    scheduler.drafts = Drafts(drafter, ahead=drafter, may_check=runner.checks_drafts, max_entries=runner.max_entries)
    return scheduler.drafts


def scripted(driver: Driver, case: Case, rate: float) -> ScriptedSpeculator:
    drafter = ScriptedSpeculator(ROWS, 256, vocab_size=case.vocab_size, rate=rate, always=True)
    use(driver, drafter)
    return drafter


def answers(driver: Driver, asked: list[list[int]], config: GenerationConfig = GREEDY, **how: Any) -> list[list[int]]:
    outputs = driver.generate(asked, config, **how)
    driver.loop._scheduler.pool.drop_idle()  # no prefix is found the next time
    return outputs


@pytest.mark.parametrize("rate", [1.0, 0.7, 0.0])
def test_one_row(case: Case, rate: float) -> None:
    driver = driver_of(case, "suffix")
    asked = prompts(case, [70 if CUDA else 20], seed=1)
    drafts, driver.loop._scheduler.drafts = driver.loop._scheduler.drafts, None
    plain = answers(driver, asked)
    assert drafts is not None
    drafter = scripted(driver, case, rate)
    drafter.record(asked[0], plain[0])
    before = driver.stats.num_steps
    assert answers(driver, asked) == plain
    num_steps, found = driver.stats.num_steps - before, driver.loop._scheduler.drafts
    assert found is not None and found.num_tokens > 0
    if rate == 1.0:
        assert found.num_accepted == found.num_tokens and num_steps < 8
    if rate == 0.0:
        assert found.num_accepted == 0


def test_rows_together_that_arrive_one_after_another(case: Case) -> None:
    """Some wait and some go on; some guesses are wrong at once, some later, some never. Sampled, too, with log-probabilities:
    from a few tokens each, since a draw among thousands often lies so near the border of two that rounding decides."""
    asked = prompts(case, [3 + 11 * i for i in range(ROWS)] if CUDA else [2, 20, 9], seed=2)
    sampled = GenerationConfig(max_length=NEW, temperature=1.0, top_k=8, seed=5, early_stopping=False, logprobs=2)
    driver = driver_of(case, "suffix")
    for config in (GREEDY, sampled):
        driver.loop._scheduler.drafts = None
        before = len(driver.steps)
        plain = answers(driver, asked, config, arrive_every=1)
        told = logprobs_of(driver, before)
        first = driver._next
        drafts = use(driver, AheadOracle(3, case.vocab_size, {first + 1 + i: each for i, each in enumerate(plain)}))
        before = len(driver.steps)
        assert answers(driver, asked, config, arrive_every=1) == plain
        assert 0 < drafts.num_accepted < drafts.num_tokens
        if config.logprobs is not None:
            found = logprobs_of(driver, before)
            assert len(found) == len(told) == len(asked)
            for ours, theirs in zip(found, told, strict=True):
                torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=0, atol=1e-3)


def logprobs_of(driver: Driver, before: int) -> list[list[float]]:
    """Of the requests since then, in the order of their arrival."""
    told: dict[int, list[float]] = {}
    for step in driver.steps[before:]:
        for handle, records in step.logprobs.items():
            told.setdefault(handle, []).extend(record.logprob for record in records)
    return [told[handle] for handle in sorted(told)]


def test_prefixes_that_hold_guesses_that_were_right(case: Case) -> None:
    """Blocks that steps with guesses have filled are found by the next request, and hold what plain steps would have written."""
    driver = driver_of(case, "suffix")
    (prompt,) = prompts(case, [40 if CUDA else 13], seed=3)
    driver.loop._scheduler.drafts = None
    (plain,) = answers(driver, [prompt])
    drafter = scripted(driver, case, 0.8)
    drafter.record(prompt, plain)
    assert driver.generate([prompt], GREEDY) == [plain]
    longer = prompt + plain
    hits = driver.stats.prefix_hits
    found = driver.generate([longer], GREEDY)
    assert driver.stats.prefix_hits > hits
    driver.loop._scheduler.pool.drop_idle()
    driver.loop._scheduler.drafts = None
    assert driver.generate([longer], GREEDY) == found


def test_preempted_rows(case: Case) -> None:
    """Blocks for a part of the rows: they are set back in the middle of their guesses, and computed again."""
    asked = prompts(case, [30, 31, 32, 33] if CUDA else [10, 11, 12], seed=4)
    plain = answers(driver_of(case, "off"), asked)
    spec = case.reference.spec
    per_block = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 4 * 16
    length = max(map(len, asked)) + NEW
    num_blocks = -(-length // 16) * (len(asked) - 1)
    driver = driver_of(case, "suffix", memory_pool_size=num_blocks * per_block, max_sequence_length=length + 16)
    drafts = use(driver, AheadOracle(5, case.vocab_size, {1 + i: each for i, each in enumerate(plain)}))
    assert driver.generate(asked, GREEDY) == plain
    assert drafts.num_accepted > 0
    assert driver.stats.num_preemptions > 0


def test_ends_in_the_middle_of_guesses(case: Case) -> None:
    """A stop token among guesses that were right: what follows it is not said."""
    driver = driver_of(case, "suffix")
    asked = prompts(case, [12], seed=6)
    driver.loop._scheduler.drafts = None
    (plain,) = answers(driver, asked)
    drafter = scripted(driver, case, 1.0)
    drafter.record(asked[0], plain)
    stop = plain[NEW // 2]
    ends = GenerationConfig(max_length=NEW, do_sample=False, early_stopping=False, stop_token_ids=[stop])
    assert answers(driver, asked, ends) == [plain[: plain.index(stop) + 1]]


def test_rows_that_are_not_guessed_for_go_beside_the_others(case: Case) -> None:
    """With penalties a draw changes the next one: such rows have no guesses here, and the right tokens all the same."""
    driver = driver_of(case, "suffix")
    asked = prompts(case, [9, 14], seed=7)
    wishes = [GREEDY, GenerationConfig(max_length=NEW, do_sample=False, early_stopping=False, frequency_penalty=1.0)]

    def both() -> list[list[int]]:
        requests: list[Request] = [driver.ask(prompt, wish) for prompt, wish in zip(asked, wishes, strict=True)]
        return driver.run(requests)

    driver.loop._scheduler.drafts = None
    plain = both()
    driver.loop._scheduler.pool.drop_idle()
    first = driver._next
    drafts = use(driver, AheadOracle(8, case.vocab_size, {first + 1 + i: each for i, each in enumerate(plain)}))
    assert both() == plain
    assert drafts.num_accepted > 0
    assert driver.steps[-1].stats.accepted_tokens == drafts.num_accepted


def test_adapters(case: Case, tmp_path: Any) -> None:
    """Guesses of a row are computed with its adapter."""
    write_adapter(tmp_path / "left", case.reference.spec, seed=1)
    driver = driver_of(case, "suffix", lora={"left": str(tmp_path / "left")}, max_loras=2, max_lora_rank=8)
    asked = prompts(case, [9, 14, 5], seed=9)
    names = [None, "left", "left"]
    driver.loop._scheduler.drafts = None
    plain = answers(driver, asked, adapters=names)
    first = driver._next
    drafts = use(driver, AheadOracle(2, case.vocab_size, {first + 1 + i: each for i, each in enumerate(plain)}))
    assert answers(driver, asked, adapters=names) == plain
    assert drafts.num_accepted > 0


def test_the_engines_own_guesses(case: Case) -> None:
    """A prompt that repeats itself: matches there are, whatever comes of them."""
    (some,) = prompts(case, [6], seed=10)
    asked = [some * 5, some[::-1] * 4]
    plain = answers(driver_of(case, "off"), asked)
    driver = driver_of(case, "suffix")
    assert driver.loop._scheduler.drafts is not None and driver.loop._scheduler.drafts.are_ahead
    assert answers(driver, asked) == plain
