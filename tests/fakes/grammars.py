"""Grammars under test, with the tokens of the tiny tokenizer: what they accept, what they are made to say, and bombs."""

from __future__ import annotations

import functools
import random
import time
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from tests.fakes.checkpoints import END_OF_TEXT, TURN_END, VOCAB_SIZE, tiny_tokenizer
from tonle.engine.constraint import Compiled, Constraint
from tonle.engine.grammar.compiler import GrammarCompiler, parser_limits
from tonle.engine.grammar.grammar_text import grammar_text
from tonle.engine.grammar.matcher import GrammarConstraint
from tonle.engine.grammar.vocabulary import make_vocabulary
from tonle.engine.request import Request, ResolvedConfig, StructuredOutput, Thinking
from tonle.engine.text import Text

ENDS = frozenset({END_OF_TEXT, TURN_END})
WORDS = -(-VOCAB_SIZE // 32)


@functools.cache
def text() -> Text:
    return Text.from_live(tiny_tokenizer())


@functools.cache
def vocabulary() -> LLTokenizer:
    return make_vocabulary(text(), VOCAB_SIZE, ENDS)


def constraint_of(structured: StructuredOutput) -> GrammarConstraint:
    grammar = grammar_text(structured, text().special_tokens)
    matcher = LLMatcher(vocabulary(), grammar, log_level=0, limits=parser_limits())
    assert not matcher.is_error(), matcher.get_error()
    return GrammarConstraint(matcher, ENDS)


def accepts(structured: StructuredOutput, answer: str) -> bool:
    """Whether `answer`, in the tokenizer's own tokens, is one."""
    matcher = constraint_of(structured).matcher
    tokens = text().encode(answer, add_special_tokens=False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def allowed(constraint: Constraint) -> set[int] | None:
    """The tokens that may come next; None: any."""
    mask = np.full(WORDS, -1, np.int32)
    if not constraint.fill(mask):
        return None
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def say(constraint: Constraint, rng: random.Random, *, forcing: bool = True, most: int = 400) -> list[int]:
    """A random answer, ended as soon as it may."""
    tokens: list[int] = []
    while len(tokens) < most and not constraint.is_complete:
        assert constraint.error is None
        if forcing and (forced := constraint.forced(64)):
            tokens += forced
            continue
        choices = allowed(constraint)
        assert choices is not None
        if choices & ENDS:
            break
        tokens.append(rng.choice(sorted(choices)))
        constraint.push(tokens[-1])
    return tokens


def request(handle: int, grammar: str = "", *, salt: bytes = b"", thinking: Thinking | None = None) -> Request:
    config = ResolvedConfig(thinking=thinking)
    return Request(handle=handle, prompt=[5], config=config, grammar=grammar, salt=salt)


def take_all(compiler: GrammarCompiler, count: int) -> list[Compiled]:
    done: list[Compiled] = []
    until_s = time.monotonic() + 60
    while len(done) < count:
        assert time.monotonic() < until_s, "the compiler did not finish"
        done += compiler.take()
        time.sleep(0.001)
    return done


def chain(count: int) -> dict[str, Any]:
    links = {f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(count)}
    return {"$defs": {**links, f"d{count}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def doubled(levels: int) -> dict[str, Any]:
    links = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(levels)}
    return {"$defs": {**links, f"d{levels}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"anyOf": [schema, {"type": "object", "properties": {"x": schema}}]}
    return schema


BOMBS: dict[str, StructuredOutput] = {
    "a chain of references": StructuredOutput(json=chain(3_000)),
    "a chain of rules": StructuredOutput(
        grammar="start: r0\n" + "".join(f'r{i}: "x" (r{i + 1} | "y")\n' for i in range(390)) + 'r390: "a"'
    ),
    "a chain of terminals": StructuredOutput(
        grammar="start: T0\n" + "".join(f'T{i}: "a" (T{i + 1})* "b"\n' for i in range(390)) + 'T390: "a"'
    ),
    "a mistake behind a chain of rules": StructuredOutput(
        grammar="start: r0\n" + "".join(f'r{i}: r{i + 1} "a"\n' for i in range(390)) + "r390: /a(/"
    ),
    "rules that mean the same": StructuredOutput(grammar='start: s\ns: s s | s s s | "a" | "b"\n'),
    "references twice each": StructuredOutput(json=doubled(60)),
    "unions in unions": StructuredOutput(json=deep(10)),
    "alternatives of all": StructuredOutput(
        json={"allOf": [{"anyOf": [{"properties": {f"a{i}": {"const": j}}} for j in range(4)]} for i in range(12)]}
    ),
    "repetitions of repetitions": StructuredOutput(regex="((a{1,100}){1,100}){1,100000}"),
    "a hundred thousand": StructuredOutput(regex=".{1,100000}"),
    "alternatives of repetitions": StructuredOutput(regex="|".join(f"(x*y{i}.*z)" for i in range(1_000))),
    "terminals twice each": StructuredOutput(
        grammar="start: T0\n" + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(40)) + 'T40: "a"'
    ),
    "all but": StructuredOutput(grammar="start: T\nT: /(.|\\n)*/ & ~/(.|\\n)*a(.|\\n){30}b(.|\\n)*/\n"),
    "many properties": StructuredOutput(
        json={"type": "object", "properties": {f"k{i}": {"type": "integer"} for i in range(400)}}
    ),
    "a long array": StructuredOutput(json={"type": "array", "items": {"type": "integer"}, "minItems": 100_000}),
    "an enum as large as may be": StructuredOutput(json={"enum": [f"value {i}" for i in range(14_000)]}),
}
