"""KeyLimits in PostgreSQL: functions of `postgres.sql`, each one statement and so one transaction.

The arithmetic is that of `memory_limiter.py`; that file explains it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from tonle.gateway.api_keys.key import KeyLimits
from tonle.gateway.limits.limiter import LimitName
from tonle.gateway.limits.shared_counts import Held, OverLimit, Settlement
from tonle.gateway.postgres import Postgres


class PostgresCounts:
    """Owns `tonle_accounts` and `tonle_leases`; the connections are shared with the keys."""

    def __init__(self, server: Postgres) -> None:
        self.place = server.place
        self._server = server

    async def charge(self, held: Held, limits: KeyLimits, *, lease_s: float) -> OverLimit | None:
        ((name, wait_s),) = await self._server.fetch(
            "SELECT * FROM tonle_charge($1, $2, $3, $4, $5, $6, $7, $8)",
            held.lease_id, held.key_id, held.tokens, lease_s, limits.requests_per_minute, limits.tokens_per_minute,
            limits.max_concurrent, limits.tokens_per_day,
        )  # fmt: skip
        return None if name is None else OverLimit(cast(LimitName, name), wait_s)

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        await self._server.fetch(
            "SELECT tonle_settle($1, $2, $3)",
            ["" if each.held is None else each.held.lease_id for each in settlements],
            [each.key_id for each in settlements],
            [each.used for each in settlements],
        )

    async def renew(self, held: Sequence[Held], *, lease_s: float) -> None:
        columns = [[getattr(each, name) for each in held] for name in ("lease_id", "key_id", "tokens")]
        await self._server.fetch("SELECT tonle_renew($1, $2, $3, $4)", *columns, lease_s)

    async def used_today(self, key_ids: Iterable[str]) -> dict[str, int]:
        rows = await self._server.fetch(
            "SELECT key_id, used FROM tonle_accounts WHERE key_id = ANY ($1) AND day = tonle_today()", list(key_ids)
        )
        return dict(rows)

    async def ping(self) -> None:
        await self._server.fetch("SELECT 1")
