"""A server on a thread of its own, for tests that speak to it over plain sockets; replies are parsed by h11."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import h11

from tonle.edge.exchange import Exchange
from tonle.edge.listening import bind
from tonle.edge.server import CheckHead, HttpServer, ServerLimits
from tonle.errors import TonleError

WAIT_S = 120.0  # a test that waits longer has failed

ResultT = TypeVar("ResultT")


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes
    interim: list[int] = field(default_factory=list)  # 1xx before it


class Handler:
    """Answers by path, and keeps what it was asked."""

    def __init__(self) -> None:
        self.seen: list[Exchange] = []
        self.cancelled: list[str] = []  # paths
        self.blocking = False
        self.tidied = False  # a cancelled /tidy has done what it had left to do
        self.gate = threading.Event()  # lets /wait and /wait-stream go on

    @property
    def paths(self) -> list[str]:
        return [exchange.path for exchange in self.seen]

    async def __call__(self, exchange: Exchange) -> None:
        self.seen.append(exchange)
        try:
            await self._answer(exchange)
        except asyncio.CancelledError:
            self.cancelled.append(exchange.path)
            if exchange.path == "/tidy":
                await self._wait()
                self.tidied = True
            raise

    async def _answer(self, exchange: Exchange) -> None:
        path = exchange.path
        if isinstance(exchange.refusal, TonleError):
            exchange.reply(exchange.refusal.message.encode(), status=exchange.refusal.status)
        elif path == "/fail":
            raise ZeroDivisionError("on purpose")
        elif path.startswith("/status/"):
            exchange.reply(b"body", status=int(path.removeprefix("/status/")))
        elif path.startswith(("/stream", "/wait-stream", "/wait-before-stream", "/break", "/large-stream")):
            await self._stream(exchange, path)
        elif path == "/wait-sound":
            exchange.start(content_type="audio/wav")
            exchange.write(b"RIFF")
            await self._wait()
            exchange.write(b"xxx")
            exchange.end()
        elif path.startswith("/large"):
            exchange.reply(b"x" * 4_000_000)
        elif path == "/header":
            exchange.reply(b"", headers=[("x-echo", exchange.query), ("x-body", exchange.body.decode("latin-1"))])
        else:
            if path in ("/wait", "/tidy"):
                await self._wait()
            if path.startswith("/turns/"):
                for _ in range(int(path.removeprefix("/turns/")) % 4):
                    await asyncio.sleep(0)
            exchange.reply(path.encode() + b" " + exchange.body)
            if path == "/block-after":  # the event loop does not turn
                self.blocking = True
                self.gate.wait(WAIT_S)

    async def _stream(self, exchange: Exchange, path: str) -> None:
        exchange.start(content_type="text/event-stream")
        if path == "/wait-before-stream":
            await self._wait()
        for index in range(5):
            exchange.write(b"data: %d\n\n" % index)
            await asyncio.sleep(0)
        if path == "/break":
            raise ZeroDivisionError("on purpose")
        if path == "/wait-stream":
            await self._wait()
        if path == "/stream-slowly":
            for _ in range(int(WAIT_S / 0.01)):
                exchange.write(b"data: x\n\n")
                await asyncio.sleep(0.01)
        if path == "/large-stream":
            for _ in range(4000):
                exchange.write(b"x" * 4096)
                await exchange.drained()
                await asyncio.sleep(0)
        exchange.write(b"data: [DONE]\n\n")
        exchange.end()

    async def _wait(self) -> None:
        for _ in range(int(WAIT_S / 0.005)):
            if self.gate.is_set():
                return
            await asyncio.sleep(0.005)


class RunningServer:
    def __init__(self, server: HttpServer, handler: Handler, loop: asyncio.AbstractEventLoop, port: int) -> None:
        self.server, self.handler, self.loop, self.port = server, handler, loop, port
        self.blocking, self.unblock = False, threading.Event()

    async def block(self) -> None:
        """Its event loop, as if it computed, until `unblock`."""
        self.blocking = True
        self.unblock.wait(WAIT_S)

    def connect(self, *, receive_bytes: int | None = None) -> socket.socket:
        caller = socket.socket()
        if receive_bytes is not None:
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        caller.settimeout(WAIT_S)
        caller.connect(("127.0.0.1", self.port))
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return caller

    def call(self, function: Callable[[], ResultT]) -> ResultT:
        """In the server's thread."""

        async def within() -> ResultT:
            return function()

        return asyncio.run_coroutine_threadsafe(within(), self.loop).result(WAIT_S)

    def start(self, work: Awaitable[Any]) -> Any:
        async def within() -> Any:
            return await work

        return asyncio.run_coroutine_threadsafe(within(), self.loop)

    def send(self, data: bytes) -> bytes:
        """All that comes back until the server closes. The caller says itself that it sends no more only after that."""
        with self.connect() as caller:
            with contextlib.suppress(ConnectionError):  # refused while we send
                caller.sendall(data)
            return read_to_end(caller)

    def ask(self, data: bytes, *methods: str) -> list[Reply]:
        return replies(self.send(data), *methods)

    def until_alone(self) -> None:
        """No connection is left."""
        until(lambda: self.call(lambda: not self.server.connections), "a connection stayed open")


def read_to_end(caller: socket.socket) -> bytes:
    received = b""
    while piece := caller.recv(65536):
        received += piece
    return received


def until(condition: Callable[[], object], what: str) -> None:
    for _ in range(int(WAIT_S / 0.01)):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError(what)


def replies(data: bytes, *methods: str) -> list[Reply]:
    """`data`, the whole of what a server sent, read by h11. `methods`: of the requests, GET where none is given.

    A reply that h11 refuses or that is broken off raises."""
    found: list[Reply] = []
    methods = methods or ("GET",)
    while data:
        client = h11.Connection(h11.CLIENT)
        method = methods[min(len(found), len(methods) - 1)]
        client.send(h11.Request(method=method, target="/", headers=[("host", "x"), ("content-length", "0")]))
        client.send(h11.EndOfMessage())
        client.receive_data(data)
        reply, interim, closed = Reply(0, {}, b""), [], False
        while not isinstance(event := client.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.InformationalResponse):
                interim.append(event.status_code)
            elif isinstance(event, h11.Response):
                headers = {name.decode(): value.decode("latin-1") for name, value in event.headers}
                reply = Reply(event.status_code, headers, b"", interim)
            elif isinstance(event, h11.Data):
                reply.body += event.data
            elif closed:
                raise AssertionError(f"h11 waits for more than {data!r}: {event}")
            else:
                closed = True
                client.receive_data(b"")
        found.append(reply)
        data = b"" if closed else client.trailing_data[0]
    return found


LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
try:
    import uvloop

    LOOPS["uvloop"] = uvloop.new_event_loop
except ImportError:
    pass


@contextlib.contextmanager
def running_server(
    loop: str = "uvloop",
    *,
    tls: ssl.SSLContext | None = None,
    check_head: CheckHead | None = None,
    **limits: Any,
) -> Iterator[RunningServer]:
    handler, ready, stop = Handler(), threading.Event(), asyncio.Event()
    place: list[RunningServer] = []

    async def serve() -> None:
        server = HttpServer(handler, ServerLimits(**limits), check_head=check_head)
        listener = bind("127.0.0.1", 0)
        port = listener.getsockname()[1]
        await server.start(listener, tls=tls)
        place.append(RunningServer(server, handler, asyncio.get_running_loop(), port))
        ready.set()
        await stop.wait()
        await server.stop(drain_s=0.1)

    def run() -> None:
        with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(WAIT_S)
    try:
        yield place[0]
    finally:
        handler.gate.set()
        place[0].loop.call_soon_threadsafe(stop.set)
        thread.join(WAIT_S)
        assert not thread.is_alive()
