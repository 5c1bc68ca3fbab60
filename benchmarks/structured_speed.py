"""Tokens per second of answers bound by schemas, against free text: alone, and among other users.

Does: closed loops of users for some seconds each, on an engine in a process of its own, as a server has it. Does not: validate
(`structured_validity.py` does).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence

from benchmarks.schemas import Case
from tonle.config.engine import EngineConfig
from tonle.engine.front import Front
from tonle.engine.process import EngineProcess
from tonle.engine.request import GenerationConfig, StructuredOutput
from tonle.engine.text import load_text
from tonle.models.source import ModelSource

FREE_TOKENS = 96
MAX_TOKENS = 200
_FREE_PROMPT = [{"role": "user", "content": "Tell me about the Mekong and the people who live on it, in some detail."}]


async def _free(front: Front, seed: int) -> int:
    config = GenerationConfig(max_tokens=FREE_TOKENS, temperature=1.0, early_stopping=False, seed=seed)
    return (await front.submit(_prompt(front, _FREE_PROMPT), config).result()).usage.completion_tokens


async def _bound(front: Front, case: Case, seed: int) -> int:
    config = GenerationConfig(
        structured=StructuredOutput(json=case.schema), max_tokens=MAX_TOKENS, temperature=1.0, seed=seed
    )
    prompt = _prompt(front, [{"role": "user", "content": case.prompt}])
    return (await front.submit(prompt, config).result()).usage.completion_tokens


def _prompt(front: Front, messages: list[dict[str, str]]) -> list[int]:
    """A chat, where the tokenizer has a template; else its text."""
    if front.text.chat_template is not None:
        return front.text.encode_chat(messages)
    return front.text.encode(messages[-1]["content"])


async def _users(front: Front, cases: Sequence[Case], free: int, bound: int, seconds: float) -> tuple[float, float]:
    """Tokens per second of all free users together, and of all bound ones."""
    counts = [0, 0]
    seeds = itertools.count()
    until_s = time.monotonic() + seconds

    async def user(is_bound: bool) -> None:
        while time.monotonic() < until_s:
            seed = next(seeds)
            made = _bound(front, cases[seed % len(cases)], seed) if is_bound else _free(front, seed)
            num_tokens = await made  # first: others count meanwhile
            counts[is_bound] += num_tokens

    began = time.monotonic()
    await asyncio.gather(*(user(number < bound) for number in range(free + bound)))
    elapsed = time.monotonic() - began
    return counts[0] / elapsed, counts[1] / elapsed


async def measure_speed(
    source: ModelSource, config: EngineConfig, cases: Sequence[Case], *, users: int, bound: int, seconds: float
) -> None:
    engine = EngineProcess(source, config)
    front = Front(load_text(source), source.name, engine.send)
    await engine.start(front)
    await engine.wait_ready()
    try:
        await _measure(front, cases, users=users, bound=bound, seconds=seconds)
    finally:
        await engine.stop()


async def _measure(front: Front, cases: Sequence[Case], *, users: int, bound: int, seconds: float) -> None:
    await asyncio.gather(*(_bound(front, case, 0) for case in cases))  # compiled and warm
    await _users(front, cases, users, 0, min(seconds, 3.0))
    print(f"## Speed: {seconds:g} s each\n\n| users | free, tok/s | bound, tok/s | |\n|---|---|---|---|", flush=True)
    free_alone = (await _users(front, cases, 1, 0, seconds))[0]
    bound_alone = (await _users(front, cases, 0, 1, seconds))[1]
    print(f"| 1 | {free_alone:,.0f} | {bound_alone:,.0f} | bound {bound_alone / free_alone:.2f} x free |", flush=True)
    if users > 1:
        await _measure_crowd(front, cases, users=users, bound=bound, seconds=seconds)


async def _measure_crowd(front: Front, cases: Sequence[Case], *, users: int, bound: int, seconds: float) -> None:
    # In turns, so that what else the machine does falls on both.
    rounds = [
        (
            await _users(front, cases, users, 0, seconds / 2),
            await _users(front, cases, users - bound, bound, seconds / 2),
        )
        for _ in range(2)
    ]
    all_free = sum(before[0] for before, _ in rounds) / len(rounds)
    mixed_free = sum(mixed[0] for _, mixed in rounds) / len(rounds)
    mixed_bound = sum(mixed[1] for _, mixed in rounds) / len(rounds)
    per_user = (mixed_free / (users - bound)) / (all_free / users)
    print(f"| {users} free | {all_free:,.0f} | | |")
    print(f"| {users - bound} free, {bound} bound | {mixed_free:,.0f} | {mixed_bound:,.0f} | a free user gets {per_user:.3f} x; "
          f"a bound one {mixed_bound / bound / (mixed_free / (users - bound)):.2f} x a free one; all tokens "
          f"{(mixed_free + mixed_bound) / all_free:.3f} x |", flush=True)  # fmt: skip
    all_bound = (await _users(front, cases, 0, users, seconds / 2))[1]
    print(f"| {users} bound | | {all_bound:,.0f} | {all_bound / all_free:.2f} x free |\n", flush=True)
