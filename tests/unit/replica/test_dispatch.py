"""What the gateway's side of a replica can rely on."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest

from tonle.edge.buffered_reply import BufferedReply
from tonle.replica import dispatch
from tonle.replica.dispatch import COMPUTING, ReplicaTransport
from tonle.replica.endpoints import EndpointReply


class NotingReply(BufferedReply):
    is_attached = False

    def attach(self, press: Callable[[bool], None]) -> None:
        self.is_attached = True


@pytest.mark.parametrize("path", sorted(COMPUTING))
def test_requests_that_are_computed_as_a_whole_are_told_to_cost_something(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what was attached is charged to its key (`gateway/attempt.py`)."""

    async def reply(*_: Any) -> EndpointReply:
        return EndpointReply(b"{}")

    monkeypatch.setitem(dispatch.COMPUTING, path, reply)
    replica: Any = None
    sink = NotingReply()
    sending = ReplicaTransport(replica).send("POST", path, b"{}", {}, sink, first_s=math.inf, silence_s=math.inf)
    asyncio.run(sending)
    assert (sink.status, sink.is_attached) == (200, True)
