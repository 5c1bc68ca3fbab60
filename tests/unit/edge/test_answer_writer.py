"""Small writes of one turn leave together; much leaves at once, so that the sender learns that its caller does not keep up."""

from __future__ import annotations

import asyncio
from typing import Any

from tonle.edge.answer_writer import WRITE_BUFFER_BYTES, AnswerWriter


class Transport:
    def __init__(self) -> None:
        self.written: list[bytes] = []

    def set_write_buffer_limits(self, high: int) -> None: ...

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        self.written.append(data)


def test_what_is_written_in_one_turn_is_bounded() -> None:
    async def main() -> None:
        soon: list[Any] = []

        class Server:
            flush_soon = soon.append

        writer, transport = AnswerWriter(Server()), Transport()  # type: ignore[arg-type]
        writer.connection_made(transport)  # type: ignore[arg-type]
        writer.send(b"a")
        writer.send(b"b")
        assert not transport.written and soon == [writer]
        writer.send(bytes(WRITE_BUFFER_BYTES))
        assert [len(data) for data in transport.written] == [2 + WRITE_BUFFER_BYTES]
        writer.flush()
        assert len(transport.written) == 1

    asyncio.run(main())
