"""The scenarios: the same mix of questions asked one at a time without the cache, with it, and several at once.

Does: for each scenario draw its questions, warm up, ask, sum up. Does not: print; a `ScenarioWatch` is told what happens.
Runs: in the caller's thread, on uvloop where it is installed. Ctrl-C ends it early with what has been measured.

    report = run_scenarios("http://127.0.0.1:8000")              # a server
    report = run_scenarios(engine, ScenarioOptions(requests=100)) # anything with async generate_async(user_input, *, use_cache)
    report.scenarios[0].latency_s.p95, report.scenarios[1].cache_hit_rate, report.ok

Each scenario has new questions, so that none profits from what the one before left in a cache; the mix is the same. The
concurrent scenario does not use the response cache: beside the first, it shows what asking at once does, and only that.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from time import perf_counter
from typing import Any, Protocol

from tonle.bench.drive import closed_loop
from tonle.bench.measure import Sample
from tonle.bench.questions import MAX_QUESTIONS, Questions, num_repeats
from tonle.bench.report import describe_environment
from tonle.bench.run import check_no_loop, fastest_loop
from tonle.bench.scenario_report import Scenario, ScenarioReport, ScenarioResult, remark, summarize
from tonle.bench.scenario_target import Engine, EngineTarget, NoAnswerError, ScenarioTarget, find_service
from tonle.config.setting_names import named_settings
from tonle.edge.client import Address, HttpClient, UpstreamError
from tonle.errors import ConfigError

SEEDS = 1_000_000


@named_settings
@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioOptions:
    """Settings of one run. `validate` says which one makes no sense."""

    requests: int = 20  # per scenario
    concurrency: int = 5  # of the concurrent scenario
    repeat_share: float = 0.4  # of the questions, asked earlier in the same scenario
    output_tokens: int = 16  # most tokens of an answer
    warmup: int = 1  # questions before each scenario that are not counted
    timeout_s: float = 120.0  # per request
    sla_s: float = 2.0  # P95 must be below
    seed: int | None = None  # None: a new one for each run, so that no cache has seen its questions
    keep_requests: bool = False  # one row per request in the report

    # Of a server
    model: str | None = None  # None: the first that /v1/models lists
    api_key: str | None = field(default=None, repr=False)  # never written to a report
    verify_tls: bool = True

    def validate(self) -> None:
        """Raise `ConfigError` naming the setting, its value and what it takes."""
        if not 1 <= self.requests <= MAX_QUESTIONS:
            raise ConfigError(f"requests must be from 1 to {MAX_QUESTIONS}, not {self.requests}", param="requests")
        if not 0 <= self.warmup <= MAX_QUESTIONS:
            raise ConfigError(f"warmup must be from 0 to {MAX_QUESTIONS}, not {self.warmup}", param="warmup")
        if not 0 <= self.repeat_share < 1:
            raise ConfigError(
                f"repeat_share must be at least 0 and less than 1, not {self.repeat_share:g}", param="repeat_share"
            )
        for name in ("concurrency", "output_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}", param=name)
        for name, value in (("sla", self.sla_s), ("timeout", self.timeout_s)):
            if not math.isfinite(value) or value <= 0:
                raise ConfigError(f"{name} must be more than 0 seconds, not {value:g}", param=name)


class ScenarioWatch(Protocol):
    """Is told how the scenarios go, between two answers: must be quick."""

    def started(self, load: Scenario, num_requests: int | None, duration_s: float | None) -> None: ...
    def answered(self, sample: Sample) -> None: ...
    def finished(self, level: ScenarioResult) -> None: ...


class _NoWatch:
    """Ignores everything."""

    def started(self, load: Scenario, num_requests: int | None, duration_s: float | None) -> None: ...
    def answered(self, sample: Sample) -> None: ...
    def finished(self, level: ScenarioResult) -> None: ...


class Scenarios:
    """Owns one run. `report` is valid at any moment, also after `run` was cancelled."""

    def __init__(
        self,
        target: str | Engine,
        options: ScenarioOptions | None = None,
        watch: ScenarioWatch | None = None,
        *,
        event_loop: str = "asyncio",
    ) -> None:
        self._options = options or ScenarioOptions()
        self._options.validate()
        self._watch: ScenarioWatch = watch or _NoWatch()
        self._event_loop = event_loop
        self._started_at = datetime.now(UTC)
        self._seed = secrets.randbelow(SEEDS) if self._options.seed is None else self._options.seed
        self._questions = Questions(self._seed)
        self._results: list[ScenarioResult] = []
        self._notes: list[str] = []
        self._client: HttpClient | None = None
        self._target: ScenarioTarget | None = None
        if isinstance(target, str):
            address = Address.parse(target, scheme="http")
            self._client = HttpClient(
                address, api_key=self._options.api_key, verify_tls=self._options.verify_tls, resend=True
            )
            self._name = str(address)
        else:
            self._target = _engine_target(target, self._options)
            self._name = type(target).__name__

    async def run(self) -> ScenarioReport:
        """Run all scenarios that mean something here. Cancelling stops it; `report` then has what was measured so far."""
        try:
            target = self._target = await self._find_target()
            for scenario in all_scenarios(self._options.concurrency):
                if scenario.use_cache and not target.tells_cache_hits:
                    self._notes.append(
                        f'"{scenario.label}" was left out: that API can neither turn a response cache on '
                        "nor say whether it answered"
                    )
                    continue
                await self._run_scenario(target, scenario)
        finally:
            if self._client is not None:
                self._client.close()
        return self.report()

    def report(self, *, interrupted: bool = False) -> ScenarioReport:
        target = self._target
        notes = [*(target.notes if target is not None else []), *self._notes]
        for result in self._results:
            notes += remark(result)
        return ScenarioReport(
            started_at=self._started_at.isoformat(timespec="seconds"),
            target=self._name,
            asked_by=None if target is None else target.asked_by,
            model=None if target is None else target.model,
            sla_s=self._options.sla_s,
            seed=self._seed,
            settings=_describe(self._options),
            environment=describe_environment(self._event_loop),
            scenarios=list(self._results),
            notes=notes,
            interrupted=interrupted,
        )

    async def _find_target(self) -> ScenarioTarget:
        if self._target is not None:
            return self._target
        assert self._client is not None, "without an engine there is a client"
        options = self._options
        return await find_service(
            self._client, model=options.model, output_tokens=options.output_tokens, timeout_s=options.timeout_s
        )

    async def _run_scenario(self, target: ScenarioTarget, scenario: Scenario) -> None:
        options, users = self._options, scenario.concurrency
        warmup = self._questions.mix(options.warmup, 0.0)
        questions = self._questions.mix(options.requests, options.repeat_share)
        if self._client is not None:
            with contextlib.suppress(UpstreamError):  # the requests report it
                await self._client.prepare(min(users, options.requests))
        samples: list[Sample] = []

        async def send(numbered: tuple[int, str]) -> Sample:
            return await ask_timed(target, *numbered, use_cache=scenario.use_cache)

        def keep(sample: Sample) -> None:
            samples.append(sample)
            self._watch.answered(sample)

        await closed_loop(enumerate(warmup), users=min(users, max(1, len(warmup))), send=send, keep=lambda _: None)
        self._watch.started(scenario, options.requests, None)
        interrupted = True
        try:
            await closed_loop(enumerate(questions), users=users, send=send, keep=keep)
            interrupted = False
        finally:
            result = summarize(
                scenario,
                samples,
                repeated=num_repeats(options.requests, options.repeat_share),
                sla_s=options.sla_s,
                interrupted=interrupted,
                keep_rows=options.keep_requests,
            )
            self._results.append(result)
            self._watch.finished(result)


def all_scenarios(concurrency: int) -> Iterator[Scenario]:
    yield Scenario("sequential, no cache", use_cache=False, concurrency=1)
    yield Scenario("sequential, with cache", use_cache=True, concurrency=1)
    yield Scenario(f"concurrent, {concurrency} at once", use_cache=False, concurrency=concurrency)


async def ask_timed(target: ScenarioTarget, index: int, question: str, *, use_cache: bool) -> Sample:
    """Ask, and time it here. A failure is a sample too."""
    start_s = perf_counter()
    try:
        answer = await target.ask(question, use_cache=use_cache)
    except NoAnswerError as failure:
        return Sample(index=index, start_s=start_s, end_s=perf_counter(), failure=str(failure))
    end_s = perf_counter()
    return Sample(
        index=index,
        start_s=start_s,
        end_s=end_s,
        last_s=end_s,
        cache_hit=answer.cache_hit,
        output_tokens=answer.output_tokens,
    )


def run_scenarios(
    target: str | Engine, options: ScenarioOptions | None = None, watch: ScenarioWatch | None = None
) -> ScenarioReport:
    """Run the scenarios to their end, or to Ctrl-C: then the report says `interrupted` and holds what was measured.

    `target` is the address of a server, or an object with `async generate_async(user_input, *, use_cache) ->
    (response, metadata)`. Raises `ConfigError` if it cannot start: a setting makes no sense, the server does not answer.
    Inside a running event loop use `await Scenarios(target, options).run()`.
    """
    check_no_loop("run_scenarios", "await Scenarios(target, options).run()")
    factory, name = fastest_loop()
    scenarios = Scenarios(target, options, watch, event_loop=name)
    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(scenarios.run())
    except KeyboardInterrupt:
        return scenarios.report(interrupted=True)


def _engine_target(engine: Engine, options: ScenarioOptions) -> EngineTarget:
    return EngineTarget(engine, model=options.model, output_tokens=options.output_tokens, timeout_s=options.timeout_s)


def _describe(options: ScenarioOptions) -> dict[str, Any]:
    """Options as plain data, without the key."""
    names = (option.name for option in fields(options))
    return {name: getattr(options, name) for name in names if name != "api_key"}
