"""A target: what is drawn, what is done with it, and how many of a run's cases it gets; and the run itself."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz.running import Caller


@dataclass
class Outcome:
    """What became of the cases: how many, in which ways they ended, and the slowest."""

    kinds: Counter[str] = field(default_factory=Counter)
    worst_s: float = 0.0
    failure: Exception | None = None


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Request({self.method!r}, {self.path!r}, {self.body[:3000]!r}, {dict(self.headers)!r})"


@dataclass(frozen=True)
class HttpTarget:
    name: str
    weight: int
    cases: st.SearchStrategy[Request]
    place: Callable[[Path], contextlib.AbstractContextManager[Caller]]

    @contextlib.contextmanager
    def prepared(self, folder: Path, outcome: Outcome) -> Iterator[Callable[[Any], None]]:
        with self.place(folder) as caller:

            def check(request: Request) -> None:
                caller.send(request.method, request.path, request.body, request.headers)
                if request.path.startswith("/admin/backends/b/drain"):
                    caller.send("POST", "/admin/backends/b/resume", b"")

            yield check
            caller.check_alive()
            outcome.kinds.update({str(status): number for status, number in sorted(caller.statuses.items())})
            outcome.worst_s = caller.worst_s


@dataclass(frozen=True)
class FunctionTarget:
    """`check` raises if something is wrong, and returns in which way the case ended."""

    name: str
    weight: int
    cases: st.SearchStrategy[Any]
    check: Callable[[Any, Path], str]

    @contextlib.contextmanager
    def prepared(self, folder: Path, outcome: Outcome) -> Iterator[Callable[[Any], None]]:
        def check(case: Any) -> None:
            began_s = time.monotonic()
            outcome.kinds[self.check(case, folder)] += 1
            outcome.worst_s = max(outcome.worst_s, time.monotonic() - began_s)

        yield check


Target = HttpTarget | FunctionTarget


def run_target(target: Target, num_cases: int, *, chosen_seed: int, folder: Path) -> Outcome:
    """Stops at the first failure, which hypothesis then makes as small as it can."""
    outcome = Outcome()
    phases = (Phase.generate, Phase.shrink)

    with target.prepared(folder, outcome) as check:

        @seed(chosen_seed)
        @settings(max_examples=num_cases, deadline=None, database=None, phases=phases, print_blob=False,
                  suppress_health_check=list(HealthCheck))  # fmt: skip
        @given(target.cases)
        def run(case: Any) -> None:
            check(case)

        try:
            run()
        except Exception as failure:
            outcome.failure = failure
    return outcome
