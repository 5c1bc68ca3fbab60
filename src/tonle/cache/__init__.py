"""The response cache: stored responses for requests that would get the same answer again.

Does: derive a key from a request, store responses, evict them, and let identical requests that run at the same time share
one computation. In memory (`ResponseCache`), or in a Redis that several gateways share (`redis_cache.RedisCache`, imported only
when used). Does not: know HTTP, API keys or backends. The tenant is part of every cache key, so tenants never see each
other's responses.
Runs: on one event loop.

    cache = ResponseCache(max_size=1000, ttl_seconds=3600)
    key = cache_key(tenant="key-1", path="/v1/chat/completions", model=("qwen", None), body=body)
    found = await cache.find(key)
    if isinstance(found, Flight):
        found.land(await compute())  # also wakes identical requests
"""

from tonle.cache.cache_key import cache_key, may_reuse
from tonle.cache.cache_store import Cache, CachedResponse, CacheStats, Flight
from tonle.cache.response_cache import ResponseCache

__all__ = ["Cache", "CacheStats", "CachedResponse", "Flight", "ResponseCache", "cache_key", "may_reuse"]
