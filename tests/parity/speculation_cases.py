"""Random requests, answered with guesses and without: the tokens must be equal, each of them.

    python -m tests.parity.speculation_cases --cases 10000

Runs the compiled CPU kernels on a small random model: with AVX-512 the bits of logits do not depend on how many rows a product
has; where they do, log-probabilities are compared up to rounding, and a token may differ where two are as likely. A
round is one engine with a random block size, a pool that may be tight (so that sequences are preempted), and a batch of requests
that share prefixes or not: greedy or sampled, with penalties, biases, stop tokens, stop strings, `min_tokens`, log-probabilities,
grammars, budgets of thoughts, adapters. They go through a front, which makes text of tokens and ends them at stop strings.
Guesses come from an oracle that is right for a while, or from the speculator itself. In every third round steps are launched
before the one ahead of them is read, as on a GPU.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from tests.fakes.adapters import write_adapter
from tests.fakes.cpu_models import RandomModel, plain_layer, spec_of, step_of
from tests.fakes.driver import Driver
from tests.fakes.grammars import VOCAB_SIZE, text
from tests.fakes.guesses import AheadOracle
from tonle.config.engine import EngineConfig
from tonle.engine import build as building
from tonle.engine.front import Front
from tonle.engine.generation import Generation
from tonle.engine.grammar.compiler import GrammarCompiler
from tonle.engine.messages import Step
from tonle.engine.request import GenerationConfig, StructuredOutput, Thinking, TokenLogprob
from tonle.engine.schedule import Drafts
from tonle.models.cpu.cpu_decoder import CpuDecoder
from tonle.models.cpu.team import Team

SPEC = replace(spec_of(plain_layer(), plain_layer(), eos_ids=(2,)), vocab_size=VOCAB_SIZE)
BATCH = 10  # requests of a round
ADAPTERS = ("left", "right")


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "ok": {"enum": ["yes", "no"]}, "list": {"type": "array"}},
    "required": ["n", "ok", "list"],
    "additionalProperties": False,
}
GRAMMARS = (
    StructuredOutput(json=SCHEMA),
    StructuredOutput(regex=r"(abc[0-9]{1,3}, )+"),
    StructuredOutput(choice=["yes, of course", "yes, if so", "no"]),
    StructuredOutput(json_object=True),
)
STOPS = ("e", "a", "n", "th", "1", "5", "ab", '", "', ", ", "is", "\n", "tr", "0")


@dataclass
class Answer:
    """What a caller got."""

    tokens: list[int]
    text: str
    logprobs: list[TokenLogprob]
    end: Any  # finish reason, stop reason


@dataclass
class Round:
    """What came of one batch, by place."""

    answers: list[Answer]
    tokens: dict[int, list[int]]  # by handle: as the engine said them, some of them after a stop string
    num_drafted: int = 0
    num_accepted: int = 0
    num_preemptions: int = 0
    num_bound_accepted: int = 0


@dataclass
class Cases:
    seed: int
    folder: Path
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        model = RandomModel(SPEC, seed=1)
        self._decoder = model.fast(team=Team(1))
        self._has_same_bits = _has_same_bits(model, self._decoder)
        self._paths = {name: str(self.folder / name) for name in ADAPTERS}
        for number, path in enumerate(self._paths.values()):
            write_adapter(Path(path), SPEC, seed=number)
        self._compiler = GrammarCompiler(text, VOCAB_SIZE, SPEC.eos_ids)

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
        oracle = None if own else AheadOracle(number, SPEC.vocab_size, plain.tokens)
        guessed = self._run(config, asked, every, oracle, own=own, lag=(lag := int(number % 3 == 2)))
        for place, (prompt, request, adapter) in enumerate(asked):
            shown = f"round {number}, request {place}: {prompt}, {request}, {adapter}"
            self._compare(guessed.answers[place], plain.answers[place], shown)
        self.counts.update(
            cases=BATCH, drafted=guessed.num_drafted, accepted=guessed.num_accepted, preemptions=guessed.num_preemptions,
            tokens=sum(len(answer.tokens) for answer in plain.answers),
            adapted=sum(adapter is not None for _, _, adapter in asked),
            stop_strings=sum(isinstance(answer.end[1], str) for answer in plain.answers),
            bound=sum(request.structured is not None or request.thinking is not None for _, request, _ in asked),
            bound_accepted=guessed.num_bound_accepted, accepted_ahead=lag * guessed.num_accepted,
        )  # fmt: skip

    def _compare(self, guessed: Answer, plain: Answer, shown: str) -> None:
        assert (guessed.tokens, guessed.text, guessed.end) == (plain.tokens, plain.text, plain.end), shown
        if self._has_same_bits:
            assert guessed.logprobs == plain.logprobs, shown
        numbers = [[value for record in answer.logprobs for value in (record.logprob, *(p for _, p in record.top))]
                   for answer in (guessed, plain)]  # fmt: skip
        assert np.allclose(*numbers, rtol=0, atol=1e-4), shown

    def _run(
        self, config: EngineConfig, asked: list[Any], every: int, oracle: AheadOracle | None, *, own: bool = False,
        lag: int = 0,
    ) -> Round:  # fmt: skip
        speculation = "suffix" if own else "off"
        with patch.object(building, "_decoder", lambda model, config: self._decoder):
            changed = EngineConfig(**{**_fields(config), "speculation": speculation})
            driver = Driver(None, changed, lag=lag, compiler=self._compiler)
        scheduler = driver.loop._scheduler
        if oracle is not None:
            scheduler.drafts = Drafts(oracle, ahead=oracle if lag else None)
        front = Front(text(), "test", driver.mailbox.put)
        front.deliver(driver.card)
        front.deliver(driver.loop.adapters)
        generations: list[Generation] = []
        seen = 0
        for step in range(100_000):
            while len(generations) < BATCH and (not every or step % every == 0):
                prompt, request, adapter = asked[len(generations)]
                generations.append(front.submit(prompt, request, adapter=adapter))
                if every:
                    break
            driver.loop.step()
            scheduler.verify()
            for message in driver.steps[seen:]:
                front.deliver(message)
            seen = len(driver.steps)
            if len(generations) == BATCH and not front.num_live:
                break
        else:
            raise AssertionError("it never ended")
        if driver.loop._adapters is not None:
            driver.loop._adapters.close()
        stats = driver.steps[-1].stats
        assert oracle is None or oracle.num_right == stats.accepted_tokens, "what it is told of its guesses"
        told = [sum(getattr(each, name) for each in generations) for name in ("draft_tokens", "accepted_tokens")]
        if not lag:  # else steps are under way when a request is cancelled
            assert told == [stats.draft_tokens, stats.accepted_tokens], "whatever ended the answers"
        bound = [1 + i for i, (_, request, _) in enumerate(asked) if request.structured is not None or request.thinking]
        spent = {handle: each for step in driver.steps for handle, each in step.spent.items()}
        return Round(
            [_answer(generation) for generation in generations], _said(driver.steps),
            stats.draft_tokens, stats.accepted_tokens, stats.num_preemptions,
            sum(spent[handle].accepted_tokens for handle in bound if handle in spent),
        )  # fmt: skip


def _has_same_bits(model: RandomModel, decoder: CpuDecoder) -> bool:
    """Logits are the same whether tokens are computed one by one or together."""
    kv = model.cache()
    alone = [decoder.forward(step_of([(at, at + 1)]), kv).clone() for at in range(4)]
    return torch.equal(torch.cat(alone), decoder.forward(step_of([(0, 4)]), model.cache()))


def _answer(generation: Generation) -> Answer:
    deltas = list(generation._deltas)
    if (
        generation._error is not None
    ):  # a token that must come, and may not by `min_tokens`: how far it came does not matter
        return Answer([], "", [], ("error", type(generation._error)))
    return Answer(
        [token for delta in deltas for token in delta.tokens],
        "".join(delta.text for delta in deltas),
        [record for delta in deltas for record in delta.logprobs or ()],
        (deltas[-1].finish_reason, deltas[-1].stop_reason),
    )


def _said(steps: list[Step]) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    for step in steps:
        offset = 0
        for handle, count in zip(step.handles, step.counts, strict=True):
            tokens.setdefault(handle, []).extend(step.tokens[offset : offset + count])
            offset += count
    return tokens


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
    if rng.random() < 0.4:
        config.stop = rng.sample(STOPS, rng.randint(1, 3))
        config.include_stop_text = rng.random() < 0.3
    if rng.random() < 0.3:
        config.structured = rng.choice(GRAMMARS)
    if rng.random() < 0.1:
        config.thinking = Thinking(
            start=[3], end=[5, 6], is_open=rng.random() < 0.7, budget=rng.randint(0, 12), closing=[4, 5, 6]
        )
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
