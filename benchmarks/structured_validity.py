"""Answers bound by schemas, generated and validated: how many parse and are what their schema says.

Does: each case alone and in a busy batch with free text beside it, streamed and not, at temperature 1. Does not: measure time.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.schemas import Case
from tonle.engine.inference_engine import InferenceEngine
from tonle.engine.request import GenerationConfig, StructuredOutput

MAX_TOKENS = 700
FREE = [{"role": "user", "content": "Tell me about the Mekong in a few sentences."}]


@dataclass(slots=True)
class Validity:
    """What became of the answers of one way to ask."""

    label: str
    num_valid: int = 0
    problems: list[str] = field(default_factory=list)

    def add(self, case: Case, text: str, finish_reason: str | None) -> None:
        problem = case.problem(text)
        if problem is None and finish_reason == "stop":
            self.num_valid += 1
        else:
            why = problem or f"finish_reason is {finish_reason}"
            self.problems.append(f"case {case.index} ({case.kind}) {why}: {text[-160:]!r}")

    @property
    def num_asked(self) -> int:
        return self.num_valid + len(self.problems)


def config_of(case: Case, seed: int, max_tokens: int = MAX_TOKENS) -> GenerationConfig:
    # Recursive schemas end when the model says so; a small model at temperature 1 repeats itself less with a penalty.
    return GenerationConfig(
        structured=StructuredOutput(json=case.schema), temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0,
        frequency_penalty=1.0, max_tokens=max_tokens, seed=seed,
    )  # fmt: skip


async def answer(engine: InferenceEngine, case: Case, seed: int, *, streamed: bool) -> tuple[str, str | None]:
    """Its text and finish reason."""
    messages = [{"role": "user", "content": case.prompt}]
    if not streamed:
        result = await engine.submit_request_async(messages, config_of(case, seed))
        return result.text, result.finish_reason
    text, reason = "", None
    async for delta in engine.stream(messages, config_of(case, seed)):
        text, reason = text + delta.text, delta.finish_reason
    return text, reason


async def validate(
    engine: InferenceEngine,
    cases: Sequence[Case],
    generations: int,
    *,
    num_alone: int,
    batch: int,
    log: Callable[[str], None] | None = None,
) -> list[Validity]:
    """`num_alone` answers one after the other, the rest `batch` at a time with a free one beside every fourth."""
    found = {label: Validity(label) for label in ("alone", "alone, streamed", "busy batch", "busy batch, streamed")}

    async def one(number: int, way: str) -> None:
        case, streamed = cases[number % len(cases)], number % 2 == 1
        text, reason = await answer(engine, case, number, streamed=streamed)
        found[way + (", streamed" if streamed else "")].add(case, text, reason)
        if log is not None and (done := sum(result.num_asked for result in found.values())) % 100 == 0:
            log(f"  {done} of {generations}, {sum(len(result.problems) for result in found.values())} not valid")

    for number in range(num_alone):
        await one(number + number // len(cases), "alone")
    jobs: Iterator[int] = iter(range(num_alone, generations))

    async def work(free: bool) -> None:
        for number in jobs:
            # A second round over the cases is streamed where the first was not.
            await one(number + number // len(cases), "busy batch")
            if free:
                await engine.submit_request_async(FREE, GenerationConfig(max_tokens=24, temperature=1.0))

    await asyncio.gather(*(work(worker % 4 == 0) for worker in range(batch)))
    return list(found.values())


def show(results: Sequence[Validity]) -> bool:
    """Print them; whether all are valid."""
    for result in results:
        print(f"  {result.label:22} {result.num_valid:5} of {result.num_asked:5} parsed and validated")
        for problem, count in collections.Counter(result.problems).most_common(10):
            print(f"      {count} x {problem}")
    total = sum(result.num_valid for result in results)
    asked = sum(result.num_asked for result in results)
    print(f"  {'all':22} {total:5} of {asked:5}", flush=True)
    return total == asked
