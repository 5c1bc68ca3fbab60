"""Replay from cache: may this request be answered by an answer given before, and is there one?

Does: decide, look up, wait for an identical request that is under way. Does not: compute or send.
"""

from __future__ import annotations

from tonle.cache import Cache, CachedResponse, cache_key, may_reuse
from tonle.gateway.parsed_request import ROUTERS
from tonle.gateway.stage_results import AcceptedRequest, CacheLookup
from tonle.protocol.media_paths import is_media

_YES, _NO = ("1", "true", "yes"), ("0", "false", "no")


class CachedReplies:
    """Without a cache, no request is looked up."""

    def __init__(self, cache: Cache | None, *, by_default: bool = True) -> None:
        """`by_default`: also for requests that do not ask for it, where they would get the same answer again."""
        self.cache = cache
        self._by_default = by_default

    def applies_to(self, accepted: AcceptedRequest) -> bool:
        if self.cache is None or is_media(accepted.call.path):  # media is large, and a form has no key here
            return False
        return _is_known(accepted) and _wanted(accepted, by_default=self._by_default)

    async def find(self, accepted: AcceptedRequest) -> CacheLookup:
        """Only for requests that `applies_to` accepts. May wait for an identical request to end."""
        assert self.cache is not None, "there is no cache to look into"
        key = cache_key(
            tenant=accepted.owner,
            path=accepted.call.path,
            model=accepted.model.entry.identity,
            body=accepted.request.body,
        )
        found = await self.cache.find(key)
        if isinstance(found, CachedResponse):
            return CacheLookup("hit", response=found)
        return CacheLookup("miss", flight=found)


def _is_known(accepted: AcceptedRequest) -> bool:
    """False for an adapter whose server does not tell its content: it may be replaced under its name."""
    entry = accepted.model.entry
    return not entry.parent or entry.adapter_digest is not None


def _wanted(accepted: AcceptedRequest, *, by_default: bool) -> bool:
    """What the caller says; else, by default, only requests that would get the same answer again."""
    body, exchange = accepted.request.body, accepted.call.exchange
    if ROUTERS in body:  # the answer says where a prompt is kept now
        return False
    asked = body.get("use_cache")
    if asked is None:
        header = exchange.header("x-use-cache").lower()
        asked = True if header in _YES else False if header in _NO else None
    if isinstance(asked, bool):
        return asked
    if not by_default:
        return False
    control = exchange.header("cache-control").lower()
    return "no-cache" not in control and "no-store" not in control and may_reuse(body)
