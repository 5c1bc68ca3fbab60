"""What each stage of the pipeline returns, in the order of the stages.

    admit → Key; read → ParsedRequest; charge → Lease; resolve → ResolvedModel   together: AcceptedRequest
    replay → CacheLookup; choose → Route; send → SendResult; shadow → ShadowCopy

Does: hold. A stage takes the results of earlier ones as arguments and changes none of them; record, metrics and log
are made from all of them at the end. They are msgspec structs because those cost a fifth of a frozen dataclass to make,
and every request makes all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from tonle.cache import CachedResponse, Flight
from tonle.config.routing import ArmConfig
from tonle.gateway.api_keys.key import LOCAL_CALLER, Key
from tonle.gateway.backends.backend import Backend
from tonle.gateway.call import Call
from tonle.gateway.hops import Passed
from tonle.gateway.media_use import NO_MEDIA, MediaUse
from tonle.gateway.parsed_request import ParsedRequest
from tonle.gateway.used_tokens import NONE_USED, UsedTokens
from tonle.observe.trace_facts import SentAttempt
from tonle.protocol.replies import ModelEntry

if TYPE_CHECKING:
    from tonle.gateway.limits.limiter import Lease
    from tonle.gateway.limits.media_limiter import MediaLease

CacheState = Literal["hit", "miss", "bypass"]


class ResolvedModel(msgspec.Struct, frozen=True):
    """The model behind the name that was asked for."""

    asked: str  # the public name; where the request names none, the only one there is
    name: str  # what backends call it
    entry: ModelEntry
    new_tokens: int  # that may be written in all answers: asked for, and each no more than the model's context
    experiment: str | None = None
    arm: ArmConfig | None = None  # of that experiment
    fallback: str | None = (
        None  # this is not what was asked for: its backends are out, and this model answers in its place
    )


class AcceptedRequest(msgspec.Struct, frozen=True):
    """A request that passed `admit`, `read`, `charge` and `resolve`: what the later stages work with."""

    call: Call
    key: Key
    request: ParsedRequest
    model: ResolvedModel
    owner: str  # whose cached answers and prefixes it may see
    salt: str  # separates the owner's cached prefixes from others' inside an engine
    passed: Passed = msgspec.field(default_factory=dict)  # gateways; those that are found to be no help are added


class CacheLookup(msgspec.Struct, frozen=True):
    """hit: `response` is replayed. miss: `flight` takes the answer once it is computed. bypass: neither."""

    state: CacheState
    response: CachedResponse | None = None
    flight: Flight | None = None


BYPASS = CacheLookup("bypass")


class Route(msgspec.Struct, frozen=True):
    backend: Backend
    why: str  # only, experiment, region, share, length, prefix, load
    prefill: Backend | None = None  # computes the prompt first, where roles are apart


class Hedge(msgspec.Struct, frozen=True):
    """A second backend was asked because the first had not begun."""

    first: str
    second: str
    after_s: float


class SendResult(msgspec.Struct, frozen=True, kw_only=True):
    """How sending ended: a reply of a backend, of whatever status, or a failure."""

    backend: str = ""  # that answered, or was asked last; empty: none was
    why: str = ""  # that backend
    status: int = 0  # of its reply; 0: none came
    failed: tuple[str, ...] = ()  # backends that failed before it
    left: tuple[str, ...] = ()  # backends that were removed before they had answered
    hedge: Hedge | None = None
    prefill: str | None = None  # the backend that computed the prompt
    queued_s: float = 0.0
    sent_s: float | None = None  # monotonic
    first_byte_s: float | None = None  # monotonic
    used: UsedTokens = NONE_USED  # by the last attempt
    sends: tuple[SentAttempt, ...] = ()  # all of them, if the request is recorded in a trace
    failure: BaseException | None = None  # why there is no reply, or no whole one


class ShadowCopy(msgspec.Struct, frozen=True):
    """Where a copy of the request was sent."""

    backend: str
    model: str
    request_id: str


class StageResults(msgspec.Struct):
    """The results so far; None: the request did not get there. Written by the pipeline only."""

    key: Key = LOCAL_CALLER
    request: ParsedRequest | None = None
    lease: Lease | None = None
    media_lease: MediaLease | None = None  # of a request for media
    used_media: MediaUse = NO_MEDIA
    model: ResolvedModel | None = None
    lookup: CacheLookup = BYPASS
    sent: SendResult | None = None
    shadow: ShadowCopy | None = None
    region: str | None = None  # where the answer was made
    adapter_digest: str | None = None  # of the adapter that computed the answer, as its server tells
    owner: str | None = None  # whose request it is; None: it was not accepted
    accepted_s: float | None = None  # monotonic; when it was read, charged and resolved

    @property
    def backend(self) -> str:
        """That answered, or was asked last; empty: none was."""
        return "" if self.sent is None else self.sent.backend

    @property
    def used_tokens(self) -> int:
        """Nothing for an answer from the cache: no backend was asked."""
        return 0 if self.sent is None else self.sent.used.total


def as_fields(value: Hedge | ShadowCopy) -> dict[str, Any]:
    """For a record."""
    return {name: getattr(value, name) for name in value.__struct_fields__}
