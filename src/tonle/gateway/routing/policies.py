"""The rules by which a backend is chosen. Each takes the candidates and narrows them.

Does: one question per rule: which has the model, which can be used now, which fits the prompt, which has computed its
beginning, which is least busy. Does not: know the order of the rules (`router.py`), send, or count failures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from tonle.gateway.backends.backend import Backend
from tonle.gateway.routing.prefix_affinity import MAX_PIECES, PIECE_CHARS, PrefixMemory, first_home, piece_names
from tonle.gateway.stage_results import AcceptedRequest

# Affinity gives way when its backend has this much more than the average.
LOAD_FACTOR = 1.25
LOAD_SLACK = 4.0  # requests


class RouteRequest(msgspec.Struct, frozen=True):
    """A request, and the backends that failed on it before."""

    accepted: AcceptedRequest
    failed: Sequence[Backend]


class Candidates(msgspec.Struct, frozen=True):
    """The backends that are left, and the reason that will be given for the one that is chosen."""

    backends: list[Backend]
    why: str
    prefill: Backend | None = None  # computes the prompt first


Policy = Callable[[Candidates, RouteRequest], Candidates]


def has_model(candidates: Candidates, request: RouteRequest) -> Candidates:
    name = request.accepted.model.name
    found = [backend for backend in candidates.backends if name in backend.models]
    return Candidates(found, "load" if len(found) > 1 else "only")


def is_available(candidates: Candidates, request: RouteRequest) -> Candidates:
    """Healthy, not being drained, not paused after failures, and not one that failed on this request."""
    failed = request.failed
    found = [backend for backend in candidates.backends if backend.available and backend not in failed]
    return Candidates(found, candidates.why)


def of_arm(candidates: Candidates, request: RouteRequest) -> Candidates:
    """The backend that the arm of an experiment names, if it names one."""
    arm = request.accepted.model.arm
    if arm is None or arm.backend is None:
        return candidates
    found = [backend for backend in candidates.backends if backend.name == arm.backend]
    return Candidates(found, "experiment")


class ByRole:
    """Prefill backends do not answer; for prompts of `prefill_threshold` tokens the least busy of them goes first."""

    def __init__(self, prefill_threshold: int) -> None:
        self._threshold = prefill_threshold

    def __call__(self, candidates: Candidates, request: RouteRequest) -> Candidates:
        answering = [backend for backend in candidates.backends if backend.row.role != "prefill"]
        if len(answering) == len(candidates.backends):
            return candidates
        prefill = None
        if request.accepted.request.prompt_tokens >= self._threshold:
            prefill = least_busy([backend for backend in candidates.backends if backend.row.role == "prefill"])
        return Candidates(answering, candidates.why, prefill)


class ByLength:
    """Backends for the prompt's length class; all, if none is."""

    def __init__(self, length_threshold: int) -> None:
        self._threshold = length_threshold

    def __call__(self, candidates: Candidates, request: RouteRequest) -> Candidates:
        wanted = "long" if request.accepted.request.prompt_tokens >= self._threshold else "short"
        fitting = [backend for backend in candidates.backends if backend.row.length in ("any", wanted)]
        if not fitting or len(fitting) == len(candidates.backends):
            return candidates
        return Candidates(fitting, "length", candidates.prefill)


class ByPrefix:
    """The backend that computed the prompt's beginning, unless it is far busier than the others."""

    def __init__(self) -> None:
        self._memory = PrefixMemory()

    def __call__(self, candidates: Candidates, request: RouteRequest) -> Candidates:
        backends, accepted = candidates.backends, request.accepted
        if len(backends) == 1:
            return candidates
        names = piece_names(accepted.request.prefix_text(PIECE_CHARS * MAX_PIECES), _sharers(accepted))
        by_name = {backend.name: backend for backend in backends}
        home, _ = self._memory.longest(names, set(by_name))
        backend = by_name[home or first_home(names[0], by_name)]
        average = sum(each.load for each in backends) / len(backends)
        if backend.load > average * LOAD_FACTOR + LOAD_SLACK:
            self._memory.remember(names, least_busy(backends).name)  # where `by_load` will send it
            return candidates
        self._memory.remember(names, backend.name)
        return Candidates([backend], "prefix", candidates.prefill)


def _sharers(accepted: AcceptedRequest) -> str:
    """Who shares computed prefixes: requests of one owner and, of those for adapters, only for the same content."""
    entry = accepted.model.entry
    owner = accepted.key.owner
    return f"{owner}\0{accepted.model.name}\0{entry.adapter_digest}" if entry.parent else owner


def by_load(candidates: Candidates, request: RouteRequest) -> Candidates:
    if len(candidates.backends) == 1:
        return candidates
    return Candidates([least_busy(candidates.backends)], candidates.why, candidates.prefill)


def least_busy(backends: list[Backend]) -> Backend:
    return min(backends, key=lambda backend: (backend.load, backend.num_sent))
