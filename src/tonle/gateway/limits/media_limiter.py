"""`MediaLimiter`: seconds of sound and images per minute of a key, counted in memory, by each gateway for itself.

Charged by estimate and corrected like tokens per minute; `memory_limiter.py` explains the arithmetic.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tonle.gateway.api_keys.key import Key, KeyLimits
from tonle.gateway.limits.limiter import MediaLimitName, refusal
from tonle.gateway.limits.memory_limiter import Bucket
from tonle.gateway.media_use import MediaUse

_Amounts = tuple[tuple[MediaLimitName, float, int | None], ...]  # name, amount, limit


class MediaLease:
    """One request's charge."""

    __slots__ = ("_charged", "_key", "_limiter")

    def __init__(self, limiter: MediaLimiter, key: Key, charged: MediaUse) -> None:
        self._limiter = limiter
        self._key = key
        self._charged = charged

    def settle(self, used: MediaUse) -> None:
        """Exactly once, however the request ends."""
        self._limiter.settle(self._key, self._charged, used)


class MediaLimiter:
    def __init__(self, default: KeyLimits, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._default = default
        self._clock = clock
        self._buckets: dict[tuple[str, MediaLimitName], Bucket] = {}

    def charge(self, key: Key, media: MediaUse) -> MediaLease:
        """`media` is an estimate. Raises `RateLimited`; then nothing was charged."""
        limits, now_s = key.limits.over(self._default), self._clock()
        amounts = _amounts(media, limits)
        for name, amount, limit in amounts:
            if limit is None or not amount:
                continue
            bucket = self._buckets.setdefault((key.id, name), Bucket(limit, now_s))
            bucket.refill(limit, now_s)
            if (wait_s := bucket.wait_s(amount, limit)) > 0:
                raise refusal(name, limits, wait_s)
        self._take(key, amounts)
        return MediaLease(self, key, media)

    def settle(self, key: Key, charged: MediaUse, used: MediaUse) -> None:
        difference = MediaUse(used.audio_s - charged.audio_s, used.images - charged.images)
        self._take(key, _amounts(difference, key.limits.over(self._default)))

    def _take(self, key: Key, amounts: _Amounts) -> None:
        for name, amount, limit in amounts:
            bucket = self._buckets.get((key.id, name))
            if bucket is not None and limit is not None:
                bucket.level -= amount


def _amounts(media: MediaUse, limits: KeyLimits) -> _Amounts:
    if not media:
        return ()
    return (
        ("audio_seconds_per_minute", media.audio_s, limits.audio_seconds_per_minute),
        ("images_per_minute", media.images, limits.images_per_minute),
    )
