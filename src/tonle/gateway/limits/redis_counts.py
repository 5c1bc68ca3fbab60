"""KeyLimits in Redis: Lua scripts, each of which Redis runs whole before anything else.

    tonle:account:KEY   hash: requests, tokens (levels of the two buckets), requests_at, tokens_at, day, used
    tonle:leases:KEY    sorted set: `LEASE:TOKENS` by the time it runs out

The arithmetic is that of `memory_limiter.py`; that file explains it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from tonle.cache.redis_client import RedisClient
from tonle.gateway.api_keys.key import KeyLimits
from tonle.gateway.limits.limiter import LimitName
from tonle.gateway.limits.shared_counts import Held, OverLimit, Settlement

ACCOUNT, LEASES = "tonle:account:", "tonle:leases:"

# What every script begins with. KEYS: account and leases, of each key in turn; `turn_to` one of them.
_OPEN = """
local t = redis.call('TIME')
local now = t[1] + t[2] / 1e6
local today = math.floor(now / 86400)
local account, leases
local function turn_to(i) account, leases = KEYS[2 * i - 1], KEYS[2 * i] end
local function number(field) return tonumber(redis.call('HGET', account, field)) end
local function exact(value) return string.format('%.17g', value) end
local function tokens_of(member) return tonumber(string.match(member, ':(%d+)$')) end
local function use(tokens)
  if number('day') ~= today then redis.call('HSET', account, 'day', today, 'used', 0) end
  if tokens ~= 0 then redis.call('HINCRBY', account, 'used', tokens) end
  redis.call('EXPIRE', account, 172800)
end
"""

# ARGV: member, tokens, lease in s, requests/min, tokens/min, at once, tokens/day ('' = no limit).
# Returns {} or {name of the limit, seconds to wait as text}.
_CHARGE = (
    _OPEN
    + """
turn_to(1)
local member, tokens, lease_s = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
if redis.call('ZSCORE', leases, member) then return {} end
for _, lost in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', exact(now))) do
  redis.call('ZREM', leases, lost)
  use(tokens_of(lost))
end
local at_once = tonumber(ARGV[6])
if at_once and redis.call('ZCARD', leases) >= at_once then return {'max_concurrent', '1'} end
local per_day = tonumber(ARGV[7])
if per_day then
  local used = number('day') == today and number('used') or 0
  if used >= per_day then return {'tokens_per_day', exact(86400 - now % 86400)} end
  for _, running in ipairs(redis.call('ZRANGE', leases, 0, -1)) do used = used + tokens_of(running) end
  if used >= per_day then return {'tokens_per_day', '1'} end
end
local levels = {}
local function check(bucket, limit, amount)
  if not limit then
    redis.call('HDEL', account, bucket, bucket .. '_at')
    return nil
  end
  local level = number(bucket) or limit
  local since = math.max(0, now - (number(bucket .. '_at') or now))
  level = math.min(limit, level + since * limit / 60)
  local wait_s = (math.min(amount, limit) - level) * 60 / limit
  if wait_s > 0 then return wait_s end
  levels[bucket] = level - amount
end
local wait_s = check('requests', tonumber(ARGV[4]), 1)
if wait_s then return {'requests_per_minute', exact(wait_s)} end
wait_s = check('tokens', tonumber(ARGV[5]), tokens)
if wait_s then return {'tokens_per_minute', exact(wait_s)} end
for bucket, level in pairs(levels) do
  redis.call('HSET', account, bucket, exact(level), bucket .. '_at', exact(now))
end
use(0)
redis.call('ZADD', leases, exact(now + lease_s), member)
redis.call('EXPIRE', leases, math.ceil(lease_s) + 172800)
return {}
"""
)

# ARGV, for each: member ('' = none), tokens used.
_SETTLE = (
    _OPEN
    + """
for i = 1, #KEYS / 2 do
  turn_to(i)
  local member, used = ARGV[2 * i - 1], tonumber(ARGV[2 * i])
  local difference = used
  if member ~= '' and redis.call('ZREM', leases, member) == 1 then difference = used - tokens_of(member) end
  local level = number('tokens')
  if level then redis.call('HSET', account, 'tokens', exact(level - difference)) end
  use(used)
end
"""
)

# ARGV: lease in s, then a member for each.
_RENEW = (
    _OPEN
    + """
local lease_s = tonumber(ARGV[1])
for i = 1, #KEYS / 2 do
  turn_to(i)
  redis.call('ZADD', leases, exact(now + lease_s), ARGV[i + 1])
  redis.call('EXPIRE', leases, math.ceil(lease_s) + 172800)
end
"""
)

# Returns what each used today.
_USED = (
    _OPEN
    + """
local used = {}
for i = 1, #KEYS / 2 do
  turn_to(i)
  used[i] = number('day') == today and number('used') or 0
end
return used
"""
)


class RedisCounts:
    """Owns those names; the client is shared with the keys."""

    def __init__(self, client: RedisClient) -> None:
        self.place = client.place
        self._client = client
        register = client.redis.register_script
        self._charge, self._settle, self._renew, self._used = (
            register(script) for script in (_CHARGE, _SETTLE, _RENEW, _USED)
        )

    async def charge(self, held: Held, limits: KeyLimits, *, lease_s: float) -> OverLimit | None:
        bounds = (limits.requests_per_minute, limits.tokens_per_minute, limits.max_concurrent, limits.tokens_per_day)
        args = [_member(held), held.tokens, lease_s, *("" if bound is None else bound for bound in bounds)]
        async with self._client.trip():
            answer = await self._charge(keys=_names([held.key_id]), args=args)
        return OverLimit(cast(LimitName, answer[0].decode()), float(answer[1])) if answer else None

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        args = [word for each in settlements for word in (_member(each.held), each.used)]
        async with self._client.trip():
            await self._settle(keys=_names(each.key_id for each in settlements), args=args)

    async def renew(self, held: Sequence[Held], *, lease_s: float) -> None:
        args = [lease_s, *(_member(each) for each in held)]
        async with self._client.trip():
            await self._renew(keys=_names(each.key_id for each in held), args=args)

    async def used_today(self, key_ids: Iterable[str]) -> dict[str, int]:
        asked = list(key_ids)
        async with self._client.trip():
            used = await self._used(keys=_names(asked))
        return dict(zip(asked, used, strict=True))

    async def ping(self) -> None:
        async with self._client.trip() as redis:
            await redis.ping()


def _names(key_ids: Iterable[str]) -> list[str]:
    """The two of each."""
    return [name + key_id for key_id in key_ids for name in (ACCOUNT, LEASES)]


def _member(held: Held | None) -> str:
    return "" if held is None else f"{held.lease_id}:{held.tokens}"
