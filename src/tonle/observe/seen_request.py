"""`SeenRequest`: one request after its end, as the dashboard, the metrics, traces and explanations see it.

Does: hold numbers and names. Never holds a word of a prompt or an answer: those are in the audit trail only.
"""

from __future__ import annotations

import itertools
import time

import msgspec

from tonle.telemetry.time_spent import TimeSpent

# Microseconds, so that after a restart the numbers go on above those of before: an open page does not mix the two up.
_numbers = itertools.count(time.time_ns() // 1000)


class SeenRequest(msgspec.Struct, kw_only=True, frozen=True):
    """Moments are seconds since its arrival; None: it did not get there."""

    id: str  # its caller may have chosen it, and chosen one that is in use
    number: int = msgspec.field(default_factory=_numbers.__next__)  # no other has it; they grow as requests end
    arrived: float  # unix seconds
    path: str
    model: str = ""  # as it was asked for
    adapter: str | None = None
    key_id: str = ""  # empty: refused before it was known whose it is; "anonymous": the server has no keys
    key_name: str = ""
    owner: str = ""  # whose request it is: the key's tenant, or the key
    status: str = ""  # as in the audit: ok, cached, failed, refused, cancelled, …
    http_status: int = 0
    error: str | None = None  # the code of what went wrong
    limit: str = ""  # of its key, that refused it: "make 60 requests per minute"
    stream: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0  # of all its answers
    audio_s: float = 0.0  # of sound, heard or spoken
    characters: int = 0  # that were spoken
    images: int = 0  # that were made
    computed: bool = True  # False: no model ran for it (/tokenize)
    num_answers: int = 1  # `n`, times its prompts: they are made side by side
    cache: str = "bypass"  # the response cache: hit, miss, bypass
    experiment: str | None = None
    arm: str | None = None
    backend: str = ""  # that answered; empty: none was asked
    is_local: bool = False  # it was the engine of this process, or a worker pool of it
    pool: str = ""  # the worker pool of that backend; empty: it was none, or it said nothing
    why: str = ""  # that backend: only, experiment, share, length, prefix, load
    failed: tuple[str, ...] = ()  # backends that failed before it
    fallback: str = ""  # the model that answered, where all backends of the one asked for were out
    region: str = ""  # where the answer was made; empty: not known
    trace_id: str = ""  # W3C, 32 hex digits; empty: none
    span_id: str = ""  # of this server's span in that trace
    accepted_s: float | None = None  # read, charged, resolved
    queued_s: float = 0.0  # how long it waited here for a backend
    sent_s: float | None = None  # handed to the backend, or the engine
    first_byte_s: float | None = None  # of the backend's answer
    ttft_s: float | None = None  # first token
    last_s: float | None = None  # last token
    total_s: float = 0.0  # end of the reply
    engine_s: dict[str, float] | None = None  # queue, prefill, decode: as its engine told, if it did
    spent: TimeSpent | None = None  # the same in detail, of the engine of this process
    device_s: float = 0.0  # its share of the device's time: as the engine of this process told, else estimated
    cost: float | None = None  # in the currency of price_per_hour; None: no price is set

    @property
    def is_admitted(self) -> bool:
        """False: refused, before it was known whose it is: by its key, or by the page it comes from."""
        return bool(self.key_id)

    @property
    def itl_s(self) -> float | None:
        """Mean gap between two tokens of one answer."""
        first_s, last_s, gaps = self.ttft_s, self.last_s, self.completion_tokens - self.num_answers
        if first_s is None or last_s is None or gaps < 1:
            return None
        return (last_s - first_s) * self.num_answers / gaps if last_s > first_s else 0.0

    @property
    def num_gaps(self) -> int:
        """Between the tokens of each answer, all together."""
        return max(0, self.completion_tokens - self.num_answers)
