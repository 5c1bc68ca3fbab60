"""What the pipeline and the admin API know of limits: charge a request, settle it, ask what was used."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Protocol

from tonle.gateway.api_keys.key import Key, KeyLimits
from tonle.gateway.refusals import RateLimited

LimitName = Literal["requests_per_minute", "tokens_per_minute", "max_concurrent", "tokens_per_day"]
MediaLimitName = Literal["audio_seconds_per_minute", "images_per_minute"]

_WORDS: dict[LimitName | MediaLimitName, str] = {
    "requests_per_minute": "make {} requests per minute",
    "tokens_per_minute": "use {} tokens per minute",
    "max_concurrent": "have {} requests at once",
    "tokens_per_day": "use {} tokens per day (UTC)",
    "audio_seconds_per_minute": "use {} seconds of sound per minute",
    "images_per_minute": "have {} images made per minute",
}


class Lease(Protocol):
    """One request's charge."""

    def settle(self, used_tokens: int) -> None:
        """Exactly once, however the request ends. Never waits."""


class Limiter(Protocol):
    """KeyLimits of all keys."""

    async def charge(self, key: Key, tokens: int) -> Lease:
        """`tokens` is an estimate. Raises `RateLimited`, then nothing was charged; or `StoreLost`."""

    async def used_today(self, key_ids: Iterable[str]) -> dict[str, int]:
        """Tokens. Raises `StoreLost`."""


def refusal(name: LimitName | MediaLimitName, limits: KeyLimits, wait_s: float) -> RateLimited:
    limit = _WORDS[name].format(getattr(limits, name))
    refused = RateLimited(f"this key may {limit}", retry_after_s=wait_s)
    refused.limit = limit
    return refused
