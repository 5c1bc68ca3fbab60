"""`Source`: something that knows which backends there should be, and notices when that changes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from tonle.config.routing import BackendConfig
from tonle.errors import CapacityError


class SourceLost(CapacityError):  # noqa: N818 - as StoreLost
    """The source cannot be read for now. What it found last stays; it is asked again after a while."""

    code = "source_lost"


class Source(Protocol):
    """One place to look for backends. Each backend it finds needs a name that stays the same for as long as it runs."""

    name: str  # in logs and in GET /admin/backends, such as `kubernetes default/my-model`; two sources never share one

    def watch(self) -> AsyncIterator[Sequence[BackendConfig]]:
        """Yields the whole set of wanted backends: at once, then whenever it has changed, until it is closed.

        An empty set is an order to remove all. A source that cannot tell raises `SourceLost` with the reason, which is logged;
        then, and if it ends, it is begun again after a pause that doubles up to half a minute.
        """
        ...
