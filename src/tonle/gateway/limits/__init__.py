"""Charge: how much a key may ask for. Requests and tokens per minute, requests at once, tokens per day.

Does: count, say when to come back. Does not: know keys' secrets or where a request goes.

`Ledger` counts in memory, for one gateway. `SharedLedger` counts in a `Book` on a server (Redis or PostgreSQL), for all
gateways that use it. A request is charged when it comes and settled when it has ended, whichever it is.
"""
