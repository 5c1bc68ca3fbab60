"""A sequence's place in a grammar: what is forced, what may come, and thoughts before the answer."""

from __future__ import annotations

import random

import pytest

from tests.fakes.checkpoints import TURN_END, TURN_START, VOCAB_SIZE, tiny_tokenizer
from tests.fakes.grammars import ENDS, accepts, allowed, constraint_of, say, text, vocabulary
from tonle.engine.grammar.matcher import GrammarConstraint
from tonle.engine.grammar.thinking import ThinkingConstraint
from tonle.engine.grammar.vocabulary import make_vocabulary
from tonle.engine.request import StructuredOutput, Thinking
from tonle.engine.text import Text
from tonle.engine.text.no_text import NoText
from tonle.errors import InvalidRequest

PERSON = StructuredOutput(
    json={
        "type": "object",
        "properties": {"full name": {"type": "string", "maxLength": 5}, "ភាសា": {"enum": ["ខ្មែរ", "ខ្មៅ", "english"]}},
        "required": ["full name", "ភាសា"],
    }
)
CHOICE = StructuredOutput(choice=["yes", "no"])
OPENS, ENDS_IT = 40, [41, 42]  # tokens between which the model thinks


def encode(answer: str) -> list[int]:
    return text().encode(answer, add_special_tokens=False)


class TestForced:
    def test_what_leaves_no_choice_is_forced(self) -> None:
        constraint = constraint_of(PERSON)
        assert text().decode(constraint.forced(100)).startswith('{"full name": ')
        assert constraint.forced(100) == []

    def test_at_most_and_at_least(self) -> None:
        constraint, other = constraint_of(PERSON), constraint_of(PERSON)
        whole = other.forced(100)
        assert (
            constraint.forced(0) == [] == constraint.forced(5, least=6) == constraint.forced(100, least=len(whole) + 1)
        )
        assert constraint.forced(2) + constraint.forced(100) == whole

    def test_they_are_the_tokenizers_own(self) -> None:
        """Not letter by letter: the model knows its own spelling."""
        constraint = constraint_of(StructuredOutput(choice=["the quick brown fox; ភាសាខ្មែរ"]))
        assert constraint.forced(100) == encode("the quick brown fox; ភាសាខ្មែរ")
        assert constraint.is_complete

    @pytest.mark.parametrize("seed", range(20))
    def test_the_text_is_a_text_of_the_grammar_with_forcing_and_without(self, seed: int) -> None:
        """Where a forced run ends inside of a token, llguidance leaves its last bytes to be sampled with what follows."""
        for forcing in (True, False):
            constraint = constraint_of(PERSON)
            answer = text().decode(say(constraint, random.Random(seed), forcing=forcing))
            assert constraint.is_complete and accepts(PERSON, answer)

    def test_an_end_that_the_grammar_names_is_sampled(self) -> None:
        constraint = constraint_of(StructuredOutput(grammar="start: /ab/ <|im_end|>"))
        assert constraint.forced(9) == encode("ab")
        assert allowed(constraint) == {TURN_END}
        constraint.push(TURN_END)
        assert constraint.is_complete and constraint.error is None

    def test_a_special_token_written_as_text_is_text(self) -> None:
        constraint = constraint_of(StructuredOutput(choice=["<|im_end|> is text"]))
        tokens = constraint.forced(100)
        assert ENDS.isdisjoint(tokens) and text().decode(tokens) == "<|im_end|> is text"


class TestMask:
    def test_the_end_is_allowed_where_the_grammar_may_end(self) -> None:
        constraint = constraint_of(StructuredOutput(regex="a+"))
        assert not (allowed(constraint) or set()) & ENDS
        constraint.push(encode("a")[0])
        assert (allowed(constraint) or set()) >= ENDS
        constraint.push(TURN_END)
        assert constraint.is_complete

    def test_when_complete_nothing_but_the_end_is_allowed(self) -> None:
        constraint = constraint_of(CHOICE)
        for token in encode("yes"):
            constraint.push(token)
        assert constraint.is_complete and constraint.forced(5) == [] and allowed(constraint) == ENDS
        constraint.push(TURN_END)
        assert constraint.error is None

    def test_a_token_that_is_not_allowed_is_an_error(self) -> None:
        constraint = constraint_of(CHOICE)
        constraint.push(encode("q")[0])
        assert constraint.error is not None and not constraint.is_complete
        assert "yes" not in constraint.error

    def test_free_text_has_no_special_tokens_and_no_ids_without_a_token(self) -> None:
        free = StructuredOutput(grammar=r"start: /(.|\n)*/")
        found = allowed(constraint_of(free)) or set()
        assert TURN_START not in found and found >= ENDS
        wide = make_vocabulary(text(), VOCAB_SIZE + 100, ENDS)
        assert wide.vocab_size == VOCAB_SIZE + 100
        matcher = type(constraint_of(free).matcher)(wide, r"start: /(.|\n)*/", log_level=0)
        bits = matcher.compute_bitmask()
        assert not any(bits[token // 8] >> token % 8 & 1 for token in range(VOCAB_SIZE, VOCAB_SIZE + 100))


class TestVocabulary:
    def test_without_bytes_there_is_none(self) -> None:
        class Words:
            vocab_size = 10

            def encode(self, text: str) -> list[int]:
                return [1]

            def decode(self, tokens: list[int]) -> str:
                return "a"

        with pytest.raises(InvalidRequest, match="what bytes each token stands for"):
            make_vocabulary(Text.from_live(Words()), 10, [1])
        with pytest.raises(InvalidRequest, match="no tokenizer, which structured output would need"):
            make_vocabulary(NoText(), 10, [1])
        with pytest.raises(InvalidRequest, match="no end-of-sequence token"):
            make_vocabulary(Text.from_live(tiny_tokenizer().backend_tokenizer), 10, [10])

    def test_text_that_is_changed_by_the_tokenizer_is_written_as_it_is(self) -> None:
        """A tokenizer that normalizes (here: to small letters) would force another text than the grammar's."""
        from tokenizers import normalizers

        core = tiny_tokenizer().backend_tokenizer.from_str(tiny_tokenizer().backend_tokenizer.to_str())
        core.normalizer = normalizers.Lowercase()
        lower = make_vocabulary(Text.from_live(core), VOCAB_SIZE, ENDS)
        constraint = GrammarConstraint(
            type(constraint_of(CHOICE).matcher)(lower, 'start: "ABC the"', log_level=0), ENDS
        )
        assert text().decode(constraint.forced(9)) == "ABC the"
        assert vocabulary().is_canonical


class TestThinking:
    def thinking(self, answer: StructuredOutput | None, **fields: object) -> ThinkingConstraint:
        made = Thinking(start=[OPENS], end=ENDS_IT, **fields)  # type: ignore[arg-type]
        return ThinkingConstraint(made, None if answer is None else constraint_of(answer))

    def test_thoughts_are_free_and_the_answer_is_bound(self) -> None:
        constraint = self.thinking(CHOICE, is_open=True)
        for token in (90, 41, 91, *ENDS_IT):  # the first 41 is a thought
            assert allowed(constraint) is None and constraint.forced(9) == [] and not constraint.is_complete
            constraint.push(token)
        assert allowed(constraint) == allowed(constraint_of(CHOICE))
        for token in encode("no"):
            constraint.push(token)
        assert constraint.is_complete

    def test_the_budget_writes_the_end(self) -> None:
        constraint = self.thinking(CHOICE, is_open=True, budget=3, closing=[50, *ENDS_IT, 51])
        for token in (90, 91):
            constraint.push(token)
            assert constraint.forced(9) == []
        constraint.push(92)
        assert constraint.forced(9, least=5) == [] and allowed(constraint) == {50}
        assert constraint.forced(2) == [50, 41]
        constraint.push(42)  # drawn under the mask instead
        assert allowed(constraint) == {51}
        assert constraint.forced(9) == [51]
        assert allowed(constraint) == allowed(constraint_of(CHOICE))

    def test_a_thought_that_cannot_end_is_an_error(self) -> None:
        constraint = self.thinking(None, is_open=True, budget=1, closing=ENDS_IT)
        constraint.push(90)
        constraint.push(0)  # drawn although the mask forbids it: `min_tokens` forbids all that it allows
        assert constraint.error is not None and "min_tokens" in constraint.error

    def test_a_budget_of_nothing(self) -> None:
        constraint = self.thinking(None, is_open=True, budget=0)
        assert constraint.forced(9) == ENDS_IT
        assert allowed(constraint) is None and constraint.forced(9) == [] and not constraint.is_complete

    def test_what_ends_in_time_is_left_alone(self) -> None:
        constraint = self.thinking(None, is_open=True, budget=3)
        for token in (90, *ENDS_IT, 90, 90, 90, 90):
            constraint.push(token)
        assert constraint.forced(9) == [] and allowed(constraint) is None

    def test_the_model_may_think_or_answer(self) -> None:
        first = allowed(self.thinking(CHOICE)) or set()
        assert first == (allowed(constraint_of(CHOICE)) or set()) | {OPENS}
        answers = self.thinking(CHOICE)
        for token in encode("yes"):
            answers.push(token)
        assert answers.is_complete
        thinks = self.thinking(CHOICE, budget=1)
        thinks.push(OPENS)
        assert allowed(thinks) is None
        thinks.push(90)
        assert thinks.forced(9) == ENDS_IT
        assert allowed(thinks) == allowed(constraint_of(CHOICE))

    def test_a_start_of_several_tokens_that_may_be_the_answer(self) -> None:
        """`<` may begin `<think>` or `<b>`: both ways stay open until they part."""
        start = encode("<think>")
        made = Thinking(start=start, end=ENDS_IT)
        answer = StructuredOutput(regex="<b>|<that>")
        assert start[:1] == encode("<")
        for words, fits in (("<b>", True), ("<that>", True), ("<think>", False)):
            constraint = ThinkingConstraint(made, constraint_of(answer))
            for token in encode(words):
                assert token in (allowed(constraint) or {token})
                constraint.push(token)
            assert constraint.is_complete == fits and constraint.error is None
            if not fits:  # the answer begins anew, whatever of it the start looked like
                for token in (90, *ENDS_IT):
                    constraint.push(token)
                assert allowed(constraint) == allowed(constraint_of(answer))
        thinks = ThinkingConstraint(made, constraint_of(CHOICE))
        thinks.push(start[0])
        assert thinks.forced(9) == start[1:]  # no answer begins like this
        assert allowed(thinks) is None
