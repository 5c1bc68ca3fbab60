"""Answers that were given before, for requests that would get the same again.

Does: name requests exactly, keep answers (least recently used goes first, and all after a while), let identical
requests that run together share one computation. In memory (`ResponseCache`), or in a Redis that several gateways share
(`redis_cache.RedisCache`, imported only where it is used). Does not: know HTTP, keys or backends; decide who may see what: the
tenant is part of every name, so nobody ever finds another's answer.
Runs: on one event loop.

    cache = ResponseCache(max_size=1000, ttl_seconds=3600)
    name = response_name(tenant="key-1", path="/v1/chat/completions", model=("qwen", None), body=body)
    entry = cache.get(name)
"""

from tonle.cache.answers import Answers, CacheStats
from tonle.cache.flight import CachedResponse, Flight
from tonle.cache.name import may_reuse, response_name
from tonle.cache.response_cache import ResponseCache

__all__ = ["Answers", "CacheStats", "CachedResponse", "Flight", "ResponseCache", "may_reuse", "response_name"]
