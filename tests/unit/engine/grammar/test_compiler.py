"""The compiler beside the loop: once per grammar and tenant, mistakes in words, and nothing that brings the process down."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.fakes import grammars
from tests.fakes.checkpoints import VOCAB_SIZE, tiny_tokenizer
from tests.fakes.grammars import BOMBS, ENDS, WORDS, deep, request, take_all
from tonle.engine.grammar import compiler as module
from tonle.engine.grammar.compiler import GrammarCompiler
from tonle.engine.grammar.grammar_text import grammar_text
from tonle.engine.grammar.matcher import GrammarConstraint, Pace
from tonle.engine.grammar.tenant_queue import TenantQueue
from tonle.engine.grammar.thinking import ThinkingConstraint
from tonle.engine.request import StructuredOutput, Thinking
from tonle.engine.text import Text
from tonle.engine.text.no_text import NoText
from tonle.errors import InvalidRequest

YES = grammar_text(StructuredOutput(choice=["yes", "no"]))


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(grammars.text, VOCAB_SIZE, ENDS)
    yield made
    made.close()
    assert not made._worker.thread.is_alive()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The grammars that were compiled."""
    seen: list[str] = []
    real = module._compile

    def watch(key: Any, vocabulary: Any) -> Any:
        seen.append(key[1])
        return real(key, vocabulary)

    monkeypatch.setattr(module, "_compile", watch)
    return seen


def error_of(compiler: GrammarCompiler, grammar: str) -> str:
    compiler.ask(request(1, grammar))
    (done,) = take_all(compiler, 1)
    assert (done.constraint is None) == bool(done.error)
    return done.error


class TestCache:
    def test_identical_grammars_are_compiled_once(self, compiler: GrammarCompiler, compiled: list[str]) -> None:
        for handle in range(5):
            compiler.ask(request(handle, YES))
        done = take_all(compiler, 5)
        compiler.ask(request(9, YES))
        (hit,) = compiler.take()  # at once
        assert compiled == [YES] and not compiler.is_busy
        constraints = [each.constraint for each in (*done, hit)]
        assert len({id(constraint) for constraint in constraints}) == 6
        assert constraints[0] is not None and constraints[1] is not None
        for token in grammars.text().encode("yes", add_special_tokens=False):
            constraints[0].push(token)
        assert constraints[0].is_complete and not constraints[1].is_complete

    def test_tenants_share_nothing(self, compiler: GrammarCompiler, compiled: list[str]) -> None:
        for handle, salt in enumerate((b"a", b"b", b"a")):
            compiler.ask(request(handle, YES, salt=salt))
        take_all(compiler, 3)
        assert compiled == [YES, YES]

    def test_mistakes_are_kept_too(self, compiler: GrammarCompiler, compiled: list[str]) -> None:
        assert error_of(compiler, "start: (") == error_of(compiler, "start: (") != ""
        assert len(compiled) == 1

    def test_the_cache_is_bounded(
        self, compiler: GrammarCompiler, compiled: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "_MAX_CACHED", 2)
        ask = [grammar_text(StructuredOutput(choice=[str(i)])) for i in range(3)]
        for grammar in (ask[0], ask[1], ask[0], ask[2], ask[0], ask[1]):  # ask[1] was used least recently
            assert error_of(compiler, grammar) == ""
        assert compiled == [ask[0], ask[1], ask[2], ask[1]]
        monkeypatch.setattr(module, "_MAX_CACHED_BYTES", 1)
        assert error_of(compiler, ask[2]) == "" and not compiler._cache and compiler._cached_bytes == 0


def test_masks_that_a_step_does_not_wait_for(compiler: GrammarCompiler) -> None:
    """By other threads, in time or late; by the loop's own once a grammar is known to be quick: the same masks."""
    schema = grammar_text(StructuredOutput(json={"type": "object", "properties": {"a": {"type": "string"}}}))
    for handle, grammar in enumerate([YES, schema] * 3):
        compiler.ask(request(handle, grammar))
    constraints = [done.constraint for done in take_all(compiler, 6) if done.constraint is not None]
    expected, masks = np.zeros((6, WORDS), np.int32), np.zeros((6, WORDS), np.int32)
    assert compiler.fill(constraints, expected) == [True] * 6
    for _ in range(100):
        masks[:] = 0
        found = compiler.fill(constraints, masks, 0.0)
        late = [each for each, is_filled in zip(constraints, found, strict=True) if is_filled is None]
        assert all(is_filled in (True, None) for is_filled in found)
        if late:  # however long it takes
            assert compiler.fill(constraints, masks) == [True] * 6
        assert (masks == expected).all() and not any(map(compiler.is_late, constraints))
    assert all(isinstance(each, GrammarConstraint) and each.pace.num_filled > 0 for each in constraints)
    is_quick = module._is_quick(constraints[0])
    assert is_quick == constraints[0].pace.is_quick  # type: ignore[attr-defined]


def test_a_grammar_with_slow_masks_is_not_filled_by_the_loop() -> None:
    pace = Pace()
    assert not pace.is_quick, "it is not known yet"
    for _ in range(100):
        pace.note(1e-5)
    assert pace.is_quick
    pace.note(0.005)
    assert not pace.is_quick


def test_many_of_one_tenant_do_not_hold_up_another() -> None:
    jobs = TenantQueue()
    for number in range(3):
        jobs.put((b"a", str(number)))
    jobs.put((b"b", "0"))
    first = jobs.get()
    jobs.put((b"c", "0"))
    assert [first, *(jobs.get() for _ in range(4))] == [(b"a", "0"), (b"b", "0"), (b"a", "1"), (b"c", "0"), (b"a", "2")]
    jobs.put((b"a", "x"))
    jobs.close()
    assert jobs.get() is None


class TestRequests:
    def test_a_cancelled_one_is_not_taken(self, compiler: GrammarCompiler) -> None:
        for handle in (1, 2, 3):
            compiler.ask(request(handle, YES))
        compiler.forget(1)
        compiler.forget(3)
        assert [done.request.handle for done in take_all(compiler, 1)] == [2]
        compiler.ask(request(4, YES))
        compiler.forget(4)
        assert compiler.take() == [] and not compiler.is_busy

    def test_a_budget_for_thoughts_needs_no_grammar(self, compiler: GrammarCompiler) -> None:
        compiler.ask(request(1, thinking=Thinking(end=[5], budget=3, is_open=True)))
        (done,) = compiler.take()
        assert isinstance(done.constraint, ThinkingConstraint) and done.constraint.answer is None

    def test_masks_side_by_side_are_those_of_one_after_the_other(self, compiler: GrammarCompiler) -> None:
        thinking = Thinking(end=[5], is_open=True)
        for handle in range(12):
            compiler.ask(request(handle, YES, thinking=thinking if handle % 3 == 0 else None))
        constraints = [done.constraint for done in take_all(compiler, 12)]
        given = [constraint for constraint in constraints if constraint is not None]
        given[3].push(5)  # its thoughts are over
        expected = np.full((12, WORDS), -1, np.int32)
        wanted = [constraint.fill(mask) for constraint, mask in zip(given, expected, strict=True)]
        compiler._pool = module.LLExecutor(2)
        masks = np.full((12, WORDS), -1, np.int32)
        assert compiler.fill(given, masks) == wanted == [handle % 3 != 0 or handle == 3 for handle in range(12)]
        assert (masks == expected).all()

    def test_a_tokenizer_that_cannot_do_it_is_said_to_each(self) -> None:
        def broken() -> Text:
            raise RuntimeError("secret path")

        for text, words in ((NoText, "no tokenizer, which structured output"), (broken, "its log says why")):
            compiler = GrammarCompiler(text, VOCAB_SIZE, ENDS)
            assert words in error_of(compiler, YES) and words in error_of(compiler, YES)
            compiler.close()


class TestMistakes:
    @pytest.mark.parametrize(
        ("structured", "words"),
        [
            (StructuredOutput(regex="(a"), "unclosed group"),
            (StructuredOutput(grammar="start: missing"), 'unknown name: "missing"'),
            (StructuredOutput(grammar="start: <|nothing|>"), "unknown special token"),
            (
                StructuredOutput(
                    json={"properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "type": "object"}
                ),
                "at #/properties/a: oneOf is supported where no value can fit two",
            ),
            (
                StructuredOutput(
                    json={
                        "type": "object",
                        "properties": {"a": {"type": "integer", "minimum": 5, "maximum": 2}},
                        "required": ["a"],
                    }
                ),
                "at #: Unsatisfiable schema: required property 'a' is unsatisfiable",
            ),
            (
                StructuredOutput(json={"$defs": {"x": {"type": "wrong"}}, "items": {"$ref": "#/$defs/x"}}),
                "Invalid type: wrong",
            ),
            (StructuredOutput(json={"$ref": "#/$defs/x"}), "Pointer '/$defs/x' does not exist"),
            (
                StructuredOutput(json={"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
                "an answer would not end",
            ),
            (StructuredOutput(json={"$ref": "#"}), "cannot be used"),
        ],
    )
    def test_they_are_told_in_words(self, compiler: GrammarCompiler, structured: StructuredOutput, words: str) -> None:
        error = error_of(compiler, grammar_text(structured))
        assert words in error and "<non-verbose" not in error

    def test_what_is_forced_may_be_longer_than_the_context(self) -> None:
        """The tokenizer of a served model refuses texts that are far too long."""
        text = Text.from_live(tiny_tokenizer())
        text.max_tokens = 16
        compiler = GrammarCompiler(lambda: text, VOCAB_SIZE, ENDS)
        endless = StructuredOutput(json={"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]})
        assert "an answer would not end" in error_of(compiler, grammar_text(endless))
        compiler.close()


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_compiled_or_refused_in_bounded_time_and_memory(name: str, compiler: GrammarCompiler) -> None:
    """The bound on time is that of `take_all`; a chain that overflowed the stack would end this process."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    others = threading.active_count()
    compiler.ask(request(1, grammar_text(BOMBS[name])))
    (done,) = take_all(compiler, 1)
    if done.constraint is not None:
        mask = np.zeros(WORDS, np.int32)
        for _ in range(30):
            if done.constraint.forced(64) or done.constraint.is_complete or done.constraint.error:
                continue
            done.constraint.fill(mask)
            choices = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            done.constraint.push(int(choices[len(choices) // 2]))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600 * 1024  # KB
    assert threading.active_count() == others


def test_a_thread_started_meanwhile_has_the_usual_stack() -> None:
    before = threading.stack_size()
    GrammarCompiler(grammars.text, VOCAB_SIZE, ENDS).close()
    assert threading.stack_size() == before


def test_what_the_front_refuses_never_gets_here() -> None:
    for levels in (200, 10_000):
        with pytest.raises(InvalidRequest, match="levels"):
            grammar_text(StructuredOutput(json=deep(1) | {"items": _nested(levels)}))


def _nested(levels: int) -> Any:
    schema: Any = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema
