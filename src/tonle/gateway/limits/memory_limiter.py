"""`MemoryLimiter`: limits counted in memory, for one gateway.

A minute is a bucket that holds a minute's worth and refills steadily: a burst may take all of it, and then the rate
holds. Tokens are charged by estimate when a request comes and corrected when its answer has ended; a bucket that an
answer has overdrawn must refill first. Tokens per day are those used today and those reserved by running requests: one
request may exceed the day, many at once may not.
"""

from __future__ import annotations

import datetime
import functools
import time
from collections.abc import Callable, Iterable

from tonle.gateway.api_keys.key import Key, KeyLimits
from tonle.gateway.limits.limiter import refusal

MINUTE_S = 60.0
DAY_S = 86400
SLOT_WAIT_S = 1.0  # it is not known when one of the key's running requests will end


@functools.lru_cache(maxsize=2)
def _date(day: int) -> str:
    """Of a day since the epoch (UTC)."""
    return datetime.datetime.fromtimestamp(day * DAY_S, datetime.UTC).date().isoformat()


class Bucket:
    """Refills at `limit` per minute, up to `limit`."""

    __slots__ = ("level", "updated_s")

    def __init__(self, limit: int, now_s: float) -> None:
        self.level = float(limit)
        self.updated_s = now_s

    def refill(self, limit: int, now_s: float) -> None:
        self.level = min(float(limit), self.level + (now_s - self.updated_s) * limit / MINUTE_S)
        self.updated_s = now_s

    def wait_s(self, amount: float, limit: int) -> float:
        """Until `amount` is there; 0 = now. An amount larger than a whole bucket waits for a full one."""
        return max(0.0, (min(amount, limit) - self.level) * MINUTE_S / limit)


class Account:
    """What one key has used."""

    __slots__ = ("day", "num_running", "requests", "reserved_tokens", "tokens", "tokens_today")

    def __init__(self) -> None:
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self.num_running = 0
        self.reserved_tokens = 0  # estimated for running requests, whenever they began
        self.day = ""
        self.tokens_today = 0


class MemoryLease:
    """One request's charge."""

    __slots__ = ("_account", "_charged", "_limiter", "key")

    def __init__(self, limiter: MemoryLimiter, key: Key, account: Account, charged: int) -> None:
        self.key = key
        self._limiter = limiter
        self._account = account
        self._charged = charged

    def settle(self, used_tokens: int) -> None:
        self._limiter.settle(self.key, self._account, self._charged, used_tokens)


class MemoryLimiter:
    """Owns every account. `unsaved` is what has not been written to the store yet."""

    def __init__(self, default: KeyLimits, *, clock: Callable[[], float] = time.monotonic,
                 today: Callable[[], str] | None = None) -> None:  # fmt: skip
        self._default = default
        self._clock = clock
        self.today = today or (lambda: _date(int(time.time() // DAY_S)))
        self._accounts: dict[str, Account] = {}
        self.unsaved: dict[tuple[str, str], int] = {}  # (day, key id) -> tokens

    def load(self, day: str, tokens: dict[str, int]) -> None:
        """What was used on `day` before this process began."""
        for key_id, used in tokens.items():
            account = self._accounts.setdefault(key_id, Account())
            account.day, account.tokens_today = day, used

    async def charge(self, key: Key, tokens: int) -> MemoryLease:
        """Raises `RateLimited`; then nothing was charged."""
        limits, now_s = key.limits.over(self._default), self._clock()
        account = self._accounts.setdefault(key.id, Account())
        self._check_concurrent(account, limits)
        self._check_day(account, limits)
        requests, tokens_bucket = self._buckets(account, limits, now_s)
        if requests is not None and limits.requests_per_minute is not None:
            wait_s = requests.wait_s(1, limits.requests_per_minute)
            if wait_s > 0:
                raise refusal("requests_per_minute", limits, wait_s)
        if tokens_bucket is not None and limits.tokens_per_minute is not None:
            wait_s = tokens_bucket.wait_s(tokens, limits.tokens_per_minute)
            if wait_s > 0:
                raise refusal("tokens_per_minute", limits, wait_s)
            tokens_bucket.level -= tokens
        if requests is not None:
            requests.level -= 1
        account.num_running += 1
        account.reserved_tokens += tokens
        return MemoryLease(self, key, account, tokens)

    def settle(self, key: Key, account: Account, charged: int, used: int) -> None:
        account.num_running -= 1
        account.reserved_tokens -= charged
        if account.tokens is not None:
            account.tokens.level -= used - charged
        day = self.today()
        if account.day != day:
            account.day, account.tokens_today = day, 0
        account.tokens_today += used
        if used:
            self.unsaved[day, key.id] = self.unsaved.get((day, key.id), 0) + used

    async def used_today(self, key_ids: Iterable[str]) -> dict[str, int]:
        day = self.today()
        accounts = {key_id: account for key_id in key_ids if (account := self._accounts.get(key_id)) is not None}
        return {key_id: account.tokens_today for key_id, account in accounts.items() if account.day == day}

    def _check_concurrent(self, account: Account, limits: KeyLimits) -> None:
        if limits.max_concurrent is not None and account.num_running >= limits.max_concurrent:
            raise refusal("max_concurrent", limits, SLOT_WAIT_S)

    def _check_day(self, account: Account, limits: KeyLimits) -> None:
        if limits.tokens_per_day is None:
            return
        used = account.tokens_today if account.day == self.today() else 0
        if used >= limits.tokens_per_day:
            raise refusal("tokens_per_day", limits, DAY_S - time.time() % DAY_S)
        if used + account.reserved_tokens >= limits.tokens_per_day:
            raise refusal("tokens_per_day", limits, SLOT_WAIT_S)

    def _buckets(self, account: Account, limits: KeyLimits, now_s: float) -> tuple[Bucket | None, Bucket | None]:
        """Refilled; None where there is no limit."""
        if limits.requests_per_minute is None:
            account.requests = None
        else:
            account.requests = account.requests or Bucket(limits.requests_per_minute, now_s)
            account.requests.refill(limits.requests_per_minute, now_s)
        if limits.tokens_per_minute is None:
            account.tokens = None
        else:
            account.tokens = account.tokens or Bucket(limits.tokens_per_minute, now_s)
            account.tokens.refill(limits.tokens_per_minute, now_s)
        return account.requests, account.tokens
