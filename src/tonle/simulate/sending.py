"""`Sending`: one request on its way through the gateway, in virtual time.

Does: what `gateway/sending.py` and `gateway/attempt.py` do: choose, wait for a turn, have the prompt computed elsewhere if roles
are apart, send; choose again when a server was down or died before the answer began. Routes, queues and blame are the
gateway's own (`Router`, `Gate`, `Breaker`, `Blame`). Does not: hedge, race or enforce deadlines.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import msgspec

from tonle.bench.measure import Sample
from tonle.engine.request import Request, ResolvedConfig
from tonle.errors import CapacityError
from tonle.gateway.admission import Ticket
from tonle.gateway.api_keys.key import LOCAL_CALLER, Key
from tonle.gateway.backends.backend import Backend
from tonle.gateway.backends.blame import Blame
from tonle.gateway.parsed_request import ParsedRequest
from tonle.gateway.refusals import QueueFull
from tonle.gateway.stage_results import AcceptedRequest, ResolvedModel, Route
from tonle.protocol.replies import ModelEntry
from tonle.simulate.replica import Ended
from tonle.simulate.server import MODEL, Server
from tonle.simulate.trace import TraceRequest

if TYPE_CHECKING:
    from tonle.simulate.cluster import Cluster

_ENTRY = ModelEntry(id=MODEL)
_CHARS_PER_TOKEN = 4


class _Parsed(ParsedRequest, frozen=True, kw_only=True):
    """What the gateway reads of a request. A token counts as four characters of text, as everywhere in the gateway."""

    prompt: list[int]

    def prefix_text(self, num_chars: int) -> str:
        return array("i", self.prompt[: num_chars // _CHARS_PER_TOKEN]).tobytes().decode("latin-1")


class _Turn(Ticket):
    """Its request is told by a call."""

    __slots__ = ("_sending", "_waits")

    def __init__(self, sending: Sending, accepted: AcceptedRequest) -> None:
        request = accepted.request
        super().__init__(accepted.key.id, request.priority, request.prompt_tokens, accepted.model.new_tokens)
        self._sending = sending
        self._waits = False

    @property
    def is_queued(self) -> bool:
        return self._waits

    def queue(self) -> None:
        self._waits = True

    def let_in(self) -> None:
        self._waits = False
        self._sending.begin_soon()

    def displace(self, error: Exception) -> None:
        assert isinstance(error, QueueFull), "in a simulation nothing else ends a wait"
        self._waits = False
        self._sending.refused(error)

    def withdraw(self) -> None:
        self._waits = False


class Sending:
    """`start` it once; it ends with a sample."""

    def __init__(self, cluster: Cluster, request: TraceRequest, sample: Sample) -> None:
        self._cluster = cluster
        self._request = request
        self.sample = sample
        self._accepted = _accepted(request)
        self._blame = Blame(self._accepted.owner)
        self._failed: list[Backend] = []
        self._ticket: Ticket | None = None
        self._route: Route | None = None

    def start(self) -> None:
        try:
            route = self._cluster.router.choose(self._accepted, self._failed)
        except CapacityError as error:
            self._end(f"HTTP {error.status}: {error.message}" if not self.sample.failure else self.sample.failure)
            return
        if self._blame.failed:  # this is the one other backend that gets the request: without a prefill leg
            route = msgspec.structs.replace(route, prefill=None)
        self._route = route
        self._ticket = ticket = _Turn(self, self._accepted)
        try:
            if route.backend.gate.ask(ticket):
                self.begin()
        except QueueFull as error:
            self.refused(error)

    def refused(self, error: QueueFull) -> None:
        self._ticket = None
        self._end(f"HTTP {error.status}: {error.message}")

    def begin_soon(self) -> None:
        """As in the gateway, whose event loop wakes the caller later: the one that leaves the gate does not wait for it."""
        self._cluster.clock.at(self._cluster.clock.now, self.begin)

    def begin(self) -> None:
        """It is its turn."""
        assert self._route is not None
        if self._route.prefill is not None:
            self._send(self._route.prefill, self._request.prompt, 1, self._prefilled)
        else:
            self._answer()

    def _answer(self) -> None:
        assert self._route is not None
        self._send(self._route.backend, self._request.prompt, self._request.output_tokens, self._answered)

    def _send(self, backend: Backend, prompt: list[int], new_tokens: int, then: Any) -> None:
        backend.breaker.begin()
        backend.num_sent += 1
        server = self._cluster.server_of(backend)
        if server.replica is None:
            self._blame.unreachable(backend)
            self._retry(backend, f"connection refused: {backend.name} is down")
            return
        self._cluster.submit(server, self._engine_request(prompt, new_tokens), then, self._lost)

    def _engine_request(self, prompt: list[int], new_tokens: int) -> Request:
        request, cluster = self._request, self._cluster
        return Request(
            handle=cluster.next_handle(),
            prompt=prompt,
            config=ResolvedConfig(max_length=new_tokens, early_stopping=False),
            priority=request.priority,
            seed=request.index,
            salt=request.owner.encode(),
            arrived_s=cluster.clock.now,
        )

    # -- what came of it

    def _prefilled(self, server: Server, ended: Ended) -> None:
        """The first leg is done: its keys and values go to the server that answers."""
        if ended.refusal is not None:
            self._blame.answer(server.backend, 400)
            self._leave(0)
            self._end(f"HTTP 400: {ended.refusal}")
            return
        self._blame.answer(server.backend, 200)
        fleet = self._cluster.fleet
        num_bytes = len(self._request.prompt) * fleet.kv_bytes_per_token
        moved_s = ended.tokens_s[-1] + fleet.kv_latency_s + num_bytes / fleet.kv_bytes_per_s
        self._cluster.clock.at(moved_s, self._moved)

    def _moved(self) -> None:
        assert self._route is not None
        replica = self._cluster.server_of(self._route.backend).replica
        if replica is not None:
            replica.receive_blocks(self._engine_request(self._request.prompt, 1))
        self._answer()

    def _answered(self, server: Server, ended: Ended) -> None:
        if ended.refusal is not None:
            self._blame.answer(server.backend, 400)
            self._finish(ended.at_s + server.options.times.back_s, 0, f"HTTP 400: {ended.refusal}")
            return
        self._blame.answer(server.backend, 200)
        sample = self.sample
        sample.arrivals_s = ended.tokens_s
        sample.last_s = ended.tokens_s[-1]
        sample.output_tokens = len(ended.tokens_s)
        sample.prompt_tokens = len(self._request.prompt)
        sample.cached_tokens = ended.cached_tokens
        sample.finish_reason = "length"
        self._finish(sample.last_s, sample.output_tokens, None, ended.turn_s)

    def _lost(self, server: Server, tokens_s: list[float]) -> None:
        """The server died."""
        self._blame.fail(server.backend)
        why = f"connection closed: {server.name} died"
        prefilling = self._route is not None and server.backend is self._route.prefill
        num_seen = sum(at_s <= self._cluster.clock.now for at_s in tokens_s)
        if num_seen and not prefilling:
            self.sample.output_tokens = num_seen
            self._leave(num_seen)
            self._end(f"truncated stream: {why}")
        elif len(self._blame.failed) > 1:
            self._leave(0)
            self._end(why)
        else:
            self._retry(server.backend, why)

    def _retry(self, backend: Backend, why: str) -> None:
        self._leave(0)
        self.sample.failure = why  # unless another server answers
        if len(self._failed) >= self._cluster.retries:
            self._end(why)
            return
        self._failed.append(backend)
        self._cluster.clock.at(self._cluster.clock.now, self.start)

    def _leave(self, new_tokens: int) -> None:
        ticket, self._ticket = self._ticket, None
        if ticket is not None and self._route is not None:
            used = len(self._request.prompt) + new_tokens if new_tokens else 0
            self._route.backend.gate.leave(ticket, used_tokens=used, new_tokens=new_tokens)

    def _finish(self, at_s: float, new_tokens: int, failure: str | None, turn_s: float = 0.0) -> None:
        """Its place is free then; its caller is done with it `turn_s` later."""

        def finish() -> None:
            self._leave(new_tokens)
            if turn_s:
                self._cluster.clock.at(at_s + turn_s, lambda: self._end(failure))
            else:
                self._end(failure)

        self._cluster.clock.at(at_s, finish)

    def _end(self, failure: str | None) -> None:
        self.sample.failure = failure
        self.sample.end_s = self._cluster.clock.now
        self._cluster.ended(self._request, self.sample)


def _accepted(request: TraceRequest) -> AcceptedRequest:
    """As the gateway's stages before routing leave it."""
    parsed = _Parsed(
        body={}, raw=b"", rewritten=False, warnings=(), asked_model=MODEL, stream=True, wants_usage=True, adds_usage=False,
        prompt_tokens=len(request.prompt), new_tokens=request.output_tokens, priority=request.priority, deadline_s=None,
        user=None, strict=False, prompt=request.prompt,
    )  # fmt: skip
    owner = request.owner
    key = Key(id=owner, name=owner, digest="", created=0) if owner else LOCAL_CALLER
    call: Any = None  # where a reply goes: there is none to write
    model = ResolvedModel(MODEL, MODEL, _ENTRY, request.output_tokens)
    return AcceptedRequest(call, key, parsed, model, key.owner, "")
