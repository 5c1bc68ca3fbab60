"""The loads of a profile: requests that spread what steps compute, within a server's limits and the time there is.

Does: decide what to send in which order; drive it with the benchmark's client. Does not: start servers, or look at their steps.

    alone     one user, prompts of many lengths: prompts by themselves, and answers of one row
    N users   1, 2, 4 … up to the limit of rows, prompts and answers of mixed lengths: prompts beside rows that decode
    falling   as many requests as there are rows, sent at once, that end one by one: every number of rows, short and long contexts
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from time import perf_counter, thread_time

import msgspec

from tonle.bench.drive import closed_loop, send_job
from tonle.bench.measure import Sample
from tonle.bench.target import find_model
from tonle.bench.workload import Job
from tonle.edge.client import Address, HttpClient
from tonle.engine.step_log import LoggedEngine
from tonle.errors import ConfigError

Told = Callable[[str, float], None]  # what is being sent; share of all that is done, 0 to 1

_TIMEOUT_S = 600.0
_LONGEST_PROMPT = 2048
_LONGEST_ANSWER = 512
_ALONE_SHARE, _USERS_SHARE, _FALLING_SHARE = 0.12, 0.5, 0.38
_FALLS = (0.05, 0.25, 1.0)  # prompts of "falling" loads, as shares of the longest that fits


@dataclass(frozen=True, slots=True)
class ProfileLoad:
    """One part of the profile, as it was sent."""

    label: str
    users: int
    samples: list[Sample]
    is_burst: bool = False  # all at once
    client_share: float = 0.0  # of the time, that the client itself computed; near 1 it was the limit


class ProfileDriver:
    """Sends all loads to one server."""

    def __init__(
        self, url: str, engine: LoggedEngine, *, seconds: float, seed: int = 0, tell: Told | None = None
    ) -> None:
        self._engine = engine
        self._seconds = seconds
        self._rng = random.Random(f"profile/{seed}")
        self._tell = tell or (lambda label, share: None)
        self._client = HttpClient(Address.parse(url, scheme="http"), resend=True)
        self._model = ""
        # Token ids of prompts: from the middle of the vocabulary, where no special ones are.
        self._ids = range(engine.vocab_size // 4, engine.vocab_size // 2)
        self._index = itertools.count()
        self._loads: list[ProfileLoad] = []
        self._began_s = 0.0
        self._token_s = 1e-3  # per token of a prompt alone, as seen so far

    async def run(self) -> list[ProfileLoad]:
        """Raises `ConfigError` if the server does not answer as it should."""
        try:
            self._model = await find_model(self._client, None, [])
            await self._warm_up()
            self._began_s = perf_counter()
            await self._send_alone(_ALONE_SHARE * self._seconds)
            levels = self._levels()
            for users in levels:
                await self._send_users(users, _USERS_SHARE * self._seconds / len(levels))
            for share in _FALLS:
                await self._send_falling(share, _FALLING_SHARE * self._seconds / len(_FALLS))
        finally:
            self._client.close()
        self._tell("done", 1.0)
        return self._loads

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
            jobs = iter([self._job(64, 8) for _ in range(2 * users)])
            self._check(await self._drive(jobs, users))

    async def _send_alone(self, seconds: float) -> None:
        lengths = itertools.cycle(_spread(8, self._longest, 12))
        jobs = (self._job(max(4, round(length * self._rng.uniform(0.8, 1.0))), 6) for length in lengths)
        samples = await self._send("alone", 1, jobs, seconds)
        rates = [(sample.ttft_s or 0.0) / (sample.prompt_tokens or 1) for sample in samples if not sample.failure]
        self._token_s = sorted(rates)[len(rates) // 2]

    async def _send_users(self, users: int, seconds: float) -> None:
        row_s = self._row_s()
        longest = max(16, min(_LONGEST_ANSWER, round(0.5 * seconds / row_s)))
        # Prompts of all users together must not take all of the time.
        prompt = max(16, min(self._longest // 2, round(0.5 * seconds / self._token_s / users)))

        def jobs() -> Iterator[Job]:
            while True:
                yield self._job(_between(self._rng, 8, prompt), _between(self._rng, 4, longest))

        await self._send(f"{users} users", users, jobs(), seconds)

    async def _send_falling(self, share: float, seconds: float) -> None:
        engine, count = self._engine, self._engine.max_num_seqs
        room = engine.num_blocks * engine.block_size // 2 // count
        longest = max(8, min(self._longest, room, round(0.4 * seconds / self._token_s / count)))
        middle = max(8, round(share * longest))
        answer = max(16, min(_LONGEST_ANSWER, round(0.9 * seconds / self._row_s())))
        # Prompts of many lengths, as in service: what attention takes for rows of equal lengths is less.
        spread = (round(middle * self._rng.uniform(0.1, 1.9)) for _ in range(count))
        lengths = [max(4, min(length, self._longest)) for length in spread]
        jobs = [self._job(length, max(2, answer * place // count)) for place, length in enumerate(lengths, 1)]
        self._rng.shuffle(jobs)
        await self._send(f"falling, prompts of about {middle}", count, iter(jobs), None)

    def _row_s(self) -> float:
        """Between two tokens of an answer in the last load."""
        gaps = sorted(gap for sample in self._loads[-1].samples for gap in sample.itl_s)
        return max(gaps[len(gaps) // 2] if gaps else 0.01, 1e-4)

    async def _send(self, label: str, users: int, jobs: Iterator[Job], seconds: float | None) -> list[Sample]:
        self._tell(label, min(0.99, (perf_counter() - self._began_s) / self._seconds))
        began_s, cpu_s = perf_counter(), thread_time()
        samples = self._check(await self._drive(jobs, users, seconds))
        share = (thread_time() - cpu_s) / (perf_counter() - began_s)
        self._loads.append(ProfileLoad(label, users, samples, seconds is None, share))
        return samples

    async def _drive(self, jobs: Iterator[Job], users: int, seconds: float | None = None) -> list[Sample]:
        samples: list[Sample] = []

        def send(job: Job) -> Awaitable[Sample]:
            return send_job(self._client, job, timeout_s=_TIMEOUT_S)

        await closed_loop(jobs, users=users, send=send, keep=samples.append, duration_s=seconds)
        return samples

    def _check(self, samples: list[Sample]) -> list[Sample]:
        if failures := [sample.failure for sample in samples if sample.failure is not None]:
            raise ConfigError(
                f"the server failed {len(failures)} of {len(samples)} requests, the first with: {failures[0]}"
            )
        return samples

    def _job(self, prompt_tokens: int, output_tokens: int) -> Job:
        output_tokens = min(output_tokens, self._engine.context_length - prompt_tokens)
        body = {
            "model": self._model,
            "prompt": self._rng.choices(self._ids, k=prompt_tokens),
            "max_tokens": output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return Job(next(self._index), "/v1/completions", msgspec.json.encode(body), output_tokens)


def _spread(low: int, high: int, count: int) -> list[int]:
    """`count` numbers from low to high, each by the same factor above the one before."""
    return [round(low * (high / low) ** (place / (count - 1))) for place in range(count)]


def _between(rng: random.Random, low: int, high: int) -> int:
    """Small numbers as often as large ones, on a scale of powers."""
    return round(math.exp(rng.uniform(math.log(low), math.log(max(low, high)))))
