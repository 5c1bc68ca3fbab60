"""What a grammar costs on the host: compiling it, a mask per token, how many tokens are forced; and the same of xgrammar.

Does: random answers out of what our schemas allow, timed token by token; the same answers and broken ones given to both engines.
Does not: run a model. Import it where llguidance is installed; xgrammar is looked for when it is asked for.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from benchmarks.schemas import Case, validator
from tonle.engine.grammar.compiler import parser_limits
from tonle.engine.grammar.grammar_text import grammar_text
from tonle.engine.grammar.matcher import GrammarConstraint
from tonle.engine.request import StructuredOutput
from tonle.engine.text import Text

MAX_TOKENS = 300


@dataclass(slots=True)
class Costs:
    """Seconds of this thread's processor time, which others on the machine do not change; but for the counts."""

    name: str
    compile_s: list[float] = field(default_factory=list)
    mask_s: list[float] = field(default_factory=list)
    push_s: list[float] = field(default_factory=list)
    forced_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_forced: int = 0
    num_refused: int = 0
    num_wrong_accepts: int = 0
    num_wrong_rejects: int = 0
    num_judged: int = 0

    def row(self) -> str:
        def times(values: list[float]) -> str:
            if not values:
                return "-"
            ordered = sorted(values)
            return f"{statistics.median(ordered) * 1e6:,.0f} / {ordered[int(len(ordered) * 0.99)] * 1e6:,.0f}"

        share = f"{self.num_forced / self.num_tokens:.0%}" if self.num_forced else "-"
        return (
            f"| {self.name} | {times(self.compile_s)} | {times(self.mask_s)} | {times(self.push_s)} | {times(self.forced_s)} "
            f"| {share} | {self.num_refused} | {self.num_wrong_accepts} | {self.num_wrong_rejects} | {self.num_judged} |"
        )


HEAD = (
    "| engine | compile µs p50 / p99 | mask µs p50 / p99 | push µs p50 / p99 | look for forced µs p50 / p99 | forced tokens "
    "| refused | wrongly accepted | wrongly rejected | judged |\n|---|---|---|---|---|---|---|---|---|---|"
)


def measure_ours(
    cases: Sequence[Case], text: Text, vocabulary: LLTokenizer, seed: int = 0
) -> tuple[Costs, dict[int, str]]:
    """And one random answer per case, for others to judge."""
    costs, answers, rng = Costs("llguidance"), {}, random.Random(seed)
    mask = np.zeros(-(-vocabulary.vocab_size // 32), np.int32)
    for case in cases:
        grammar = grammar_text(StructuredOutput(json=case.schema))
        began = time.thread_time()
        matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=parser_limits())
        costs.compile_s.append(time.thread_time() - began)
        if matcher.is_error():
            costs.num_refused += 1
            continue
        constraint = GrammarConstraint(matcher.deep_copy(), frozenset(vocabulary.eos_tokens))
        tokens = _walk(constraint, mask, costs, rng, set(vocabulary.eos_tokens))
        answer = text.decode(tokens)
        if case.problem(answer) is None:
            answers[case.index] = answer
        judge(costs, case, answers.get(case.index), rng, lambda given, m=matcher: _takes(m, text, given))
    return costs, answers


def _walk(
    constraint: GrammarConstraint, mask: np.ndarray, costs: Costs, rng: random.Random, ends: set[int]
) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < MAX_TOKENS and not constraint.is_complete:
        began = time.thread_time()
        forced = constraint.forced(64)
        costs.forced_s.append(time.thread_time() - began)
        tokens += forced
        costs.num_forced += len(forced)
        if constraint.is_complete:
            break
        began = time.thread_time()
        constraint.fill(mask)
        costs.mask_s.append(time.thread_time() - began)
        choices = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if not ends.isdisjoint(choices.tolist()):
            break
        tokens.append(int(rng.choice(choices)))
        began = time.thread_time()
        constraint.push(tokens[-1])
        costs.push_s.append(time.thread_time() - began)
    costs.num_tokens += len(tokens)
    return tokens


def _takes(matcher: LLMatcher, text: Text, answer: str) -> bool:
    tried = matcher.deep_copy()
    tokens = text.encode(answer, add_special_tokens=False)
    return tried.try_consume_tokens(tokens) == len(tokens) and tried.is_accepting()


def judge(costs: Costs, case: Case, answer: str | None, rng: random.Random, takes: Callable[[str], bool]) -> None:
    """Whether an engine takes what is valid and nothing else: the answer, and changed ones."""
    if answer is None:
        return
    value = json.loads(answer)
    for changed in [value, *(_changed(value, rng) for _ in range(6))]:
        written = json.dumps(changed, ensure_ascii=False)
        is_valid = validator(case.schema).is_valid(changed)
        accepted = takes(written)
        costs.num_judged += 1
        costs.num_wrong_accepts += accepted and not is_valid
        costs.num_wrong_rejects += is_valid and not accepted


def _changed(value: Any, rng: random.Random) -> Any:
    """Something else in one place."""
    if isinstance(value, dict) and value:
        key = rng.choice(list(value))
        if rng.random() < 0.3:
            return {name: item for name, item in value.items() if name != key}
        return {name: _changed(item, rng) if name == key else item for name, item in value.items()}
    if isinstance(value, list) and value:
        at = rng.randrange(len(value))
        return (
            value[:at] + value[at + 1 :]
            if rng.random() < 0.3
            else [*value[:at], _changed(value[at], rng), *value[at + 1 :]]
        )
    others = [
        None,
        True,
        7,
        -1,
        12.5,
        "x",
        "a much longer text than any bound here allows for",
        [],
        {},
        "2024-02-30",
        "red",
    ]
    return rng.choice([other for other in others if other != value])


def measure_xgrammar(
    cases: Sequence[Case], text: Text, vocab_size: int, eos_ids: list[int], answers: dict[int, str]
) -> Costs:
    import xgrammar

    costs, rng = Costs("xgrammar"), random.Random(0)
    pieces = [text.token_bytes(token) for token in range(vocab_size)]
    info = xgrammar.TokenizerInfo(pieces, stop_token_ids=eos_ids)
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    mask = xgrammar.allocate_token_bitmask(1, vocab_size)
    for case in cases:
        began = time.thread_time()
        try:
            compiled = compiler.compile_json_schema(
                json.dumps(case.schema), any_whitespace=False, separators=(", ", ": "), strict_mode=True
            )
        except Exception:
            costs.num_refused += 1
            continue
        costs.compile_s.append(time.thread_time() - began)
        answer = answers.get(case.index)
        if answer is None:
            continue
        matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=eos_ids)
        for token in text.encode(answer, add_special_tokens=False):
            began = time.thread_time()
            matcher.fill_next_token_bitmask(mask)
            costs.mask_s.append(time.thread_time() - began)
            began = time.thread_time()
            if not matcher.accept_token(token):
                break
            costs.push_s.append(time.thread_time() - began)
            costs.num_tokens += 1

        def takes(given: str, compiled: Any = compiled) -> bool:
            tried = xgrammar.GrammarMatcher(compiled, override_stop_tokens=eos_ids)
            return bool(tried.accept_string(given)) and bool(tried.accept_token(eos_ids[0]))

        judge(costs, case, answer, rng, takes)
    return costs
