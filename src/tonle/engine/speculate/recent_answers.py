"""`RecentAnswers`: what was answered lately, by tenant. Guesses for a request come from its own tenant's answers and no others:
whether a guess was right shows in the time an answer takes.

Does: keep, find, drop the oldest. Does not: know requests by more than the salt that separates tenants (and adapters) in the
prefix cache, too.
"""

from __future__ import annotations

from collections import OrderedDict

from tonle.engine.speculate.text_index import Match, TextIndex

_MAX_TENANT = 32_768  # tokens of one tenant,
_MAX_ALL = 262_144  # and of all: some 40 MB, up to 50 where very many tenants have short answers


class TenantAnswers:
    """Two indexes: when the newer one holds half of what there may be, it becomes the older one, whose answers are dropped."""

    def __init__(self, max_tokens: int) -> None:
        self._most = max_tokens // 2
        self._newer, self._older = TextIndex(), TextIndex()

    def __len__(self) -> int:
        return len(self._newer) + len(self._older)

    def add(self, answer: list[int]) -> None:
        answer = answer[-self._most :]
        if len(self._newer) + len(answer) > self._most:
            self._older, self._newer = self._newer, TextIndex()
        self._newer.extend(answer)
        self._newer.end_text()

    def find(self, text: list[int]) -> Match | None:
        newer, older = self._newer.find(text), self._older.find(text)
        return newer if older is None or (newer is not None and newer.length >= older.length) else older


class RecentAnswers:
    def __init__(self, max_tenant: int = _MAX_TENANT, max_all: int = _MAX_ALL) -> None:
        self._max_tenant, self._max_all = max_tenant, max_all
        self._tenants: OrderedDict[bytes, TenantAnswers] = OrderedDict()  # the one that was used last is last
        self._num_tokens = 0

    def __len__(self) -> int:
        """Tokens of all tenants."""
        return self._num_tokens

    def of(self, salt: bytes) -> TenantAnswers | None:
        """Of one tenant; None: it has had no answer yet, or none lately."""
        if (found := self._tenants.get(salt)) is not None:
            self._tenants.move_to_end(salt)
        return found

    def add(self, salt: bytes, answer: list[int]) -> None:
        tenant = self._tenants.get(salt)
        if tenant is None:
            tenant = self._tenants[salt] = TenantAnswers(self._max_tenant)
        self._tenants.move_to_end(salt)
        self._num_tokens -= len(tenant)
        tenant.add(answer)
        self._num_tokens += len(tenant)
        while self._num_tokens > self._max_all and len(self._tenants) > 1:
            _, oldest = self._tenants.popitem(last=False)
            self._num_tokens -= len(oldest)
