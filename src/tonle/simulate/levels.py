"""The levels of a benchmark, simulated: the same options as `tonle bench`, the same report.

Does: make each level's trace, simulate it, report; search the highest load (`Sweep`), or the fewest replicas that hold an SLO.
Does not: print or save.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from tonle.bench.keeping_up import is_overloaded
from tonle.bench.load import Load
from tonle.bench.measure import LevelReport
from tonle.bench.options import BenchOptions
from tonle.bench.report import BenchReport, describe_environment, describe_settings
from tonle.bench.sweep import Saturation
from tonle.errors import ConfigError
from tonle.simulate.fleet import Fleet
from tonle.simulate.result import SimulationResult
from tonle.simulate.run import simulate
from tonle.simulate.trace import Trace
from tonle.simulate.traces import trace_of_workload

_FIRST_GUESS = 64  # requests per user of a closed loop that ends at a time; doubled until they are enough
_MOST_REQUESTS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedLevel:
    result: SimulationResult
    level: LevelReport

    @property
    def load(self) -> float:
        """Users, or requests per second."""
        return self.level.concurrency or self.level.rate or 0.0

    @property
    def is_overloaded(self) -> bool:
        """Requests come faster than they are answered."""
        return is_overloaded([sample for sample in self.result.samples if sample.failure is None])


Watch = Callable[[SimulatedLevel], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FewestReplicas:
    """What a search for replicas found. `levels`: by number of replicas, in the order in which they were tried."""

    count: int | None  # None: not even the most replicas hold it
    levels: list[tuple[int, SimulatedLevel]]
    is_monotonic: bool  # every number tried above `count` holds it, too


def simulate_level(
    options: BenchOptions, fleet: Fleet, *, number: int = 0, load: Load | None = None, trace: Trace | None = None
) -> SimulatedLevel:
    """Level `number`, under its own load unless `load` says otherwise; `trace`: its requests, if they are made already."""
    chosen = options.levels[number] if load is None else load
    if trace is not None:
        result = simulate(trace, fleet, seed=options.seed)
    elif chosen.users is not None and options.num_requests(chosen) is None:
        result = _for_a_time(options, fleet, number, chosen)
    else:
        result = simulate(trace_of_workload(options, level=number, load=load), fleet, seed=options.seed)
    return SimulatedLevel(result=result, level=result.level(slo=options.slo, keep_rows=options.keep_requests))


def _for_a_time(options: BenchOptions, fleet: Fleet, number: int, load: Load) -> SimulationResult:
    """A closed loop until `duration_s`: how many requests that takes is known afterwards."""
    assert load.users is not None
    count = _FIRST_GUESS * load.users
    while True:
        trace = trace_of_workload(options, count, level=number, load=load)
        result = simulate(trace, fleet, seed=options.seed)
        if len(result.samples) < len(trace.requests) or count >= _MOST_REQUESTS:
            return result
        count *= 2


def simulate_levels(options: BenchOptions, fleet: Fleet, watch: Watch) -> tuple[Saturation | None, list[str]]:
    """All levels, which `watch` gets one by one. Of a sweep: where it ended, and notes about it."""
    if options.sweep is None:
        for number, load in enumerate(options.levels):
            watch(simulate_level(options, fleet, number=number, load=load))
        return None, []
    sweep, number = options.new_sweep(), 0
    while (next_load := sweep.next_load()) is not None:
        simulated = simulate_level(options, fleet, number=number, load=next_load)
        sweep.add(next_load, simulated.level)
        watch(simulated)
        number += 1
    return sweep.saturation(), sweep.notes()


def find_replicas(options: BenchOptions, fleet: Fleet, *, most: int, watch: Watch) -> FewestReplicas:
    """The fewest replicas that hold the SLO on the options' first level: doubled until it holds, then halved. Every number is
    tried on the same requests and behind a gateway, unless `fleet` has none. Raises `ConfigError` if there is no SLO, or if
    `fleet` chooses its number itself."""
    if not options.slo:
        raise ConfigError("the fewest replicas for what? Give an SLO, such as --ttft-p95 500ms", param="slo")
    if fleet.autoscaling is not None:
        raise ConfigError(
            "the number of replicas cannot be searched where autoscaling chooses it: leave autoscaling out of the fleet",
            param="find_replicas",
        )
    if fleet.gateway is None:
        fleet = replace(fleet, gateway=True)  # its limits would else begin with the second replica
    load = options.levels[0]
    is_open_end = load.users is not None and options.num_requests(load) is None
    trace = None if is_open_end else trace_of_workload(options)
    tried: dict[int, SimulatedLevel] = {}

    def holds(count: int) -> bool:
        if count not in tried:
            tried[count] = simulate_level(options, fleet.resized(count), trace=trace)
            watch(tried[count])
        return is_held(tried[count])

    high = 1 + max((failure.replica for failure in fleet.failures), default=0)  # those that fail must be there
    if high > most:
        raise ConfigError(f"replica {high - 1} fails, counted from 0: {most} replicas are too few", param="failures")
    low = high - 1  # does not hold it, or is not tried
    while not holds(high):
        low, high = high, min(high * 2, most)
        if low == most:
            return FewestReplicas(count=None, levels=list(tried.items()), is_monotonic=True)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    if high < most:
        holds(high + 1)  # one more must not be worse
    is_monotonic = all(is_held(each) == (count >= high) for count, each in tried.items())
    return FewestReplicas(count=high, levels=list(tried.items()), is_monotonic=is_monotonic)


def is_held(simulated: SimulatedLevel) -> bool:
    """Also for longer than it was simulated: no request keeps an SLO on TTFT for ever if they wait longer and longer."""
    return bool(simulated.level.slo) and simulated.level.holds_slo and not simulated.is_overloaded


def simulated_report(
    options: BenchOptions,
    levels: list[SimulatedLevel],
    *,
    name: str,
    model: str | None,
    settings: dict[str, Any],
    notes: list[str],
    saturation: Saturation | None = None,
    interrupted: bool = False,
) -> BenchReport:
    """In the form that `tonle bench report` and `compare` read. `name` stands where a measured one has the server's address;
    `settings` says what was simulated."""
    kind = "replay" if options.replay is not None else "file" if options.file is not None else "ids"
    return BenchReport(
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        url=name,
        model=model,
        prompt_kind=kind,
        settings=describe_settings(replace(options, url=name)) | {"simulated": settings},
        environment=describe_environment("virtual time"),
        levels=[
            each.level for each in (levels if options.sweep is None else sorted(levels, key=lambda each: each.load))
        ],
        notes=notes,
        interrupted=interrupted,
        kind="simulated",
        saturation=saturation,
    )
