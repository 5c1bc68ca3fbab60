"""The rules by which a backend is chosen. Each takes the candidates and narrows them.

Does: one question per rule: which has the model, which can be used now, whose turn it is by its share, which fits the prompt,
which has computed its beginning, which is least busy. Does not: know the order of the rules (`router.py`), send, or count
failures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from tonle.gateway.backends.backend import Backend
from tonle.gateway.parsed_request import prompt_texts
from tonle.gateway.routing.held_blocks import HeldBlocks
from tonle.gateway.routing.prefix_affinity import (
    MAX_PIECES,
    PIECE_CHARS,
    PrefixBlocks,
    PrefixMemory,
    first_home,
    piece_names,
)
from tonle.gateway.stage_results import AcceptedRequest
from tonle.protocol.kv_blocks import read_blocks

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


def not_passed(candidates: Candidates, request: RouteRequest) -> Candidates:
    """No gateway that the request has passed."""
    passed = request.accepted.passed
    found = [
        backend for backend in candidates.backends if backend.gateway_id is None or backend.gateway_id not in passed
    ]
    return candidates if len(found) == len(candidates.backends) else Candidates(found, candidates.why)


class ByRegion:
    """The nearest region that has a backend with room; if none has room, the nearest."""

    def __init__(self, own: str, order: Sequence[str]) -> None:
        self._rank = {name: rank for rank, name in enumerate(dict.fromkeys((own, *order)))}

    def __call__(self, candidates: Candidates, request: RouteRequest) -> Candidates:
        backends = candidates.backends
        answering = [backend for backend in backends if backend.row.role != "prefill"]
        names = sorted({str(backend.region) for backend in answering}, key=self._distance)
        if len(names) < 2:
            return candidates
        roomy = {str(backend.region) for backend in answering if backend.gate.has_room}
        nearest = next((name for name in names if name in roomy), names[0])
        found = [backend for backend in backends if backend.region == nearest]
        return Candidates(found, candidates.why if nearest == names[0] else "region")

    def _distance(self, region: str) -> tuple[int, str]:
        return self._rank.get(region, len(self._rank)), region


class ByRole:
    """Prefill backends do not answer; for prompts of `prefill_threshold` tokens the least busy of them goes first, unless no
    token is to be written (embeddings)."""

    def __init__(self, prefill_threshold: int) -> None:
        self._threshold = prefill_threshold

    def __call__(self, candidates: Candidates, request: RouteRequest) -> Candidates:
        answering = [backend for backend in candidates.backends if backend.row.role != "prefill"]
        if len(answering) == len(candidates.backends):
            return candidates
        prefill, parsed = None, request.accepted.request
        if parsed.new_tokens and parsed.prompt_tokens >= self._threshold:
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
    """The backend that computed the prompt's beginning, unless it is far busier than the others.

    Where backends say which KV blocks they have, and said which a text that begins like this one has, it is the one that has
    most of them now; otherwise the one that such a prompt was sent to last, unless that one says that it has lost them.
    """

    def __init__(self, held: HeldBlocks | None = None) -> None:
        self._memory = PrefixMemory()
        self._held = held
        self._blocks = PrefixBlocks()

    def __call__(self, candidates: Candidates, request: RouteRequest) -> Candidates:
        backends, accepted = candidates.backends, request.accepted
        if len(backends) == 1:
            return candidates
        names = _names(accepted)
        by_name = {backend.name: backend for backend in backends}
        home = self._holder(names, backends)
        if home is None:
            home, _ = self._memory.longest(names, {name for name in by_name if not self._has_lost(name, names[0])})
        backend = by_name[home or first_home(names[0], by_name)]
        average = sum(each.load for each in backends) / len(backends)
        if backend.load > average * LOAD_FACTOR + LOAD_SLACK:
            self._memory.remember(names, least_busy(backends).name)  # where `by_load` will send it
            return candidates
        self._memory.remember(names, backend.name)
        return Candidates([backend], "prefix", candidates.prefill)

    def _holder(self, names: list[bytes], backends: list[Backend]) -> str | None:
        """The one that has most of the prompt's blocks, the least busy of several; None: none is known to."""
        if self._held is None or not self._held.is_on:
            return None
        for name in reversed(names):
            if holders := [backend for backend in backends if self._has(backend.name, name)]:
                return least_busy(holders).name
        return None

    def _has(self, backend: str, name: bytes) -> bool:
        assert self._held is not None
        block = self._blocks.find(name, backend)
        return block is not None and self._held.has(backend, block)

    def _has_lost(self, backend: str, name: bytes) -> bool:
        """It says so, where it could have said otherwise."""
        held = self._held
        return held is not None and held.tells(backend) and self._blocks.find(name, backend) is not None

    def learn(self, accepted: AcceptedRequest, backend: str, kv_blocks: str) -> None:
        """What `backend`, which answered it, told of its prompt."""
        if self._held is not None and self._held.is_on:
            num_chars = sum(len(text) for text in prompt_texts(accepted.request.body))
            self._blocks.learn(_names(accepted), num_chars, backend, read_blocks(kv_blocks))


def _names(accepted: AcceptedRequest) -> list[bytes]:
    return piece_names(accepted.request.prefix_text(PIECE_CHARS * MAX_PIECES), _sharers(accepted))


def _sharers(accepted: AcceptedRequest) -> str:
    """Who shares computed prefixes: requests of one owner and, of those for adapters, only for the same content."""
    entry = accepted.model.entry
    owner = accepted.key.owner
    return f"{owner}\0{accepted.model.name}\0{entry.adapter_digest}" if entry.parent else owner


def by_share(candidates: Candidates, request: RouteRequest) -> Candidates:
    """A backend with a share of its own (a canary) gets just that. Without any other backend it gets all."""
    limited = [backend for backend in candidates.backends if backend.row.share is not None]
    if not limited or len(limited) == len(candidates.backends):
        return candidates
    if not request.failed:  # a second attempt is not another request
        for backend in limited:
            backend.owed_share += backend.row.share or 0.0
            if backend.owed_share >= 1.0 - 1e-9:  # ten times 0.1 is a little less than 1
                backend.owed_share -= 1.0
                return Candidates([backend], "share", candidates.prefill)
    others = [backend for backend in candidates.backends if backend.row.share is None]
    return Candidates(others, candidates.why, candidates.prefill)


def by_load(candidates: Candidates, request: RouteRequest) -> Candidates:
    if len(candidates.backends) == 1:
        return candidates
    return Candidates([least_busy(candidates.backends)], candidates.why, candidates.prefill)


def least_busy(backends: list[Backend]) -> Backend:
    return min(backends, key=lambda backend: (backend.load, backend.num_sent))
