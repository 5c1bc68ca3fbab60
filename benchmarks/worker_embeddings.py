"""A pool of encoders against one process with static batches: texts per second, and how long a text waits.

    python -m benchmarks.worker_embeddings                     # the default model; a burst, then arrivals over time
    python -m benchmarks.worker_embeddings --lengths even      # texts of all lengths alike; most others are short

Static batches are what a script around `transformers` does: so many texts in the order of arrival, padded to the longest.
Does: give both sides the same token ids in turns, print medians and ratios by repeat, check that vectors agree. Does not:
tokenize, or measure HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
import torch
from rich.console import Console
from transformers import AutoModel

from benchmarks.tables import markdown_table, print_wide
from tonle.workers.encoders.folder import find_folder
from tonle.workers.encoders.text import Tokens
from tonle.workers.encoders.token_job import token_job
from tonle.workers.pool import WorkerPool
from tonle.workers.pool_config import PoolConfig, Strategy

Vector = np.ndarray  # (dimensions,), of length 1
Submit = Callable[[list[int]], Awaitable[Vector]]
STATIC = "static batches, padded"


def texts_of(count: int, lengths: str, longest: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """`mixed`: half have fewer than 36 tokens, one in twenty more than 160. `even`: any length alike."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        size = rng.randint(8, longest) if lengths == "even" else round(rng.lognormvariate(3.6, 0.9))
        found.append([rng.randrange(1000, vocab_size) for _ in range(min(max(size, 4), longest))])
    return found


class Static:
    """One model in this process, batches of a fixed size in the order of arrival; the last may be smaller."""

    def __init__(self, model: str | None, batch_size: int, wait_s: float) -> None:
        self._model = AutoModel.from_pretrained(find_folder(model), attn_implementation="sdpa").eval()
        self._batch_size, self._wait_s = batch_size, wait_s
        self._arrived: asyncio.Queue[tuple[list[int], asyncio.Future[Vector]]] = asyncio.Queue()

    async def submit(self, ids: list[int]) -> Vector:
        done: asyncio.Future[Vector] = asyncio.get_running_loop().create_future()
        self._arrived.put_nowait((ids, done))
        return await done

    async def serve(self) -> None:
        while True:
            batch = [await self._arrived.get()]
            try:  # as the pool: a batch that does not fill is run after a while
                async with asyncio.timeout(self._wait_s):
                    while len(batch) < self._batch_size:
                        batch.append(await self._arrived.get())
            except TimeoutError:
                pass
            vectors = await asyncio.to_thread(self._embed, [ids for ids, _ in batch])
            for (_, done), vector in zip(batch, vectors, strict=True):
                done.set_result(vector)

    @torch.inference_mode()
    def _embed(self, texts: list[list[int]]) -> np.ndarray:
        longest = max(map(len, texts))
        ids = torch.tensor([each + [0] * (longest - len(each)) for each in texts])
        mask = torch.tensor([[1] * len(each) + [0] * (longest - len(each)) for each in texts])
        states = self._model(ids, attention_mask=mask).last_hidden_state
        pooled = (states * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)
        return torch.nn.functional.normalize(pooled, dim=1).numpy()


def pool_of(options: argparse.Namespace, strategy: Strategy, *, instances: int = 1) -> WorkerPool:
    return WorkerPool(PoolConfig(
        kind="embeddings", name=f"{strategy}-{instances}", model=options.model, strategy=strategy, bucket_size=32,
        instances=instances, options={"threads": max(options.threads // instances, 1)}, max_batch=options.batch_size,
        max_wait_ms=options.wait_ms, max_queue=100_000,
    ))  # fmt: skip


def submit_to(pool: WorkerPool) -> Submit:
    async def submit(ids: list[int]) -> Vector:
        result = await pool.run(token_job(Tokens(np.array(ids, np.int32))))
        return np.frombuffer(result.media[0], np.float32)

    return submit


@dataclass
class Side:
    submit: Submit
    pool: WorkerPool | None = None
    cpu_s: list[float] = field(
        default_factory=list
    )  # of each repeat, in all its processes: what other programs do not change
    texts_per_s: list[float] = field(default_factory=list)  # of each repeat
    waits_s: list[float] = field(default_factory=list)
    vectors: np.ndarray | None = None

    def cpu_used_s(self) -> float:
        times = [psutil.Process(pid).cpu_times() for pid in (self.pool.pids if self.pool else [])]
        return time.process_time() + sum(each.user + each.system for each in times)


async def drive(side: Side, texts: list[list[int]], rate: float | None) -> None:
    """All at once, or `rate` texts per second at random moments, the same for each side."""
    rng = random.Random(1)
    began, used_s = time.monotonic(), side.cpu_used_s()
    due = 0.0

    async def one(ids: list[int], at_s: float) -> Vector:
        vector = await side.submit(ids)
        side.waits_s.append(time.monotonic() - began - at_s)
        return vector

    tasks = []
    for ids in texts:
        due += rng.expovariate(rate) if rate else 0.0
        if (pause := due - (time.monotonic() - began)) > 0:
            await asyncio.sleep(pause)
        tasks.append(asyncio.ensure_future(one(ids, due)))
    side.vectors = np.stack(await asyncio.gather(*tasks))
    side.texts_per_s.append(len(texts) / (time.monotonic() - began))
    side.cpu_s.append(side.cpu_used_s() - used_s)


async def compare(
    sides: dict[str, Side], texts: list[list[int]], repeats: int, rate: float | None, title: str
) -> dict[str, Side]:
    found = {name: Side(side.submit, side.pool) for name, side in sides.items()}
    for _ in range(repeats):
        for side in found.values():
            await drive(side, texts, rate)
    static = found[STATIC]
    num_tokens = sum(map(len, texts))
    rows = []
    for name, side in found.items():
        ratios = [ours / theirs for ours, theirs in zip(side.texts_per_s, static.texts_per_s, strict=True)]
        middle = statistics.median(side.texts_per_s)
        assert static.vectors is not None and side.vectors is not None
        p50, p95 = np.percentile(side.waits_s, [50, 95])
        cpu_ms = 1000 * statistics.median(side.cpu_s) / len(texts)
        apart = (static.vectors * side.vectors).sum(axis=1).min()
        rows.append([
            name, f"{middle:.0f}", f"{middle * num_tokens / len(texts):.0f}", f"{statistics.median(ratios):.2f}",
            f"{min(ratios):.2f}–{max(ratios):.2f}", f"{cpu_ms:.1f}", f"{p50 * 1000:.0f}", f"{p95 * 1000:.0f}", f"{apart:.5f}",
        ])  # fmt: skip
    console = Console()
    console.print(title, soft_wrap=True)
    columns = [
        "",
        "texts/s",
        "tokens/s",
        "× static",
        "range",
        "CPU ms/text",
        "wait p50, ms",
        "wait p95, ms",
        "furthest cosine",
    ]
    print_wide(markdown_table(columns, rows), console)
    return found


async def measure(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    static = Static(options.model, options.batch_size, options.wait_ms / 1000)
    vocab_size: Any = static._model.config.vocab_size
    texts = texts_of(options.texts, options.lengths, options.longest, vocab_size)
    pools = {f"pool, {name}": pool_of(options, name) for name in ("naive", "bucketed", "memory_aware")}  # type: ignore[arg-type]
    if options.threads > 1:
        name = f"pool, memory_aware, {options.threads} instances"
        pools[name] = pool_of(options, "memory_aware", instances=options.threads)
    serving = asyncio.ensure_future(static.serve())
    async with AsyncExitStack() as stack:
        stack.callback(serving.cancel)
        for pool in pools.values():
            await pool.start()
            stack.push_async_callback(pool.stop)
        for pool in pools.values():
            await pool.wait_ready()
        sides = {STATIC: Side(static.submit)} | {name: Side(submit_to(pool), pool) for name, pool in pools.items()}
        for side in sides.values():
            await drive(side, texts[: options.batch_size], None)  # not counted
        about = (
            f"{len(texts)} texts of 4 to {options.longest} tokens, {sum(map(len, texts)) / len(texts):.0f} on average"
        )
        burst = await compare(
            sides, texts, options.repeats, None, f"{about}, all at once, batches of {options.batch_size}"
        )
        if not options.load:
            return
        rate = options.load * statistics.median(burst[STATIC].texts_per_s)
        title = f"the same, {rate:.0f} arrive per second: {options.load:.0%} of what static batches reach"
        await compare(sides, texts, options.repeats, rate, title)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", help="folder or hub name of a BERT that is pooled by the mean; the default model without"
    )
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--lengths", choices=["mixed", "even"], default="mixed")
    parser.add_argument("--longest", type=int, default=256, help="tokens")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument(
        "--wait-ms", type=float, default=5.0, help="how long the first text of a batch waits for others"
    )
    parser.add_argument(
        "--load", type=float, default=0.8, help="arrivals over time, of what static batches reach; 0: none"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
