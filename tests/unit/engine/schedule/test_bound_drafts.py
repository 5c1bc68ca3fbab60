"""Guesses of sequences that are held to a grammar: which are computed, and where the grammar stands afterwards."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.fakes.constraints import RuleConstraint, random_rule
from tests.fakes.grammars import allowed, constraint_of, say, text
from tests.fakes.guesses import Oracle
from tonle.engine.constraint import Constraint
from tonle.engine.grammar.thinking import ThinkingConstraint
from tonle.engine.plan import Plan
from tonle.engine.request import Request, ResolvedConfig, StructuredOutput, Thinking
from tonle.engine.schedule import BoundDrafts, Drafts, Sequence

STRUCTURED = StructuredOutput(regex=r"(ab|ac){3}[0-9]{2,6}")


class Certain(Oracle):
    """Guesses what it is told to."""

    def __init__(self, guesses: list[int], *, may_pay: bool = True) -> None:
        super().__init__(0, 100)
        self.guesses, self.may_pay = guesses, may_pay

    def begin_step(self, plan: Plan) -> bool:
        return self.may_pay

    def propose_all(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [self.guesses[:most] for _, most in wanted]


def decoding(constraint: Constraint, **config: Any) -> tuple[Plan, Sequence]:
    request = Request(handle=1, prompt=[5], config=ResolvedConfig(max_length=50, **config))
    sequence = Sequence(request, key=0.0, stops=frozenset(), constraint=constraint)
    sequence.row = 0
    return Plan(rows=[0], starts=[0], chunks=[[5]], samples=[True], sequences=[sequence], bound=[0]), sequence


def test_guesses_that_the_grammar_forbids_are_not_computed() -> None:
    constraint = RuleConstraint(lambda history: frozenset({len(history) + 1, 90}))
    plan, _ = decoding(constraint)
    Drafts(Certain([1, 2, 3, 7, 5])).add(plan, 20, lambda sequence, count, plan: count)
    assert plan.draft(0) == [1, 2, 3] and constraint.tokens == []


def test_with_log_probabilities_tokens_without_a_choice_are_guessed_even_where_others_do_not_pay() -> None:
    constraint = RuleConstraint(lambda history: frozenset({len(history) + 1} if len(history) < 4 else {8, 9}))
    plan, _ = decoding(constraint, logprobs=0)
    Drafts(Certain([7, 7], may_pay=False)).add(plan, 20, lambda sequence, count, plan: count)
    assert plan.draft(0) == [1, 2, 3, 4] and constraint.tokens == []
    plan, _ = decoding(RuleConstraint(lambda history: frozenset({8, 9})), logprobs=0)
    Drafts(Certain([8], may_pay=False)).add(plan, 20, lambda sequence, count, plan: count)
    assert not plan.drafts


@pytest.mark.parametrize("seed", range(8))
def test_a_constraint_stands_where_it_stood_after_the_draw(seed: int) -> None:
    """Whatever came of the guesses, also if the draw fails."""
    rng = random.Random(seed)
    thinking = Thinking(start=[3], end=[5, 6], is_open=True, budget=3, closing=[4, 5, 6])
    for constraint in (
        constraint_of(STRUCTURED),
        ThinkingConstraint(thinking, constraint_of(STRUCTURED)),
        RuleConstraint(random_rule(seed, 6)),
    ):
        whole = [7, 8] if isinstance(constraint, ThinkingConstraint) else []
        if not isinstance(constraint, RuleConstraint):
            whole += say(constraint_of(STRUCTURED), rng, forcing=False)
        plan, _ = decoding(constraint, logprobs=0)  # nothing is forced, but drawn
        before = allowed(constraint) if not isinstance(constraint, RuleConstraint) else constraint.allowed
        with pytest.raises(ZeroDivisionError), BoundDrafts(plan, 10, 1) as after:
            for token in whole[: rng.randint(1, 9)] or [1, 2, 3]:
                if after.follow(0, token) is None:
                    break
                after.mask(0)
            raise ZeroDivisionError
        assert constraint.error is None
        now = allowed(constraint) if not isinstance(constraint, RuleConstraint) else constraint.allowed
        assert now == before


def test_while_it_may_begin_to_think_no_token_is_led_along_and_back() -> None:
    """A thought that has begun is for good: the grammar begins anew after it."""
    first, second, third = text().encode("ab|", add_special_tokens=False)
    thinking = Thinking(start=[first, second, third], end=[third], budget=3, closing=[third])
    constraint = ThinkingConstraint(thinking, constraint_of(StructuredOutput(regex="a[0-9]+")))
    constraint.push(first)  # may still be the answer
    constraint.push(second)  # may not: the third must follow
    plan, _ = decoding(constraint, logprobs=0)
    Drafts(Certain([], may_pay=False)).add(plan, 20, lambda sequence, count, plan: count)
    assert not plan.drafts and allowed(constraint) == {third}
    constraint.push(third)
    assert constraint.takes_guesses and allowed(constraint) is None, "it thinks"


def test_nothing_is_forced_behind_a_guess_that_would_not_be_forced_without() -> None:
    """While a stop token may not come yet, tokens are drawn even where there is no choice: one that must come is refused then."""
    tokens = text().encode("abc", add_special_tokens=False)
    for min_tokens, expected in ((20, []), (0, tokens[1:])):
        constraint = constraint_of(StructuredOutput(regex="abc[0-9]{9}"))
        plan, sequence = decoding(constraint, stop_token_ids=[7], min_tokens=min_tokens)
        with BoundDrafts(plan, 10, 1) as after:
            assert after.follow(0, tokens[0]) == expected
        assert sequence.tokens == [5]


def test_guesses_can_be_led_to_the_end_of_a_grammar_and_back() -> None:
    constraint = constraint_of(StructuredOutput(choice=["abc"]))
    (first, *others) = say(constraint_of(StructuredOutput(choice=["abc"])), random.Random(0), forcing=False)
    plan, _ = decoding(constraint)
    with BoundDrafts(plan, 10, 1) as after:
        assert after.follow(0, first) is None and constraint.is_complete, "what is forced leads to the end"
    assert not constraint.is_complete and constraint.fits([first, *others]) == 1 + len(others)
