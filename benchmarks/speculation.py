"""Speculative decoding against plain decoding: the same engine, the same requests, in turns.

    python -m benchmarks.speculation                 # the default model here, six turns
    python -m benchmarks.speculation --only copy,other --turns 10
    python -m benchmarks.speculation --quick         # two turns, fewer requests
    python -m benchmarks.speculation --draft-pair 4,0  # a draft model instead, on a CPU (below)
    python -m benchmarks.speculation --device cuda   # the default model on a GPU
    python -m benchmarks.speculation --device cuda --shape l3b,qwen2.5-1.5b   # random weights (`speculation_gpu.py`)

Does: run each workload with guesses and without, one after the other, in one process; compare the seconds of the two runs of a
turn, and the tokens themselves, which must be equal. Every request of a workload is another text; each turn has its own, so that
no answer is guessed from the same question asked before. Does not: need a quiet machine (ratios of runs side by side), though it
is more exact on one. Exits with 1 if a target is missed or a token differs.

| workload | users | what |
|---|---|---|
| `copy` | 1 | a list of records that is to be written again with one change: most of the answer stands in the prompt |
| `agent` | 1 | turns of an agent: tool calls as JSON, whose keys and paths come again and again |
| `code` | 1 | code to be continued, as an editor asks for |
| `other` | 1 | questions, sampled: nothing to copy |
| `many` | 16 | questions, sampled, as many at a time as the machine computes for |
| `many copy` | 16 | as `copy` |
| `n` | 1 | eight answers of one token to a prompt of 2,000 tokens, against one such answer: the prompt is computed once |

`--draft-pair TIMES,LEFT_OUT`: a model guesses for one that is TIMES as deep and would say the same, if the small one did not lack
LEFT_OUT of its layers (`draft_pair.py`). The more it lacks, the more of its guesses are wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tonle.config.engine import EngineConfig
from tonle.engine import LLM, GenerationConfig
from tonle.engine.request import GenerationResult
from tonle.models.source import resolve

_NAMES = (
    "ada",
    "bela",
    "chan",
    "dara",
    "emil",
    "fay",
    "gita",
    "hugo",
    "ines",
    "jun",
    "kiri",
    "lena",
    "mao",
    "nils",
    "oma",
    "pich",
)
_CITIES = ("Phnom Penh", "Lisbon", "Oslo", "Quito", "Nairobi", "Hanoi", "Turin", "Lagos", "Lima", "Perth")
_THINGS = (
    "river",
    "bridge",
    "market",
    "library",
    "harbour",
    "garden",
    "clock",
    "mountain",
    "train",
    "letter",
    "lamp",
    "window",
)


def _records(rng: random.Random, count: int) -> str:
    lines = []
    for number in range(count):
        name, city = rng.choice(_NAMES), rng.choice(_CITIES)
        lines.append(
            f'{{"id": {rng.randrange(1000, 9999)}, "name": "{name}", "city": "{city}", "active": true, "rank": {number}}}'
        )
    return "\n".join(lines)


def _copy(rng: random.Random) -> str:
    records = _records(rng, 8)
    return f"Input:\n{records}\n\nThe same lines again, unchanged:\n{records.splitlines()[0]}\n"


def _agent(rng: random.Random) -> str:
    history = []
    for number in range(5):
        path = f"src/{rng.choice(_THINGS)}/{rng.choice(_NAMES)}.py"
        call = {"tool": "read_file", "arguments": {"path": path, "start_line": 1, "end_line": 40 + number}}
        history.append(f"assistant: {json.dumps(call)}\ntool: 40 lines of {path}")
    return "An agent reads files one after the other.\n" + "\n".join(history) + "\nassistant:"


def _code(rng: random.Random) -> str:
    first, second = rng.sample(_THINGS, 2)
    return (
        f"class {first.title()}:\n    def __init__(self, name, size):\n        self.name = name\n        self.size = size\n\n"
        f'    def __repr__(self):\n        return f"{first.title()}({{self.name}}, {{self.size}})"\n\n\nclass {second.title()}:\n'
    )


def _question(rng: random.Random) -> str:
    first, second = rng.sample(_THINGS, 2)
    return f"Write a short story about a {first} in {rng.choice(_CITIES)} and the old {second} beside it.\n\n"


@dataclass
class Workload:
    name: str
    prompt: Callable[[random.Random], str]
    target: float  # at least, of tokens per second with guesses to those without, on a CPU
    gpu_target: float = 0.98
    users: int = 1
    requests: int = 4  # of a turn
    new_tokens: int = 128
    sampled: bool = False
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"plain": [], "guesses": []})

    def config(self, seed: int) -> GenerationConfig:
        config = GenerationConfig(max_length=self.new_tokens, early_stopping=False, do_sample=self.sampled, seed=seed)
        config.temperature = 0.8 if self.sampled else 0.0
        return config

    @property
    def ratios(self) -> list[float]:
        """Of the two runs of each turn, which are next to each other in time."""
        return [plain / guessed for plain, guessed in zip(self.seconds["plain"], self.seconds["guesses"], strict=True)]


WORKLOADS = (
    Workload("copy", _copy, 1.6, 2.5),
    Workload("agent", _agent, 1.6, 2.5),
    Workload("code", _code, 1.0),
    Workload("other", _question, 0.98, sampled=True),
    Workload("many", _question, 0.98, users=16, requests=96, new_tokens=64, sampled=True),
    Workload("many copy", _copy, 0.98, users=16, requests=32, new_tokens=64),
)


def run(llm: LLM, work: Workload, seed: int) -> tuple[float, list[GenerationResult]]:
    """Seconds, and what came. One user asks one question after the other; many ask at once, and again when all have answers."""
    rng = random.Random(seed)
    prompts = [work.prompt(rng) for _ in range(work.requests)]
    config = work.config(seed)
    began = time.monotonic()
    results = []
    for first in range(0, len(prompts), work.users):
        results += llm.generate(prompts[first : first + work.users], config, progress=False)
    return time.monotonic() - began, results


NEVER_SLOWER = 0.98
SEVERAL, PROMPT_TOKENS, MOST_FOR_SEVERAL = 8, 2_000, 1.15  # answers, and times what one takes


def ratios_of_several(llm: LLM, turns: int) -> list[float]:
    """Seconds to the first tokens of several answers to one prompt, to those of one answer, in turns. Each prompt is another."""
    rng, vocabulary, ratios = random.Random(7), 30_000, []
    for turn in range(turns):
        seconds = {}
        for n in (1, SEVERAL) if turn % 2 else (SEVERAL, 1):
            prompt = [rng.randrange(100, vocabulary) for _ in range(PROMPT_TOKENS)]
            config = GenerationConfig(max_length=1, n=n, temperature=0.8, early_stopping=False, seed=turn)
            began = time.monotonic()
            llm.generate(prompt, config, progress=False)
            seconds[n] = time.monotonic() - began
        ratios.append(seconds[SEVERAL] / seconds[1])
    return ratios


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model", default=None, help="a folder, a .gguf file or a hub name; the default model otherwise"
    )
    parser.add_argument("--turns", type=int, default=6, help="of each workload, each with guesses and without")
    parser.add_argument(
        "--only", default="", help=f"workloads, with commas: {', '.join(each.name for each in WORKLOADS)}, n"
    )
    parser.add_argument("--quick", action="store_true", help="two turns, a quarter of the requests")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--shape",
        default="",
        help="with --device cuda: random weights and scripted guesses; l3b, qwen2.5-1.5b, smallest; with commas",
    )
    parser.add_argument("--users", default="", help="with --shape: workloads of so many users only, with commas")
    parser.add_argument(
        "--draft-pair", default="", metavar="TIMES,LEFT_OUT", help="guesses by a draft model; how the two models differ"
    )
    options = parser.parse_args()
    if options.shape and options.device != "cuda":
        parser.error("--shape needs --device cuda")
    if options.shape:
        from benchmarks import speculation_gpu

        users = [int(each) for each in options.users.split(",") if each] or None
        return speculation_gpu.main(
            options.shape.split(","), turns=2 if options.quick else options.turns, only_users=users
        )
    if options.draft_pair:
        from benchmarks.draft_pair import write_draft_pair

        times, left_out = map(int, options.draft_pair.split(","))
        with tempfile.TemporaryDirectory() as folder:
            pair = write_draft_pair(resolve(options.model).path, Path(folder), times=times, left_out=left_out)
            return compare(options, str(pair.large), {"speculation_model": str(pair.small)})
    return compare(options, options.model, {"speculation": "suffix"})


def compare(options: argparse.Namespace, model: str | None, guessing: dict[str, Any]) -> int:
    """`guessing`: settings of the engine that makes guesses."""
    chosen = [work for work in WORKLOADS if not options.only or work.name in options.only.split(",")]
    turns = 2 if options.quick else options.turns
    on_gpu = options.device == "cuda"
    console, engines = Console(), {}
    for name, settings in {"plain": {"speculation": "off"}, "guesses": guessing}.items():
        config = EngineConfig(
            memory_pool_size=4 * 2**30 if on_gpu else None,  # of each of the two
            max_batch_size=None,
            max_sequence_length=2048,
            device=options.device,
            **settings,
        )
        engines[name] = LLM(model, config=config)
        # Warm up; the first steps learn what guesses cost.
        run(engines[name], Workload("warm", _copy, 0.0, requests=1, new_tokens=96), seed=-1)
    same = True
    table = Table("workload", "users", "plain tok/s", "with guesses", "ratio of turns: median", "lowest, highest", "accepted",
                  "target", title="speculative decoding", title_justify="left")  # fmt: skip
    for work in chosen:
        if options.draft_pair:
            work.target = NEVER_SLOWER
        elif on_gpu:
            work.target = work.gpu_target
        work.requests = max(1, work.requests // 4) if options.quick else work.requests
        before = engines["guesses"].engine.get_stats()["speculation"]
        for turn in range(turns):
            found = {}
            for name in ("plain", "guesses") if turn % 2 else ("guesses", "plain"):
                seconds, results = run(engines[name], work, seed=1000 + turn)
                work.seconds[name].append(seconds)
                found[name] = [result.output_ids for result in results]
            if found["plain"] != found["guesses"]:
                same = False
                console.print(f"{work.name}, turn {turn}: tokens differ")
        after = engines["guesses"].engine.get_stats()["speculation"]
        drafted, accepted = (after[name] - before[name] for name in ("draft_tokens", "accepted_tokens"))
        tokens = work.requests * work.new_tokens
        median = statistics.median(work.ratios)
        table.add_row(
            work.name, str(min(work.users, work.requests)),
            *(f"{tokens / statistics.median(work.seconds[name]):.0f}" for name in engines),
            f"{median:.2f}", f"{min(work.ratios):.2f}, {max(work.ratios):.2f}", f"{accepted:,} of {drafted:,}",
            f"≥ {work.target:g} {'holds' if median >= work.target else 'missed'}",
        )  # fmt: skip
    several = ratios_of_several(engines["guesses"], turns) if not options.only or "n" in options.only.split(",") else []
    for llm in engines.values():
        llm.close()
    console.print(table)
    missed = bool(several) and statistics.median(several) > MOST_FOR_SEVERAL
    if several:
        console.print(
            f"n = {SEVERAL} over {PROMPT_TOKENS:,} tokens, to n = 1: {statistics.median(several):.2f} "
            f"({min(several):.2f}, {max(several):.2f}); ≤ {MOST_FOR_SEVERAL} {'missed' if missed else 'holds'}"
        )
    console.print(f"tokens with guesses and without: {'equal' if same else 'DIFFERENT'}")
    return int(not same or missed or any(statistics.median(work.ratios) < work.target for work in chosen))


if __name__ == "__main__":
    sys.exit(main())
