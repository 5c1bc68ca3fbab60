"""CachedReplies from cache: may this request be answered by an answer given before, and is there one?

Does: decide, look up, wait for an identical request that is under way, remember. Does not: compute or send.
"""

from __future__ import annotations

from tonle.cache import Answers, CachedResponse, Flight, may_reuse, response_name
from tonle.gateway.call import Call

_YES, _NO = ("1", "true", "yes"), ("0", "false", "no")


class CachedReplies:
    """With no cache, every request passes by."""

    def __init__(self, cache: Answers | None) -> None:
        self.cache = cache

    async def find(self, call: Call, identity: tuple[object, ...]) -> CachedResponse | Flight | None:
        """An answer; or a flight to land, if this is the request whose answer will be kept; or None: pass by."""
        if self.cache is None or not wanted(call):
            return None
        name = response_name(tenant=call.key.owner, path=call.path, model=identity, body=call.body)
        call.cache_state = "miss"
        found = await self.cache.find(name)
        if isinstance(found, CachedResponse):
            call.cache_state = "hit"
            call.cached_from = found.request_id
        return found


def wanted(call: Call) -> bool:
    """What the caller says, else only what would come out the same again."""
    asked = call.body.get("use_cache")
    if asked is None:
        header = call.exchange.header("x-use-cache").lower()
        asked = True if header in _YES else False if header in _NO else None
    if isinstance(asked, bool):
        return asked
    control = call.exchange.header("cache-control").lower()
    return "no-cache" not in control and "no-store" not in control and may_reuse(call.body)
