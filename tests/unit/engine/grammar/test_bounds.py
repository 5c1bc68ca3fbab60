"""Grammars that would take too long: while they are read, compiled, and per token."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest

from tests.fakes import grammars
from tests.fakes.checkpoints import VOCAB_SIZE
from tests.fakes.grammars import ENDS, WORDS, allowed, constraint_of, request, say, take_all
from tonle.engine.grammar import compiler as module
from tonle.engine.grammar import matcher
from tonle.engine.grammar.compiler import GrammarCompiler
from tonle.engine.grammar.grammar_text import grammar_text
from tonle.engine.request import StructuredOutput as S
from tonle.errors import InvalidRequest

AMBIGUOUS = S(grammar='start: s\ns: s s | s s s | "a" | "b"\n')


def refs(count: int, last: dict[str, Any]) -> dict[str, Any]:
    """A chain: each has a pattern, and refers to the next."""
    names = {f"d{i}": {"pattern": f"x{i}", "$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$defs": {**names, f"d{count}": last}, "$ref": "#/$defs/d0"}


class TestReading:
    def test_long_texts_are_read_in_one_pass(self) -> None:
        """One pass takes milliseconds; one for each character, minutes."""
        grammar_text(S(grammar="a" * 250_000))
        grammar_text(S(grammar="a" * 120_000 + "[" + "b" * 120_000))
        with pytest.raises(InvalidRequest, match="cannot be read at line 1"):
            grammar_text(S(grammar='root ::= "a"{1,' + " " * 60_000))

    @pytest.mark.parametrize(("schema", "words"), [
        ({"type": "integer", "multipleOf": 1_000_003}, "multipleOf 1000003 at #; at most 100000 is taken"),
        ({"patternProperties": {f"^p{i}$": {} for i in range(101)}}, "101 patternProperties; at most 100"),
        ({"anyOf": [{"patternProperties": {f"^p{i}{j}$": {} for i in range(60)}} for j in range(2)]}, "120 patternProp"),
        ({"type": "string", "allOf": [{"pattern": f"x{i}"} for i in range(9)]}, "more than 8 patterns or formats"),
        (refs(9, {"type": "string"}), "more than 8 patterns or formats for one string at #"),
        ({"allOf": [{"anyOf": [{"pattern": "a"}, {"pattern": "b"}]}] * 9}, "more than 8 patterns"),
        (refs(8, {"$ref": "#/properties/a/anyOf/0"}) | {"properties": {"a": {"anyOf": [{"format": "date"}]}}}, "than 8"),
    ])  # fmt: skip
    def test_what_would_not_end_is_refused(self, schema: dict[str, Any], words: str) -> None:
        with pytest.raises(InvalidRequest) as caught:
            grammar_text(S(json=schema))
        assert words in caught.value.message

    @pytest.mark.parametrize("schema", [
        {"anyOf": [{"type": "string", "pattern": f"^x{i}$"} for i in range(50)]},
        {"type": "object", "properties": {f"p{i}": {"type": "string", "pattern": "^a$"} for i in range(50)}},
        refs(7, {"$ref": "#/$defs/d0"}),  # in a circle: for llguidance to refuse
        refs(7, {"$ref": "#/$defs/nowhere/9/x"}),
    ])  # fmt: skip
    def test_patterns_of_different_values_are_not_added_up(self, schema: dict[str, Any]) -> None:
        grammar_text(S(json=schema))


class TestCompiling:
    def test_a_grammar_that_does_not_end_is_given_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        go_on, real = threading.Event(), module._compile

        def stuck(key: Any, vocabulary: Any) -> Any:
            if "stuck" in key[1]:
                go_on.wait(60)
            return real(key, vocabulary)

        monkeypatch.setattr(module, "_compile", stuck)
        monkeypatch.setattr(module, "_MAX_COMPILE_S", 0.2)
        monkeypatch.setattr(module, "_MAX_LEFT", 1)
        compiler = GrammarCompiler(grammars.text, VOCAB_SIZE, ENDS)
        try:
            compiler.ask(request(1, grammar_text(S(choice=["stuck"]))))
            (late,) = take_all(compiler, 1)
            assert late.constraint is None and "takes too long to compile" in late.error
            compiler.ask(request(2, grammar_text(S(choice=["stuck"]))))  # known now
            compiler.ask(request(3, grammar_text(S(choice=["other"]))))
            again, refused = take_all(compiler, 2)
            assert again.error == late.error and "ask the operator to restart" in refused.error
            monkeypatch.setattr(module, "_MAX_LEFT", 2)
            compiler.ask(request(4, grammar_text(S(choice=["other"]))))  # by another thread
            (done,) = take_all(compiler, 1)
            assert done.constraint is not None
        finally:
            go_on.set()
            compiler.close()

    def test_reasons_are_in_words_for_the_caller(self) -> None:
        compiler = GrammarCompiler(grammars.text, VOCAB_SIZE, ENDS)
        for handle, (given, words) in enumerate([
            (S(json={"$ref": "#"}), "no text at all fits it"),
            (grammars.BOMBS["terminals twice each"], "its patterns are too complex"),
            (S(json={"type": "string", "pattern": "^(.*a.{30})*$", "minLength": 500}), "too complex together"),
        ]):  # fmt: skip
            compiler.ask(request(handle, grammar_text(given)))
            (done,) = take_all(compiler, 1)
            assert words in done.error
        compiler.close()


class TestQueue:
    def test_what_no_caller_waits_for_is_not_compiled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        began, go_on, seen, real = threading.Event(), threading.Event(), [], module._compile

        def watch(key: Any, vocabulary: Any) -> Any:
            seen.append(key[1])
            began.set()
            go_on.wait(60)
            return real(key, vocabulary)

        monkeypatch.setattr(module, "_compile", watch)
        compiler = GrammarCompiler(grammars.text, VOCAB_SIZE, ENDS)
        first, gone, last = (grammar_text(S(choice=[word])) for word in ("first", "gone", "last"))
        compiler.ask(request(1, first))
        assert began.wait(60)
        for handle in range(2, 50):
            compiler.ask(request(handle, gone))
        compiler.ask(request(50, last))
        for handle in range(1, 50):
            compiler.forget(handle)
        go_on.set()
        (done,) = take_all(compiler, 1)
        assert done.request.handle == 50 and seen == [first, last]
        compiler.ask(request(51, first))  # it had begun, and was kept
        assert take_all(compiler, 1)[0].constraint is not None and seen == [first, last]
        compiler.close()


class TestPerToken:
    def test_one_that_is_slow_all_the_time_ends(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(matcher, "_TOKEN_S", 0.0)  # this vocabulary is small
        monkeypatch.setattr(matcher, "_BURST_S", 0.01)
        constraint, mask = constraint_of(AMBIGUOUS), np.zeros(WORDS, np.int32)
        for _ in range(400):
            if constraint.error is not None:
                break
            constraint.fill(mask)
            constraint.push(min((allowed(constraint) or set()) - ENDS))
        assert constraint.error is not None and "takes too long to find out what may come next" in constraint.error

    def test_slow_masks_are_told_apart_from_the_others_of_a_pool(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Masks that are filled side by side say nothing about whose they are."""
        monkeypatch.setattr(module, "_SLOW_FILL_S", 0.0)
        monkeypatch.setattr("tonle.engine.grammar.compiler.num_cores", lambda: 4)
        compiler = GrammarCompiler(grammars.text, VOCAB_SIZE, ENDS)
        rows: list[Any] = [constraint_of(S(choice=["yes", "no"])) for _ in range(5)]
        masks = np.zeros((5, WORDS), np.int32)
        compiler.fill(rows, masks)
        one_by_one = []

        def watch(row: matcher.GrammarConstraint, _mask: np.ndarray) -> bool:
            one_by_one.append(row)
            return True

        monkeypatch.setattr(matcher.GrammarConstraint, "fill", watch)
        compiler.fill(rows, masks)
        assert one_by_one == rows
        compiler.close()

    def test_runs_without_a_choice_are_found_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where they are not jumped over, as with log-probabilities: the same answers, whether the run is known or not."""
        schema = S(json={"type": "object", "properties": {"c": {"enum": ["x", "y"]}, "r": {"const": "lorem ipsum " * 20}},
                         "required": ["c", "r"]})  # fmt: skip
        plain = say(constraint_of(schema), random.Random(1), forcing=False)
        monkeypatch.setattr(matcher, "_LONG_S", -1.0)
        constraint = constraint_of(schema)
        assert say(constraint, random.Random(1), forcing=False) == plain
        assert constraint.is_complete and constraint.error is None

    def test_many_choices_are_few_ways_to_go_on(self) -> None:
        texts = [f"option {i}" for i in range(3_000)]
        tokens = say(constraint_of(S(choice=texts)), random.Random(1))
        assert grammars.text().decode(tokens) in texts
