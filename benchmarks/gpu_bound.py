"""What rows bound by a grammar cost the others on a GPU, and when forced tokens are worth a chunk. The loop alone.

    python -m benchmarks.gpu_bound --model qwen2.5-1.5b --rows 1,8,32,100

Does: decode R rows together, none, some or all of them bound by masks that cost the host next to nothing; then with runs of
forced tokens, drawn one by one or computed as chunks (`SchedulerLimits.min_forced`). Weights are random. Prints milliseconds per
step, and tokens per second of rows that are not bound and of those that are. Does not: compile grammars or fill their masks
(`benchmarks/structured.py` does).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.workload import SHAPES, write_config
from tonle.config.engine import EngineConfig
from tonle.engine.build import build
from tonle.engine.constraint import Compiled, Constraint
from tonle.engine.loop import Loop
from tonle.engine.mailbox import ThreadMailbox
from tonle.engine.messages import Step, Submit, ToFront
from tonle.engine.request import Request, ResolvedConfig
from tonle.models.source import ModelSource

PROMPT, NEW = 64, 256


class Turns:
    """`free` tokens of half the vocabulary, then `forced` that are no choice, in turn."""

    is_complete = False
    error = None

    def __init__(self, words: int, free: int, forced: int) -> None:
        self._half = np.full(words, 0x0F0F0F0F, np.int32)
        self._one = np.zeros(words, np.int32)
        self._one[5] = 1
        self._free, self._turn, self._count = free, free + forced, 0

    def push(self, token: int) -> None:
        self._count += 1

    def forced(self, most: int, least: int = 1) -> list[int]:
        place = self._count % self._turn
        run = min(most, self._turn - place) if place >= self._free else 0
        if run < least:
            return []
        self._count += run
        return [5 * 32] * run

    def fill(self, mask: np.ndarray) -> bool:
        mask[:] = self._half if self._count % self._turn < self._free else self._one
        return True


class Compiler:
    def __init__(self, vocab_size: int, free: int, forced: int) -> None:
        self.mask_words = -(-vocab_size // 32)
        self._turns = (free, forced)
        self._asked: list[Request] = []

    def ask(self, request: Request) -> None:
        self._asked.append(request)

    def forget(self, handle: int) -> None: ...

    def take(self) -> list[Compiled]:
        asked, self._asked = self._asked, []
        return [Compiled(request, Turns(self.mask_words, *self._turns)) for request in asked]

    @property
    def is_busy(self) -> bool:
        return bool(self._asked)

    def is_late(self, constraint: Constraint) -> bool:
        return False

    def drop_mask(self, constraint: Constraint) -> None: ...

    def fill(self, constraints: list[Constraint], masks: np.ndarray, wait_s: float | None = None) -> list[bool | None]:
        return [constraint.fill(mask) for constraint, mask in zip(constraints, masks, strict=True)]

    def close(self) -> None: ...


@dataclass
class Outcome:
    seconds: float  # until the last row that is not bound has ended; of all, if every row is
    steps: int
    plain_tok_s: float
    bound_tok_s: float  # while they last


class Bench:
    def __init__(self, model: str, most: int, device: str) -> None:
        self._ended: dict[int, float] = {}
        self._next = 0
        self._num_steps = 0
        with tempfile.TemporaryDirectory() as root:
            source = ModelSource("folder", write_config(model, Path(root)), model)
            config = EngineConfig(max_batch_size=most, max_num_batched_tokens=2048, max_sequence_length=1024, device=device,
                                  load_format="random", memory_pool_size=16 * 2**30 if device == "cuda" else None)  # fmt: skip
            self._mailbox = ThreadMailbox(self._receive)
            loop, card = build(source, config, self._mailbox)
        self.loop: Loop = loop
        self._vocab_size = card.vocab_size

    def _receive(self, message: ToFront) -> None:
        if isinstance(message, Step):
            now = time.perf_counter()
            self._ended |= dict.fromkeys(message.finished, now)
            self._num_steps = message.stats.num_steps

    def run(self, rows: int, bound: int, forced: int, least: int) -> Outcome:
        scheduler = self.loop._scheduler
        scheduler.limits = replace(scheduler.limits, min_forced=least)
        self.loop._compiler = Compiler(self._vocab_size, 4, forced)
        self._ended.clear()
        config = ResolvedConfig(max_length=NEW, do_sample=False, early_stopping=False)
        requests = []
        for i in range(rows):
            self._next += 1
            prompt = [(self._next * 31 + place) % 9000 + 1 for place in range(PROMPT)]
            requests.append(Request(handle=self._next, prompt=prompt, config=config, grammar="x" if i < bound else ""))
        handles = [request.handle for request in requests]
        self._mailbox.put(Submit(requests))
        while len(scheduler.running) < rows or any(s.num_output < 1 for s in scheduler.running.values()):
            self.loop.step()
        began, before = time.perf_counter(), self._num_steps
        while len(self._ended) < rows:
            self.loop.step()
        times = [self._ended[handle] - began for handle in handles]
        plain, own = times[bound:], times[:bound]
        last = max(plain or own)
        return Outcome(last, self._num_steps - before, len(plain) * NEW / last, len(own) * NEW / max(own, default=1.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=SHAPES, default="qwen2.5-1.5b")
    parser.add_argument("--rows", default="1,8,32,100")
    parser.add_argument("--forced", default="3,6,12")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    counts = [int(n) for n in options.rows.split(",")]
    bench = Bench(options.model, max(counts), options.device)
    bench.run(counts[0], 1, 6, 2)  # warm
    print(
        f"{'rows':>5}{'bound':>6}{'forced':>7}{'jump':>6}{'ms/step':>9}{'plain tok/s':>13}{'bound tok/s each':>18}",
        flush=True,
    )
    for rows in counts:
        for bound in sorted({0, min(rows, max(1, rows // 10)), rows}):
            for forced in [0] if not bound else [0, *(int(n) for n in options.forced.split(","))]:
                for least in (99, 2) if forced else (99,):
                    found = min((bench.run(rows, bound, forced, least) for _ in range(2)), key=lambda o: o.seconds)
                    jump = "" if not forced else "no" if least == 99 else "yes"
                    print(f"{rows:>5}{bound:>6}{forced:>7}{jump:>6}{found.seconds / found.steps * 1e3:>9.2f}"
                          f"{found.plain_tok_s:>13.0f}{found.bound_tok_s / max(1, bound):>18.1f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
