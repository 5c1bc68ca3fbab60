"""Charge: how much a key may ask for. Requests and tokens per minute, requests at once, tokens per day.

Does: count, and say when to try again. Does not: know keys' secrets or where a request goes.

`MemoryLimiter` counts in memory, for one gateway. `SharedLimiter` counts on a server (Redis or PostgreSQL) through
`SharedCounts`, for all gateways that use it. A request is charged when it arrives and settled when it has ended.
"""
