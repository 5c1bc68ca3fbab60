"""`BlockServer`: sends leased blocks to the engines that fetch them. Threads of the engine's process; no event loop.

A connection that has not asked within a few seconds, or does not read, is closed; there are only so many at a time. Nothing that
comes in is trusted: the token of the lease is all that counts. Does not: touch the scheduler or write to the cache.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time

from tonle.engine.kv.block_copies import BlockCopies
from tonle.engine.transfer.leases import LeaseError, Leases
from tonle.engine.transfer.wire import TAKEN, Ask, CacheLayout, Line, Told, WireError
from tonle.errors import ConfigError

log = logging.getLogger("tonle.engine")

MAX_CONNECTIONS = 64
PIECE_BYTES = 8 * 2**20  # read from the cache at a time
_ASK_S = 5.0  # from the connection to its question
_MAX_READERS = 1024


def listen(host: str, port: int) -> socket.socket:
    """Raises `ConfigError`."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=MAX_CONNECTIONS)
    except OSError as error:
        raise ConfigError(
            f"keys and values cannot be offered at {host}:{port}: {error.strerror or error}. Give an address of this machine "
            "that the decoding servers reach (--kv-transfer-host) and a port that is free (--kv-transfer-port, 0 = any)",
            param="kv_transfer_host",
        ) from None


class BlockServer:
    def __init__(
        self, listener: socket.socket, leases: Leases, copies: BlockCopies, layout: CacheLayout, *, timeout_s: float
    ) -> None:
        """`timeout_s`: most that one connection may take. Serves from now on."""
        self.leases = leases
        self._listener = listener
        self._copies = copies
        self._layout = layout
        self._timeout_s = timeout_s
        self._places = threading.Semaphore(MAX_CONNECTIONS)
        self._is_closed = False
        threading.Thread(target=self._accept, name="tonle-kv-server", daemon=True).start()

    def close(self) -> None:
        """Connections under way end with the process, or at their deadline."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._listener.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                sock, address = self._listener.accept()
            except OSError as error:
                if not self._is_closed:
                    log.error("the server of KV blocks cannot accept connections: %s", error)
                    time.sleep(0.1)  # out of descriptors, most likely
                continue
            if not self._places.acquire(blocking=False):
                sock.close()
                log.warning(
                    "more than %d connections fetch KV blocks; one from %s is refused", MAX_CONNECTIONS, address[0]
                )
                continue
            threading.Thread(target=self._serve, args=(sock, address[0]), name="tonle-kv-send", daemon=True).start()

    def _serve(self, sock: socket.socket, peer: str) -> None:
        try:
            with sock:
                line = Line(sock, time.monotonic() + min(_ASK_S, self._timeout_s))
                ask = line.receive_frame(Ask)
                line.until_s = time.monotonic() + self._timeout_s
                self._answer(line, ask, peer)
        except (OSError, WireError) as error:
            log.warning("a connection from %s that fetches KV blocks is closed: %s", peer, error)
        except Exception:
            log.exception("KV blocks could not be sent to %s", peer)
        finally:
            self._places.release()

    def _answer(self, line: Line, ask: Ask, peer: str) -> None:
        try:
            if (difference := self._layout.difference(ask.layout)) is not None:
                raise LeaseError(f"its KV cache is another one: {difference}")
            blocks = self.leases.open(ask.lease, ask.token, ask.first, ask.count, ask.digest)
        except LeaseError as refusal:
            log.warning("KV blocks are refused to %s: %s", peer, refusal)
            line.send_frame(Told(refusal=str(refusal)))
            return
        try:
            line.send_frame(Told(len(blocks)))
            self._send(line, blocks)
            if blocks:
                line.receive_into(memoryview(bytearray(len(TAKEN))))
        finally:
            self.leases.close(ask.lease, min(max(1, ask.readers), _MAX_READERS))

    def _send(self, line: Line, blocks: list[int]) -> None:
        at_once = max(1, PIECE_BYTES // self._copies.block_bytes)
        room = self._copies.host_buffer(min(at_once, len(blocks)))
        for begin in range(0, len(blocks), at_once):
            piece = blocks[begin : begin + at_once]
            line.send(self._copies.read(piece, room[: len(piece)]).numpy().data.cast("B"))
