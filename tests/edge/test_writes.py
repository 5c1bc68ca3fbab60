"""The contract of writes: what is written in one turn of the event loop leaves in one write, in order."""

from __future__ import annotations

import asyncio

from tests.edge.wire import connect, feed
from tests.gateway.running_gateway import run
from tonle.edge.exchange import Exchange

GET = b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n"


def test_what_is_written_in_one_turn_leaves_in_one_write() -> None:
    async def handle(exchange: Exchange) -> None:
        exchange.start(content_type="text/plain")
        for turn in range(3):
            exchange.write(b"a%d" % turn)
            exchange.write(b"b%d" % turn)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        exchange.write(b"last")
        exchange.end()

    async def main() -> None:
        connection, wire = connect(handle)
        connection.data_received(GET % 0)
        for _ in range(20):
            await asyncio.sleep(0)
        head, _, first = wire.writes[0].partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n") and first == b"2\r\na0\r\n2\r\nb0\r\n"
        assert wire.writes[1:] == [b"2\r\na1\r\n2\r\nb1\r\n", b"2\r\na2\r\n2\r\nb2\r\n", b"4\r\nlast\r\n0\r\n\r\n"]

    run(main())


def test_close_follows_what_was_written() -> None:
    _, wire = feed(b"GET /a HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    (written,) = wire.writes  # Wire refuses a write after close
    assert written.endswith(b"\r\n\r\n{}") and wire.closed


def test_close_in_the_turn_of_the_write_loses_nothing() -> None:
    async def handle(exchange: Exchange) -> None:
        exchange.start(content_type="text/plain")
        exchange.write(b"a")
        exchange.write(b"b")
        raise ZeroDivisionError("on purpose")

    async def main() -> None:
        connection, wire = connect(handle)
        connection.data_received(GET % 0)
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(wire.writes) == 1 and wire.writes[0].endswith(b"1\r\na\r\n1\r\nb\r\n") and wire.closed

    run(main())


def test_nothing_is_written_after_close() -> None:
    async def handle(exchange: Exchange) -> None:
        exchange.start(content_type="text/plain")
        exchange.write(b"a")
        connection.close()
        exchange.write(b"b")
        exchange.end()

    async def main() -> None:
        nonlocal connection
        connection, wire = connect(handle)
        connection.data_received(GET % 0)
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(wire.writes) == 1 and wire.writes[0].endswith(b"1\r\na\r\n")

    connection = None
    run(main())


def test_one_begins_when_the_one_before_has_ended_though_another_arrives_between() -> None:
    """Bytes may come after an answer has ended and before the event loop turns, as they do on uvloop."""
    begun: list[str] = []

    async def handle(exchange: Exchange) -> None:
        begun.append(exchange.path)
        if exchange.path == "/0":
            for _ in range(3):
                await asyncio.sleep(0)
        exchange.reply(exchange.path.encode())
        if exchange.path == "/0":
            connection.data_received(GET % 2)

    async def main() -> None:
        nonlocal connection
        connection, wire = connect(handle)
        connection.data_received(GET % 0 + GET % 1)
        for _ in range(20):
            await asyncio.sleep(0)
        assert begun == ["/0", "/1", "/2"]
        answered = b"".join(wire.writes)
        assert answered.index(b"\r\n\r\n/0") < answered.index(b"\r\n\r\n/1") < answered.index(b"\r\n\r\n/2")

    connection = None
    run(main())


def test_a_burst_of_requests_is_not_parsed_ahead_without_limit() -> None:
    async def handle(exchange: Exchange) -> None:
        await gate.wait()
        exchange.reply(b"{}")

    async def main() -> None:
        nonlocal gate
        gate = asyncio.Event()
        connection, wire = connect(handle)
        connection.data_received((GET % 0) * 5000)
        assert len(connection._queue) < 500 and not wire.reading
        gate.set()
        for _ in range(30_000):
            await asyncio.sleep(0)
            if connection.idle and not connection._unsent:
                break
        assert wire.reading
        assert b"".join(wire.writes).count(b"HTTP/1.1 200 OK") == 5000

    gate = asyncio.Event()
    run(main())
