"""The second part of `baseline.py`: chat questions, some of which were asked before, with and without what makes them fast.

Does: latencies of `transformers`, of `transformers` with a response cache, and of `create_optimized_engine`, question by
question in turns; where a slow request's time goes; requests per second one by one, concurrent and batched. Does not: load
`transformers` weights.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rich.console import Console

from benchmarks.baseline_sides import Naive
from benchmarks.baseline_tables import at_percentile, breakdown_rows, latency_row, ratio, repeated_questions
from benchmarks.tables import markdown_table, print_wide
from tonle.cache import CachedResponse, ResponseCache
from tonle.inference_optimizer import OptimizedEngine, create_optimized_engine
from tonle.models.source import ModelSource

ANSWER_TOKENS = 24
TURNS = 3  # of the throughput table
CONCURRENT, BATCHED = 5, 8
TITLES = {
    "cache_lookup": "Cache lookup", "tokenization": "Tokenization", "queue": "Queue", "prefill": "Model forward (prompt)",
    "generation": "Generation", "decoding": "Decoding",
}  # fmt: skip
TOPICS = ("rivers", "bridges", "the moon", "bread", "trains", "rice", "clocks", "silk", "maps", "tea", "kites", "salt")


def question(number: int) -> str:
    topic = TOPICS[number % len(TOPICS)]
    return f"w{number + 3} w{number + 4} Question {number}: what should I know about {topic}, and why does it matter?"


class NaiveChat:
    """Questions through `model.generate`. Prompts are written as in the other engine, so that both compute the same."""

    def __init__(self, naive: Naive, text: Any) -> None:
        self._naive = naive
        self._text = text
        self.cache = ResponseCache(max_size=1000, ttl_seconds=3600)

    def prompt(self, asked: str) -> list[int]:
        return list(self._text.encode_chat([{"role": "user", "content": asked}]))

    def answer(self, asked: list[str]) -> list[str]:
        """As one batch."""
        outputs, _, _ = self._naive.generate([(self.prompt(each), ANSWER_TOKENS) for each in asked])
        return [self._text.decode(output) for output in outputs]

    def answer_cached(self, asked: str) -> bool:
        """True if it was in the cache."""
        key = asked.encode()
        if self.cache.get(key) is not None:
            return True
        body = self.answer([asked])[0].encode()
        self.cache.put(key, CachedResponse(body=body, content_type="text/plain", stream=False, request_id=""))
        return False


def chat_tables(source: ModelSource, naive: Naive, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    from tonle.engine.text import load_text

    device = naive.model.device.type
    settings = {} if device == "cpu" else {"dtype": "bfloat16"}
    with create_optimized_engine(
        source.path, device, generation_config="none", memory_pool_size=options.pool_mb * 2**20,
        max_sequence_length=2048, max_tokens=ANSWER_TOKENS, **settings,
    ) as engine:  # fmt: skip
        chat = NaiveChat(naive, load_text(source))
        found = _latencies(chat, engine, options, console)
        return found | {"requests_per_s": _throughput(chat, engine, console)}


def _latencies(
    chat: NaiveChat, engine: OptimizedEngine, options: argparse.Namespace, console: Console
) -> dict[str, Any]:
    """Each question to all three before the next one."""
    asked = repeated_questions(options.questions, options.asked_before, question)
    before = 1 - len(set(asked)) / len(asked)
    console.print(
        f"\n{len(asked)} questions one after the other, {before:.0%} of them asked before; {ANSWER_TOKENS} tokens each"
    )
    plain, cached, full = [], [], []  # seconds, whether it was a hit
    breakdowns = []
    for each in asked:
        began_s = time.perf_counter()
        chat.answer([each])
        plain.append((time.perf_counter() - began_s, False))
        began_s = time.perf_counter()
        hit = chat.answer_cached(each)
        cached.append((time.perf_counter() - began_s, hit))
        _, metadata = engine.generate(each, early_stopping=False)
        full.append((metadata["latency"], metadata["cache_hit"]))
        breakdowns.append(metadata["breakdown"])
    named = {"No optimizations: transformers": plain, "With caching: transformers and ResponseCache": cached,
             "Full optimizations: create_optimized_engine": full}  # fmt: skip
    rows = [latency_row(name, *map(list, zip(*each, strict=True))) for name, each in named.items()]
    print_wide(markdown_table(("Configuration", "P50", "P95", "P99", "Cache Hit"), rows), console)
    p95 = at_percentile([latency for latency, _ in full], 95)
    parts = {TITLES.get(name, name): spent for name, spent in breakdowns[p95].items()}
    console.print("\nLatency breakdown of the P95 request of the last row:")
    print_wide(markdown_table(("", "time", "share"), breakdown_rows(parts)), console)
    hits, misses = ([latency for latency, hit in full if hit is wanted] for wanted in (True, False))
    if hits and misses:
        console.print(
            f"A hit takes {statistics.median(hits) * 1e3:.2f} ms, a miss {statistics.median(misses) * 1e3:.0f} ms (medians)."
        )
    return {"latencies_s": named, "breakdown_s": breakdowns[p95]}


def _throughput(chat: NaiveChat, engine: OptimizedEngine, console: Console) -> dict[str, Any]:
    """Requests per second without the cache. A turn has as many new questions as run at a time."""
    numbers = iter(range(10_000, 20_000))

    def fresh(count: int) -> list[str]:
        return [question(next(numbers)) for _ in range(count)]

    async def ask(asked: list[str]) -> None:
        await asyncio.gather(*(_ask(engine.generate_async, each) for each in asked))

    def at_once(asked: list[str]) -> None:
        asyncio.run(ask(asked))

    def threads(asked: list[str]) -> None:
        with ThreadPoolExecutor(len(asked)) as pool:
            list(pool.map(lambda each: chat.answer([each]), asked))

    rows, found = [], {}
    lines: list[tuple[str, str, int, Callable[[list[str]], Any]]] = [
        ("Sequential", "one by one", 1, chat.answer),
        (f"Concurrent ({CONCURRENT}x)", f"{CONCURRENT} threads", CONCURRENT, threads),
        (f"Batched ({BATCHED}x)", f"a batch of {BATCHED}", BATCHED, chat.answer),
    ]
    for title, how, count, theirs in lines:
        rates: dict[str, list[float]] = {"transformers": [], "tonle": []}
        for _ in range(TURNS):
            for name, run in (("transformers", theirs), ("tonle", at_once)):
                asked, began_s = fresh(count), time.perf_counter()
                run(asked)
                rates[name].append(count / (time.perf_counter() - began_s))
        found[title] = rates
        medians = {name: statistics.median(each) for name, each in rates.items()}
        gain = ratio(rates["transformers"], rates["tonle"], more_is_better=True)
        rows.append(
            (title, f"{medians['transformers']:.2f} req/s ({how})", f"{medians['tonle']:.2f} req/s", f"{gain:.1f}×")
        )
    console.print(f"\nThroughput, {ANSWER_TOKENS} tokens each, no cache:")
    print_wide(markdown_table(("", "transformers", "create_optimized_engine", "ratio"), rows), console)
    return found


async def _ask(generate: Callable[..., Awaitable[Any]], asked: str) -> None:
    await generate(asked, use_cache=False, early_stopping=False)
