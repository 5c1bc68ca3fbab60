"""Which KV blocks backends have, by what they say themselves: their KV events, in vLLM's layout (docs/scale.md).

Does: subscribe on a thread of its own, keep a set of blocks per backend. Does not: know prompts (`policies.py` does), or ask for
what it missed: after a gap it begins again with nothing, so that it knows too few blocks rather than some that are gone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

import msgspec

from tonle.errors import ConfigError

log = logging.getLogger("tonle.gateway")

_MAX_BLOCKS = 1_000_000  # of one backend that are remembered; about 100 MB
MAX_MESSAGE_BYTES = 16 * 1024**2  # of one batch
_POLL_MS = 200  # longest wait of `close`
_DEVICE = ("GPU", None)  # the memory that requests find blocks in at once


def short_hash(block_hash: bytes | int) -> int:
    """Of a block, as it is kept here: its last 8 bytes."""
    return block_hash & (2**64 - 1) if isinstance(block_hash, int) else int.from_bytes(block_hash[-8:], "big")


class HeldBlocks:
    def __init__(self, endpoints: Mapping[str, str]) -> None:
        """`endpoints`: of the PUB sockets, by backend; none: nobody is listened to. Raises `ConfigError`."""
        self._blocks: dict[str, set[int]] = {name: set() for name in endpoints}
        self._heard: dict[str, int] = {}  # the number of its last batch
        self._closing = False
        self._sockets: Any = None  # zmq's context
        self._poller: Any = None
        self._names: dict[Any, str] = {}  # by socket
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        if endpoints:
            self._open(endpoints)

    def _open(self, endpoints: Mapping[str, str]) -> None:
        try:
            import zmq
        except ImportError:
            raise ConfigError(
                "kv_events of a backend needs the package pyzmq: pip install 'tonle[kv-events]'"
            ) from None
        self._sockets, self._poller = zmq.Context(), zmq.Poller()
        for name, endpoint in endpoints.items():
            socket = self._sockets.socket(zmq.SUB)
            socket.subscribe(b"")
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)  # of a larger one the connection is closed
            try:
                socket.connect(endpoint)
            except zmq.ZMQError as error:
                self._sockets.destroy(linger=0)
                raise ConfigError(f"kv_events of backend {name}: cannot connect to {endpoint!r}: {error}") from None
            self._poller.register(socket, zmq.POLLIN)
            self._names[socket] = name

    def start(self) -> None:
        if self.is_on:
            self._thread.start()

    @property
    def is_on(self) -> bool:
        return bool(self._names)

    def tells(self, backend: str) -> bool:
        """Whether it has said anything yet."""
        return backend in self._heard

    def has(self, backend: str, block: int) -> bool:
        """`block`: a `short_hash`."""
        return block in self._blocks.get(backend, ())

    def num_blocks(self, backend: str) -> int:
        return len(self._blocks[backend])

    def close(self) -> None:
        self._closing = True
        if self._thread.is_alive():
            self._thread.join()
        if self._sockets is not None:
            self._sockets.destroy(linger=0)

    def _run(self) -> None:
        while not self._closing:
            for socket, _ in self._poller.poll(_POLL_MS):
                name = self._names[socket]
                try:
                    self.take(name, socket.recv_multipart())
                except Exception as error:  # a server may say anything; what it meant is missing now
                    self._blocks[name].clear()
                    log.debug("KV events of %s cannot be read: %s", name, error)

    def take(self, backend: str, frames: list[bytes]) -> None:
        """One message: topic, number, batch."""
        _, number_bytes, payload = frames
        number, blocks = int.from_bytes(number_bytes, "big"), self._blocks[backend]
        if number != self._heard.get(backend, -1) + 1:  # it was started again, or some were missed
            blocks.clear()
        self._heard[backend] = number
        for event in msgspec.msgpack.decode(payload)[1]:
            name, hashes, medium = _read(event)
            if name == "AllBlocksCleared":
                blocks.clear()
            elif medium in _DEVICE and name == "BlockStored":
                blocks.update(map(short_hash, hashes[: _MAX_BLOCKS - len(blocks)]))
            elif medium in _DEVICE and name == "BlockRemoved":
                blocks.difference_update(map(short_hash, hashes))


def _read(event: Any) -> tuple[str, list[Any], str | None]:
    """Name, hashes and medium of an event, an array or a map."""
    if isinstance(event, dict):
        return event["type"], event.get("block_hashes", []), event.get("medium")
    place = 6 if event[0] == "BlockStored" else 2
    return event[0], event[1] if len(event) > 1 else [], event[place] if len(event) > place else None
