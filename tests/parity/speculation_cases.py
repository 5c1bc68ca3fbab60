"""Random requests, answered with guesses and without: the tokens must be equal, each of them.

    python -m tests.parity.speculation_cases --cases 10000

Runs the compiled CPU kernels on a small random model: there the bits of logits do not depend on how many rows a product has. A
round is one engine with a random block size, a pool that may be tight (so that sequences are preempted), and a batch of requests
that share prefixes or not: greedy or sampled, with penalties, biases, stop tokens, `min_tokens`, log-probabilities, adapters.
Guesses come from an oracle that is right for a while, or from the speculator itself.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from tests.fakes.adapters import write_adapter
from tests.fakes.cpu_models import RandomModel, plain_layer, spec_of
from tests.fakes.driver import Driver
from tests.fakes.guesses import Oracle
from tonle.config.engine import EngineConfig
from tonle.engine import build as building
from tonle.engine.request import GenerationConfig, Request, TokenLogprob
from tonle.engine.schedule import Drafts
from tonle.models.cpu.team import Team

SPEC = spec_of(plain_layer(), plain_layer(), eos_ids=(2,))
BATCH = 10  # requests of a round
ADAPTERS = ("left", "right")


@dataclass
class Round:
    """What came of one batch, by place."""

    tokens: list[list[int]]
    logprobs: list[list[TokenLogprob]]
    ends: list[Any]
    num_drafted: int = 0
    num_accepted: int = 0
    num_preemptions: int = 0


@dataclass
class Cases:
    seed: int
    folder: Path
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._decoder = RandomModel(SPEC, seed=1).fast(team=Team(1))
        self._paths = {name: str(self.folder / name) for name in ADAPTERS}
        for number, path in enumerate(self._paths.values()):
            write_adapter(Path(path), SPEC, seed=number)
        self._adapted = False

    def check(self, number: int) -> None:
        """Round `number`: raises AssertionError where tokens differ."""
        rng = random.Random(f"{self.seed}/{number}")
        adapted, block_size = rng.random() < 0.3, rng.choice([4, 8, 16])
        asked = [_random_request(rng, adapted) for _ in range(BATCH)]
        longest = -(-96 // block_size)
        num_blocks = longest + rng.choice([1, 4, 8, 40])  # few: sequences are preempted
        config = EngineConfig(
            block_size=block_size, memory_pool_size=num_blocks * block_size * 2 * 2 * 2 * 16 * 4, max_sequence_length=96,
            max_batch_size=rng.randint(1, BATCH), max_num_batched_tokens=rng.choice([16, 40, 200]),
            enable_prefix_caching=rng.random() < 0.8, lora=self._paths if adapted else {},
        )  # fmt: skip
        every = rng.choice([0, 0, 1])
        plain = self._run(config, asked, every, None)
        own = rng.random() < 0.4
        answers = {1 + place: tokens for place, tokens in enumerate(plain.tokens)}
        guessed = self._run(config, asked, every, None if own else Oracle(number, SPEC.vocab_size, answers), own=own)
        for place, (prompt, request, adapter) in enumerate(asked):
            shown = f"round {number}, request {place}: {prompt}, {request}, {adapter}"
            assert guessed.tokens[place] == plain.tokens[place], shown
            assert guessed.logprobs[place] == plain.logprobs[place], shown
            assert guessed.ends[place] == plain.ends[place], shown
        self.counts.update(
            cases=BATCH, drafted=guessed.num_drafted, accepted=guessed.num_accepted, preemptions=guessed.num_preemptions,
            tokens=sum(map(len, plain.tokens)), adapted=sum(adapter is not None for _, _, adapter in asked),
        )  # fmt: skip

    def _run(
        self, config: EngineConfig, asked: list[Any], every: int, oracle: Oracle | None, *, own: bool = False
    ) -> Round:
        speculation = "suffix" if own else "off"
        with patch.object(building, "_decoder", lambda model, config: self._decoder):
            driver = Driver(None, EngineConfig(**{**_fields(config), "speculation": speculation}))
        scheduler = driver.loop._scheduler
        if oracle is not None:
            scheduler.drafts = Drafts(oracle)
        requests: list[Request] = [driver.ask(prompt, request, adapter) for prompt, request, adapter in asked]
        tokens = driver.run(requests, every)
        handles = [request.handle for request in requests]
        logprobs: dict[int, list[TokenLogprob]] = {handle: [] for handle in handles}
        ends: dict[int, Any] = {}
        for step in driver.steps:
            for handle, records in step.logprobs.items():
                logprobs[handle] += records
            ends |= step.finished
        if driver.loop._adapters is not None:
            driver.loop._adapters.close()
        stats = driver.steps[-1].stats
        return Round(
            tokens, [logprobs[handle] for handle in handles], [ends[handle] for handle in handles],
            stats.draft_tokens, stats.accepted_tokens, stats.num_preemptions,
        )  # fmt: skip


def _fields(config: EngineConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in EngineConfig.names()}


def _random_request(rng: random.Random, adapted: bool) -> tuple[list[int], GenerationConfig, str | None]:
    shared = [7, 8, 9, 10, 11, 12] * 12
    prompt = shared[: rng.choice([0, 0, 8, 17, 40])] + [rng.randrange(3, 200) for _ in range(rng.randint(1, 12))]
    length = rng.randint(1, 40)
    config = GenerationConfig(max_length=length, do_sample=False, early_stopping=rng.random() < 0.5)
    if rng.random() < 0.3:
        config.do_sample, config.temperature, config.seed = True, rng.choice([0.3, 1.0]), rng.randrange(1000)
        config.top_p, config.top_k = rng.choice([1.0, 0.9]), rng.choice([0, 5])
    if rng.random() < 0.3:
        config.repetition_penalty, config.frequency_penalty = rng.choice([1.0, 1.3]), rng.choice([0.0, 0.5])
        config.presence_penalty = rng.choice([0.0, 1.0])
    if rng.random() < 0.2:
        config.logit_bias = {rng.randrange(200): rng.choice([-100.0, 3.0]) for _ in range(5)}
    if rng.random() < 0.3:
        config.stop_token_ids = [rng.randrange(200) for _ in range(20)]
        config.min_tokens = rng.randint(0, length)
    if rng.random() < 0.3:
        config.logprobs = rng.randint(0, 3)
    config.use_cache = rng.random() < 0.9
    return prompt, config, rng.choice([None, *ADAPTERS]) if adapted else None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began = time.monotonic()
    with TemporaryDirectory() as folder:
        cases = Cases(options.seed, Path(folder))
        for number in range(-(-options.cases // BATCH)):
            cases.check(number)
            if number % 50 == 49:
                print(f"{time.monotonic() - began:.0f} s: {dict(cases.counts)}", flush=True)
    print(f"equal in all cases: {dict(cases.counts)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
