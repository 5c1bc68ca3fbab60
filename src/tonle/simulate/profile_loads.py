"""The loads of a profile: requests that spread what steps compute, within a server's limits and the time there is.

Does: decide what to send in which order; drive it with the benchmark's clients. Does not: start servers, or look at their steps.

    alone     one user, prompts of many lengths: prompts by themselves, and answers of one row
    N users   1, 2, 4 … up to the limit of rows, prompts and answers of mixed lengths: prompts beside rows that decode
    falling   as many requests as there are rows, sent at once, that end one by one: every number of rows, short and long contexts

Each minute of a longer profile sends all of them once more. On a machine that is shared with others, spells in which it is slow
then fall on some steps of every kind, where the fit through the median passes over them, and not on all steps of one kind.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter

import msgspec

from tonle.bench.client import Client, LevelTask, Sender
from tonle.bench.client_processes import ClientProcesses
from tonle.bench.load import Load
from tonle.bench.measure import Sample
from tonle.bench.options import BenchOptions
from tonle.bench.target import find_model
from tonle.bench.workload import PATHS, Job, Phase
from tonle.config.cores import num_cores
from tonle.edge.client import Address, HttpClient
from tonle.engine.step_log import LoggedEngine
from tonle.errors import ConfigError

Told = Callable[[str, float], None]  # what is being sent; share of all that is done, 0 to 1

_LONGEST_LOAD_S = 3600.0
_MOST_CLIENTS = 6
_MANY = 4096  # different requests of a load; then they come again with other tokens
_LONGEST_PROMPT = 2048
_LONGEST_ANSWER = 512
_ALONE_SHARE, _USERS_SHARE, _FALLING_SHARE = 0.12, 0.5, 0.38
_PASS_S = 60.0  # of a profile in which all loads are sent once
# Of "falling" loads: prompts, as a share of the longest that fits, and the share of their time. Long ones have most: contexts
# as long as in service, in steps of all rows.
_FALLS = ((0.05, 0.2), (0.25, 0.3), (1.0, 0.5))


@dataclass(frozen=True, slots=True)
class ProfileLoad:
    """One part of the profile, as it was sent."""

    label: str
    users: int
    samples: list[Sample]
    stage: int = 0  # its place among the loads, which a longer profile sends several times
    is_burst: bool = False  # all at once
    client_share: float = 0.0  # of the time, that the busiest client itself computed; near 1 it was the limit


def usual_clients(engine: LoggedEngine) -> int:
    """Processes of the client. One is the limit beside a GPU, whose server then looks slower than it is; on a CPU it leaves the
    cores to the engine."""
    return 1 if engine.device == "cpu" else max(1, min(_MOST_CLIENTS, num_cores() // 2 - 1))


@dataclass(slots=True)
class _Requests:
    """A `Workload`: requests of these lengths, once, or over and over again. Every process of the client makes the same."""

    model: str
    ids: range  # tokens of prompts
    lengths: list[tuple[int, int]]  # prompt, answer
    seed: str
    is_endless: bool
    kind: str = "ids"

    def jobs(self, level: int, phase: Phase) -> Iterator[Job]:
        rng = random.Random(f"{self.seed}/{level}")
        lengths = itertools.cycle(self.lengths) if self.is_endless else self.lengths
        for index, (prompt_tokens, output_tokens) in enumerate(lengths):
            body = {
                "model": self.model,
                "prompt": rng.choices(self.ids, k=prompt_tokens),
                "max_tokens": output_tokens,
                "temperature": 0.0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                "return_token_ids": True,  # so that a token is seen when it comes, though its text may wait for the next one
            }
            yield Job(index, PATHS["completions"], msgspec.json.encode(body), output_tokens)

    def pass_over(self, num_jobs: int) -> None:
        """Every load has requests of its own."""

    def num_requests(self, level: int, num_jobs: int | None) -> int | None:
        return num_jobs

    def notes(self) -> list[str]:
        return []


class ProfileDriver:
    """Sends all loads to one server."""

    def __init__(
        self,
        url: str,
        engine: LoggedEngine,
        *,
        seconds: float,
        seed: int = 0,
        clients: int | None = None,
        tell: Told | None = None,
    ) -> None:
        """`clients`: processes that send; None: as many as suit the device."""
        self._engine = engine
        self._seconds = seconds
        self._seed = f"profile/{seed}"
        self._rng = random.Random(self._seed)
        self._tell = tell or (lambda label, share: None)
        self._url = url
        processes = clients or usual_clients(engine)
        options = BenchOptions(url=url, duration_s=_LONGEST_LOAD_S, processes=processes)
        self._sender: Sender = Client(options) if processes == 1 else ClientProcesses(options)
        self._model = ""
        # Token ids of prompts: from the middle of the vocabulary, where no special ones are.
        self._ids = range(engine.vocab_size // 4, engine.vocab_size // 2)
        self._number = itertools.count()
        self._stage = itertools.count()
        self._loads: list[ProfileLoad] = []
        self._began_s = 0.0
        self._token_s = 1e-3  # per token of a prompt alone, as seen so far

    async def run(self) -> list[ProfileLoad]:
        """Raises `ConfigError` if the server does not answer as it should."""
        client = HttpClient(Address.parse(self._url, scheme="http"), resend=True)
        try:
            self._model = await find_model(client, None, [])
            await self._warm_up()
            self._began_s = perf_counter()
            passes = max(1, round(self._seconds / _PASS_S))
            for _ in range(passes):
                await self._send_all(self._seconds / passes)
        finally:
            client.close()
            await self._sender.close()
        self._tell("done", 1.0)
        return self._loads

    async def _send_all(self, seconds: float) -> None:
        self._stage = itertools.count()
        await self._send_alone(_ALONE_SHARE * seconds)
        levels = self._levels()
        for users in levels:
            await self._send_users(users, _USERS_SHARE * seconds / len(levels))
        falling_s = _FALLING_SHARE * seconds
        for share, part in _FALLS:
            await self._send_falling(share * self._longest_falling(_FALLS[-1][1] * falling_s), part * falling_s)

    @property
    def _longest(self) -> int:
        """Tokens of a prompt that leaves room for an answer."""
        return max(8, min(_LONGEST_PROMPT, self._engine.context_length * 3 // 4))

    def _levels(self) -> list[int]:
        """Numbers of users: powers of two, from 32 on also what lies in the middle between them."""
        most = self._engine.max_num_seqs
        powers = [2**power for power in range(most.bit_length())]
        return sorted({users for users in (*powers, *(48 * power for power in powers)) if users < most} | {most})

    async def _warm_up(self) -> None:
        self._tell("warming up", 0.0)
        for users in (1, min(4, self._engine.max_num_seqs)):
            await self._drive([(64, 8)] * (2 * users), users)

    async def _send_alone(self, seconds: float) -> None:
        longest = itertools.islice(itertools.cycle(_spread(8, self._longest, 12)), _MANY)
        lengths = [(max(4, round(length * self._rng.uniform(0.8, 1.0))), 6) for length in longest]
        samples = await self._send("alone", 1, lengths, seconds)
        rates = [(sample.ttft_s or 0.0) / (sample.prompt_tokens or 1) for sample in samples if not sample.failure]
        self._token_s = sorted(rates)[len(rates) // 2]

    async def _send_users(self, users: int, seconds: float) -> None:
        row_s = self._row_s()
        longest = max(16, min(_LONGEST_ANSWER, round(0.5 * seconds / row_s)))
        # Prompts of all users together must not take all of the time.
        prompt = max(16, min(self._longest // 2, round(0.5 * seconds / self._token_s / users)))
        lengths = [(_between(self._rng, 8, prompt), _between(self._rng, 4, longest)) for _ in range(_MANY)]
        await self._send(f"{users} users", users, lengths, seconds)

    async def _send_falling(self, prompt: float, seconds: float) -> None:
        """With prompts of about so many tokens."""
        count, middle = self._engine.max_num_seqs, max(8, round(prompt))
        answer = max(16, min(_LONGEST_ANSWER, round(0.9 * seconds / self._row_s())))
        # Prompts of many lengths, as in service: what attention takes for rows of equal lengths is less.
        spread = (round(middle * self._rng.uniform(0.1, 1.9)) for _ in range(count))
        prompts = [max(4, min(length, self._longest)) for length in spread]
        lengths = [(length, max(2, answer * place // count)) for place, length in enumerate(prompts, 1)]
        self._rng.shuffle(lengths)
        await self._send(f"falling, prompts of about {middle}", count, lengths, None)

    def _longest_falling(self, seconds: float) -> int:
        """Prompts of all rows that fit into the cache, with their answers, and take about half of so long."""
        engine, count = self._engine, self._engine.max_num_seqs
        room = engine.num_blocks * engine.block_size // 2 // count
        return max(8, min(self._longest, room, round(0.5 * seconds / self._token_s / count)))

    def _row_s(self) -> float:
        """Between two tokens of an answer in the last load."""
        gaps = sorted(gap for sample in self._loads[-1].samples for gap in sample.itl_s)
        return max(gaps[len(gaps) // 2] if gaps else 0.01, 1e-4)

    async def _send(
        self, label: str, users: int, lengths: list[tuple[int, int]], seconds: float | None
    ) -> list[Sample]:
        """For so long; None: each of them once."""
        self._tell(label, min(0.99, (perf_counter() - self._began_s) / self._seconds))
        samples = await self._drive(lengths, users, seconds)
        share = max((use.cpu_share for use in self._sender.uses()), default=0.0)
        self._loads.append(ProfileLoad(label, users, samples, next(self._stage), seconds is None, share))
        return samples

    async def _drive(self, lengths: list[tuple[int, int]], users: int, seconds: float | None = None) -> list[Sample]:
        context = self._engine.context_length
        fitting = [(prompt, min(answer, context - prompt)) for prompt, answer in lengths]
        requests = _Requests(self._model, self._ids, fitting, self._seed, is_endless=seconds is not None)
        samples: list[Sample] = []
        await self._sender.prepare(LevelTask(requests, next(self._number), Load("concurrency", users), seconds))
        await self._sender.drive(samples.append)
        if failures := [sample.failure for sample in samples if sample.failure is not None]:
            raise ConfigError(
                f"the server failed {len(failures)} of {len(samples)} requests, the first with: {failures[0]}"
            )
        return samples


def _spread(low: int, high: int, count: int) -> list[int]:
    """`count` numbers from low to high, each by the same factor above the one before."""
    return [round(low * (high / low) ** (place / (count - 1))) for place in range(count)]


def _between(rng: random.Random, low: int, high: int) -> int:
    """Small numbers as often as large ones, on a scale of powers."""
    return round(math.exp(rng.uniform(math.log(low), math.log(max(low, high)))))
