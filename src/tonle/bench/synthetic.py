"""Synthetic prompts of a wanted number of tokens, drawn from a seed.

Does: draw prompts, answer lengths, shared prefixes and the turns of conversations, also for a simulation, which has no server
(`planned_requests`). Does not: find out how a server counts (`target.py`) or send.

The same seed gives the same prompts, whatever the load; levels, warm-up and requests never share a prompt.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from tonle.bench.options import BenchOptions, Endpoint
from tonle.bench.workload import MAX_COUNTED_JOBS, Job, Phase, Question, build_job, conversation_job

ASSUMED_IDS = range(1000, 9000)  # inside every usual vocabulary and past its special tokens


@dataclass(frozen=True, slots=True)
class PromptScale:
    """How this server counts: a prompt of n units (words or token ids) has `overhead + n * tokens_per_unit` tokens."""

    kind: Literal["ids", "words"]
    units: tuple[str, ...] | tuple[int, ...]
    overhead: float = 0.0  # chat template, beginning-of-text
    tokens_per_unit: float = 1.0

    def num_units(self, tokens: int) -> int:
        """Units that make up `tokens` tokens when the overhead is counted elsewhere."""
        return max(1, round(tokens / self.tokens_per_unit))


@dataclass(frozen=True, slots=True)
class Turn:
    """One request as it was drawn. A later turn comes after the answers of those before, which are not in `units`."""

    units: list[Any]  # token ids or words, with the shared prefix
    output_tokens: int
    pause_s: float = 0.0  # after the answer before it


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request for a simulation. `prompt` is what is new in it: a later turn's history is the turns before and their answers."""

    index: int
    conversation: int
    turn: int
    prompt: list[int]
    output_tokens: int
    pause_s: float


class Draws:
    """Owns the draws of one benchmark: a list of turns for each conversation; most have one."""

    def __init__(self, options: BenchOptions, scale: PromptScale) -> None:
        self._options = options
        self._scale = scale
        # The overhead opens every prompt alike: it belongs to the shared prefix, if there is one.
        prefix = options.shared_prefix_tokens
        self._own_overhead = 0.0 if prefix else scale.overhead
        self._prefixes: list[list[Any]] = [[]]
        if prefix:
            count = scale.num_units(max(1, round(prefix - scale.overhead)))
            self._prefixes = [self._prefix(number, count) for number in range(options.prefixes)]
        # Zipf: the n-th most frequent prefix has a weight of 1 / n^skew.
        self._weights = [(number + 1) ** -options.prefix_skew for number in range(len(self._prefixes))]

    def conversations(self, level: int, phase: Phase) -> Iterator[list[Turn]]:
        """A warm-up has first turns only: pauses between turns would make it long."""
        for number in itertools.count():
            turns = self._conversation(f"{self._options.seed}/{level}/{phase}/{number}")
            yield turns[:1] if phase == "warmup" else turns

    def num_turns(self, level: int, phase: Phase, number: int) -> int:
        """Of a conversation, without making it."""
        if self._options.turns is None:
            return 1
        return self._options.turns.draw(random.Random(f"{self._options.seed}/{level}/{phase}/{number}/turns"))

    def _prefix(self, number: int, count: int) -> list[Any]:
        name = "prefix" if number == 0 else f"prefix/{number}"
        return random.Random(f"{self._options.seed}/{name}").choices(self._scale.units, k=count)

    def _conversation(self, seed: str) -> list[Turn]:
        options = self._options
        prefix = self._prefixes[0]
        if len(self._prefixes) > 1:
            [prefix] = random.Random(f"{seed}/prefix").choices(self._prefixes, self._weights)
        turns = [self._turn(random.Random(seed), prefix, self._own_overhead)]
        if options.turns is not None:
            rng = random.Random(f"{seed}/turns")
            num_more = options.turns.draw(rng) - 1
            turns += [self._turn(rng, [], 0.0, options.think_time.draw(rng)) for _ in range(num_more)]
        return turns

    def _turn(self, rng: random.Random, prefix: list[Any], overhead: float, pause_s: float = 0.0) -> Turn:
        input_tokens = self._options.input_tokens.draw(rng)
        output_tokens = self._options.output_tokens.draw(rng)
        count = self._scale.num_units(max(1, round(input_tokens - overhead)))
        return Turn(prefix + rng.choices(self._scale.units, k=count), output_tokens, pause_s)


class SyntheticWorkload:
    """Random prompts: the shared prefix first, then tokens of their own."""

    def __init__(self, options: BenchOptions, model: str, scale: PromptScale) -> None:
        self.kind: str = scale.kind
        self._options = options
        self._model = model
        self._draws = Draws(options, scale)
        self._endpoint: Endpoint = options.endpoint or ("completions" if options.turns is None else "chat")

    def jobs(self, level: int, phase: Phase) -> Iterator[Job]:
        index = 0
        for number, turns in enumerate(self._draws.conversations(level, phase)):
            if self._options.turns is None:
                [turn] = turns
                yield build_job(
                    self._options, self._model, self._endpoint, index, _prompt(turn.units), turn.output_tokens
                )
            else:
                questions = [Question(" ".join(turn.units), turn.output_tokens, turn.pause_s) for turn in turns]
                yield conversation_job(self._options, self._model, index, [], questions, conversation=number)
            index += len(turns)

    def num_requests(self, level: int, num_jobs: int | None) -> int | None:
        if self._options.turns is None or num_jobs is None:
            return num_jobs
        if num_jobs > MAX_COUNTED_JOBS:
            return None
        return sum(self._draws.num_turns(level, "run", number) for number in range(num_jobs))

    def pass_over(self, num_jobs: int) -> None:
        """Each level has prompts of its own."""

    def notes(self) -> list[str]:
        return []


def _prompt(units: list[Any]) -> str | list[int]:
    """Token ids stay a list; words become text."""
    return " ".join(units) if isinstance(units[0], str) else units


def planned_requests(options: BenchOptions, level: int = 0) -> Iterator[PlannedRequest]:
    """The requests of a level without a server, without end: lengths, prefixes and turns of a run with the same options.

    The token ids are stand-ins, as a server's are not known; they are the same for each call with the same seed.
    """
    index = 0
    draws = Draws(options, PromptScale("ids", tuple(ASSUMED_IDS)))
    for number, turns in enumerate(draws.conversations(level, "run")):
        for place, turn in enumerate(turns):
            yield PlannedRequest(index, number, place, turn.units, turn.output_tokens, turn.pause_s)
            index += 1
