"""How the time is spent: `Budget` counts it, `plan` divides what is left between search, confirmation and a check of the load.

Does: arithmetic. Does not: measure, or wait.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tonle.bench.numbers import clock_text
from tonle.errors import ConfigError

PROFILE_S = 75.0  # of `tonle profile`, without the start of its server
SIMULATE_SHARE = 0.12  # of the budget, for the simulated search
SIMULATE_MOST_S = 120.0
SAFE_SHARE = 0.04  # of the budget, for the simulated search of the safe load

WANTED_RUNS = 14  # measurements that a budget is divided into, if they do not become too short
LEAST_RUN_S = 10.0
MOST_RUN_S = 120.0
AS_LONG_AS_START_S = (
    30.0  # up to here a measurement is at least as long as the start of its server: fewer, but better ones
)
LEAST_REQUESTS = 32

LEAST_SEARCH = 2  # the default and one other
LEAST_PAIRS = 2  # of default and tuned in the confirmation
MOST_PAIRS = 6
CONFIRM_SHARE = 0.45  # of the measurements


@dataclass(slots=True)
class Budget:
    """Seconds of wall time, over all runs of the same command."""

    total_s: float
    spent_before_s: float = 0.0
    clock: Callable[[], float] = time.monotonic
    _began_s: float = -1.0

    def __post_init__(self) -> None:
        self._began_s = self.clock()

    @property
    def spent_s(self) -> float:
        return self.spent_before_s + self.clock() - self._began_s

    @property
    def left_s(self) -> float:
        return self.total_s - self.spent_s

    def __str__(self) -> str:
        return f"{clock_text(self.spent_s)} of {clock_text(self.total_s)}"


@dataclass(frozen=True, slots=True)
class Plan:
    run_s: float  # of one measurement, without the start of the server
    search: int  # measurements before the confirmation
    pairs: int  # of default and tuned in the confirmation
    checks_safe_load: bool

    @property
    def measurements(self) -> int:
        return self.search + 2 * self.pairs + self.checks_safe_load


def plan(
    left_s: float,
    *,
    startup_s: float,
    run_s: float | None = None,
    least_run_s: float = LEAST_RUN_S,
    always_starts: bool = False,
) -> Plan:
    """Divide `left_s`. `run_s`: if the length of a measurement is given. Raises `ConfigError` if nothing useful fits.

    A confirmation of n pairs in the order A B B A A B … starts a server n + 1 times, everything else once per measurement;
    `always_starts`: the confirmation does so too, as the same prompts would be in a running server's cache.
    """
    confirm_s = partial(confirmation_s, startup_s=startup_s, always_starts=always_starts)
    is_given = run_s is not None
    if run_s is None:
        wanted_s = max(left_s / WANTED_RUNS - startup_s, min(startup_s, AS_LONG_AS_START_S))
        run_s = max(least_run_s, min(MOST_RUN_S, wanted_s))
    least_s = confirm_s(LEAST_PAIRS, run_s=run_s) + LEAST_SEARCH * (startup_s + run_s)
    if left_s < least_s and not is_given:
        run_s = max(least_run_s, run_s * 0.25) if least_run_s < run_s else run_s
        least_s = confirm_s(LEAST_PAIRS, run_s=run_s) + LEAST_SEARCH * (startup_s + run_s)
    if left_s < least_s:
        raise ConfigError(
            f"the budget is too short: {clock_text(left_s)} are left to measure, and the least is the default and one other once "
            f"each and both twice to confirm, {clock_text(least_s)} with {clock_text(startup_s)} for the start of a server; "
            f"raise --budget by {clock_text(math.ceil((least_s - left_s) / 10) * 10)} or more",
            param="budget",
        )
    pairs = LEAST_PAIRS
    while pairs < MOST_PAIRS and confirm_s(pairs + 1, run_s=run_s) <= CONFIRM_SHARE * left_s:
        pairs += 1
    rest_s = left_s - confirm_s(pairs, run_s=run_s)
    search = max(LEAST_SEARCH, int(rest_s / (startup_s + run_s)))
    checks = search > LEAST_SEARCH + 2
    return Plan(run_s, search - checks, pairs, checks)


def confirmation_s(pairs: int, *, startup_s: float, run_s: float, always_starts: bool = False) -> float:
    """Time that a confirmation takes."""
    return (2 * pairs if always_starts else pairs + 1) * startup_s + 2 * pairs * run_s


def simulation_s(budget: Budget) -> float:
    """Time for the simulated search."""
    return min(SIMULATE_MOST_S, SIMULATE_SHARE * budget.total_s, 0.3 * max(0.0, budget.left_s))


def safe_load_s(budget: Budget) -> float:
    """Time for the simulated search of the safe load."""
    return SAFE_SHARE * budget.total_s
