"""Rows with constraints through loop, scheduler and runner on a small real model: masks, forced tokens, penalties, neighbours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.fakes.checkpoints import tiny_model
from tests.fakes.constraints import Rule, RuleCompiler, random_rule
from tests.fakes.driver import Driver
from tonle.config.engine import EngineConfig
from tonle.engine.messages import Cancel, Step, Submit
from tonle.engine.request import GenerationConfig, Request, Thinking

MODEL = tiny_model("llama")
VOCAB = MODEL.config.vocab_size
NEW = 16
PLAIN = GenerationConfig(max_length=NEW, do_sample=False, early_stopping=False)
PENALTIES = GenerationConfig(max_length=NEW, seed=3, temperature=0.9, top_p=0.9, early_stopping=False, repetition_penalty=1.3,
                             presence_penalty=0.5, frequency_penalty=2.0, logit_bias={40: 6.0, 42: 5.0},
                             min_tokens=3)  # fmt: skip
PROMPTS = [[5, 6, 7], list(range(3, 60)), [9] * 20, [11, 12]]
EVEN = frozenset(range(0, VOCAB, 2))
RUN = [40, 41, 40, 42, 40]  # tokens that are forced


def forcing(history: tuple[int, ...]) -> frozenset[int] | None:
    """Two tokens to begin with; then an even one, and four that are forced, in turn."""
    turn = len(history) - 2
    if turn < 0:
        return frozenset([RUN[len(history)]])
    return frozenset([RUN[turn % 5]]) if turn % 5 else EVEN


def driver(lag: int, rule: Rule = forcing, **more: Any) -> Driver:
    return driver_of(lag, lambda request: rule, **more)


def driver_of(lag: int, rule: Callable[[Request], Rule | str], **more: Any) -> Driver:
    config = EngineConfig(max_num_batched_tokens=32, block_size=4, **more)
    return Driver(MODEL, config, lag=lag, compiler=RuleCompiler(rule, VOCAB))


def run(own: Driver, configs: list[GenerationConfig], bound: list[bool], **how: Any) -> list[list[int]]:
    asked = [own.ask(prompt, config, grammar="x" if is_bound else "")
             for prompt, config, is_bound in zip(PROMPTS, configs, bound, strict=True)]  # fmt: skip
    return own.run(asked, **how)


@torch.inference_mode()
def best(text: list[int], allowed: frozenset[int]) -> int:
    logits = MODEL(torch.tensor([text])).logits[0, -1]
    return max(allowed, key=lambda token: (float(logits[token]), -token))


@pytest.mark.parametrize("lag", [0, 1])
def test_greedy_takes_the_best_that_is_allowed(lag: int) -> None:
    rules = {handle: random_rule(handle, VOCAB - 1, forced=0.4, free=0.0, end=0.0) for handle in range(1, 5)}
    own = driver_of(lag, lambda request: rules[request.handle])
    for handle, (prompt, output) in enumerate(zip(PROMPTS, run(own, [PLAIN] * 4, [True] * 4), strict=True), start=1):
        assert len(output) == NEW
        for place, token in enumerate(output):
            allowed = rules[handle](tuple(output[:place]))
            assert isinstance(allowed, frozenset)
            assert token == best(prompt + output[:place], allowed), f"token {place} of request {handle}"
        assert own.loop._compiler.made[handle].tokens == output  # type: ignore[union-attr]


@pytest.mark.parametrize("config", [PLAIN, PENALTIES], ids=["greedy", "penalties"])
def test_lag_and_jumps_change_nothing(config: GenerationConfig) -> None:
    """Forced tokens are computed as a chunk or drawn one by one, a step ahead of the host or not: the same tokens."""
    outputs = []
    for lag in (0, 1):
        for min_forced in (1, 3, 99):
            own = driver(lag)
            limits = own.loop._scheduler.limits
            object.__setattr__(limits, "min_forced", min_forced)
            outputs.append(run(own, [config] * 4, [True, False, True, True], arrive_every=2))
    assert all(output == outputs[0] for output in outputs)
    assert outputs[0][0][3:7] == RUN[1:]


def test_a_stop_token_that_must_come_before_it_may_is_the_same_however_it_comes() -> None:
    """`min_tokens` forbids a token that the rule wants: refused, whether it would be forced or drawn."""
    config = GenerationConfig(max_length=NEW, do_sample=False, early_stopping=False, stop_token_ids=[41], min_tokens=9)
    ends = []
    for lag in (0, 1):
        for min_forced in (1, 2, 99):
            own = driver(lag)
            object.__setattr__(own.loop._scheduler.limits, "min_forced", min_forced)
            own.mailbox.put(Submit([own.ask(PROMPTS[0], config, grammar="x")]))
            until(own, lambda step: step.refused or step.finished)
            ends.append(said(own))
    assert all(end == {1: "token 0 may not follow [40]"} for end in ends), ends


@pytest.mark.parametrize("config", [PLAIN, PENALTIES], ids=["greedy", "penalties"])
def test_late_masks_change_nothing(config: GenerationConfig) -> None:
    """A sequence whose mask comes late misses steps; its tokens and those of others are the same, penalties included."""
    bound, rule = [True, False, True, True], random_rule(7, VOCAB - 1, forced=0.3, free=0.2, end=0.0)
    in_time = run(driver(1, rule), [config] * 4, bound, arrive_every=2)
    own = driver(1, rule)
    own.loop._compiler = compiler = RuleCompiler(lambda request: rule, VOCAB, late=0.7)
    assert run(own, [config] * 4, bound, arrive_every=2) == in_time
    assert compiler.num_late > 5 and not compiler.late


@pytest.mark.parametrize("lag", [0, 1])
def test_neighbours_do_not_notice(lag: int) -> None:
    configs = [PENALTIES, PLAIN, PENALTIES, PLAIN]
    alone = run(driver(lag), configs, [False] * 4, arrive_every=2)
    among = run(driver(lag), configs, [True, False, False, True], arrive_every=2)
    assert among[1:3] == alone[1:3]
    assert among[0] != alone[0] and among[3] != alone[3]


@pytest.mark.parametrize("lag", [0, 1])
def test_forced_tokens_take_fewer_steps(lag: int) -> None:
    """Of eight, all but the first are forced: two steps without lag; with it, one sample in flight is passed over."""
    steps = []
    for least in (1, 99):
        own = driver(lag, lambda said: frozenset([30] if said else [30, 31]))
        object.__setattr__(own.loop._scheduler.limits, "min_forced", least)
        config = GenerationConfig(max_length=8, do_sample=False, early_stopping=False, speculate=False)
        [output] = own.run([own.ask(PROMPTS[0], config, grammar="x")])
        assert len(output) == 8 and set(output[1:]) == {30}
        steps.append(own.stats.num_steps)
    assert steps == [1 + lag, 8] if lag == 0 else steps[0] <= 2 < steps[1]
    assert own.stats.generation_tokens == 8


@pytest.mark.parametrize("lag", [0, 1])
def test_log_probabilities_are_those_of_the_model(lag: int) -> None:
    """Not of what was left of its choice; and each token has one, so none is forced."""
    config = GenerationConfig(max_length=8, do_sample=False, early_stopping=False, logprobs=2)
    own = driver(lag)
    asked = own.ask(PROMPTS[1], config, grammar="x")
    [output] = own.run([asked])
    told = [record for step in own.steps for record in step.logprobs.get(asked.handle, [])]
    assert [record.token for record in told] == output
    with torch.inference_mode():
        text = torch.tensor([PROMPTS[1] + output])
        table = MODEL(text).logits[0].log_softmax(-1)[len(PROMPTS[1]) - 1 : -1]
    wanted = table.gather(1, torch.tensor(output)[:, None]).squeeze(1)
    assert torch.allclose(torch.tensor([record.logprob for record in told]), wanted, atol=1e-4)
    assert all(record.top[0][0] == int(row.argmax()) for record, row in zip(told, table, strict=True))


@pytest.mark.parametrize("lag", [0, 1])
def test_described_prompts_are_computed(lag: int) -> None:
    """Also where all of the answer is forced, or nothing may be said at all."""
    config = GenerationConfig(max_length=4, do_sample=False, prompt_logprobs=1)
    own = driver(lag, lambda said: frozenset([30] if len(said) < 3 else []))
    asked = own.ask(PROMPTS[1], config, grammar="x")
    assert own.run([asked]) == [[30] * 3]
    told = {place for step in own.steps for first, records in step.prompt_logprobs.values()
            for place in range(first, first + len(records))}  # fmt: skip
    assert told == set(range(1, len(PROMPTS[1])))


def test_answers_without_a_choice_need_no_step() -> None:
    own = driver(0, lambda said: frozenset([30] if len(said) < 3 else []))
    asked = own.ask(PROMPTS[0], GenerationConfig(max_length=9), grammar="x")
    assert own.run([asked]) == [[30] * 3]
    assert own.stats.num_steps == 0 and own.stats.generation_tokens == 3
    step = next(step for step in own.steps if step.finished)
    assert step.finished == {asked.handle: ("stop", None)} and asked.handle in step.started
    none = driver(0, lambda said: frozenset()).run([asked])
    assert none == [[]]


def said(own: Driver) -> dict[int, str]:
    return {handle: why for step in own.steps for handle, why in step.refused.items()}


def until(own: Driver, done: Callable[[Step], bool]) -> Step:
    for _ in range(1000):
        own.loop.step()
        if own.steps and done(own.steps[-1]):
            return own.steps[-1]
    raise AssertionError("it never came")


@pytest.mark.parametrize("lag", [0, 1])
def test_an_error_ends_its_own_request(lag: int) -> None:
    def rule(request: Request) -> Rule | str:
        if request.grammar == "bad":
            return "no such rule"
        return lambda history: EVEN if len(history) < 5 else "the rule is too deep"

    expected = run(driver(lag), [PLAIN] * 4, [False] * 4)[0]
    own = driver_of(lag, rule)
    asked = [own.ask(PROMPTS[0], PLAIN, grammar=grammar) for grammar in ("", "bad", "deep")]
    own.mailbox.put(Submit(asked))
    until(own, lambda step: asked[0].handle in step.finished)
    assert said(own) == {asked[1].handle: "no such rule", asked[2].handle: "the rule is too deep"}
    assert [t for step in own.steps for h, t in zip(step.handles, step.tokens, strict=False) if h == 1] == expected
    assert own.loop._scheduler.idle


def test_requests_wait_for_their_constraints() -> None:
    own = driver(0)
    own.loop._compiler = compiler = RuleCompiler(lambda request: forcing, VOCAB, delay=3)
    asked = [own.ask(PROMPTS[0], PLAIN, grammar="x"), own.ask(PROMPTS[0], PLAIN, grammar="x")]
    own.mailbox.put(Submit(asked))
    own.loop.step()
    assert own.stats.num_waiting == 2 and own.stats.num_running == 0
    own.mailbox.put(Cancel([asked[0].handle]))
    step = until(own, lambda step: bool(step.finished))
    assert list(step.finished) == [asked[1].handle] and list(compiler.made) == [asked[1].handle]
    assert own.stats.num_waiting == 0 and not compiler.is_busy


def test_without_a_compiler_they_are_refused() -> None:
    own = driver(0)
    own.loop._compiler = None
    own.mailbox.put(Submit([own.ask([5], PLAIN, grammar="x"),
                            own.ask([5], GenerationConfig(thinking=Thinking(end=[7], budget=3))),
                            own.ask([5], GenerationConfig(max_length=2, thinking=Thinking(end=[7])))]))  # fmt: skip
    until(own, lambda step: 3 in step.finished)
    assert list(said(own)) == [1, 2] and "structured output" in said(own)[1]


@pytest.mark.parametrize("lag", [0, 1])
def test_preempted_rows_go_on(lag: int) -> None:
    configs = [PENALTIES] * 4
    expected = run(driver(lag), configs, [True] * 4)
    config = MODEL.config
    token_bytes = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    own = driver(lag, max_sequence_length=80, memory_pool_size=24 * 4 * token_bytes)
    assert run(own, configs, [True] * 4) == expected
    assert own.stats.num_preemptions > 0
