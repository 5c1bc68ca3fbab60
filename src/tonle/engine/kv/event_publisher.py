"""Sends batches of KV events over ZeroMQ, on a thread of its own.

Does: number batches, publish them (topic, number, payload), keep the latest ones and send them again to who asks. Does not: make
events (`kv_events.py`), or ever hold up a step: sockets of these kinds drop messages rather than wait for a peer.

A replay is asked for with an empty frame and the first wanted number (8 bytes, big-endian) from a DEALER or REQ socket. The
answers are (topic, number, payload), and at the end ("", -1, "").
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections import deque

import zmq

from tonle.config.kv_events import KvEventsConfig, is_listened_on
from tonle.engine.kv.kv_events import Event, encode
from tonle.errors import ConfigError

log = logging.getLogger("tonle.engine")

_REPLAY_S = 0.1  # longest wait of a replay request
_CLOSE_S = 1.0  # for batches that wait when the engine stops
_LINGER_MS = 200
_NUMBER_BYTES = 8
_END = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)


class EventPublisher:
    def __init__(self, config: KvEventsConfig) -> None:
        """Raises `ConfigError` if an address cannot be used."""
        assert config.endpoint is not None
        self._layout = config.layout
        self._topic = config.topic.encode()
        self._queue: queue.Queue[tuple[float, list[Event]] | None] = queue.Queue(config.max_queue_size)
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)  # number, payload
        self._number = 0
        self._closing = False
        self._context = zmq.Context()
        self._context.linger = _LINGER_MS
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self._pub = self._open(zmq.PUB, config.endpoint, config.hwm)
            if config.replay_endpoint is not None:
                self._replay = self._open(zmq.ROUTER, config.replay_endpoint, config.hwm)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self.endpoint = _address(self._pub)
        self.replay_endpoint = None if self._replay is None else _address(self._replay)
        log.info("KV events, with the token ids of prompts, go to %s", self.endpoint)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def put(self, ts: float, events: list[Event]) -> bool:
        try:
            self._queue.put_nowait((ts, events))
        except queue.Full:
            return False
        return True

    def close(self) -> None:
        """Send what waits, for a second at most."""
        self._closing = True
        with contextlib.suppress(queue.Full):  # then it has something to wake up for
            self._queue.put_nowait(None)
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self._context.destroy(linger=_LINGER_MS)

    def _open(self, kind: int, endpoint: str, hwm: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(hwm)
        try:
            if kind == zmq.ROUTER or is_listened_on(endpoint):
                socket.bind(endpoint)
            else:
                socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"kv_events_config: cannot use {endpoint}: {error.strerror}", param="kv_events_config"
            ) from None
        return socket

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except zmq.ZMQError:
            log.exception("KV events end here")

    def _turn(self) -> bool:
        """Send what waits. False: it is closed."""
        if self._replay is not None and self._replay.poll(0):
            self._send_again(self._replay, self._replay.recv_multipart())
        try:
            batch = self._queue.get(timeout=None if self._replay is None else _REPLAY_S)
        except queue.Empty:
            return not self._closing
        if batch is None:
            return False
        number = self._number.to_bytes(_NUMBER_BYTES, "big")
        self._number += 1
        payload = encode(*batch, self._layout)
        if self._replay is not None:
            self._sent.append((number, payload))
        self._pub.send_multipart((self._topic, number, payload))
        return not (self._closing and self._queue.empty())

    def _send_again(self, replay: zmq.Socket[bytes], request: list[bytes]) -> None:
        if len(request) != 3 or len(request[2]) != _NUMBER_BYTES:
            log.warning("a replay of KV events must be asked for with an empty frame and a number of 8 bytes")
            return
        peer, empty, first = request
        for number, payload in self._sent:
            if number >= first:
                replay.send_multipart((peer, empty, self._topic, number, payload))
        replay.send_multipart((peer, empty, b"", _END, b""))


def _address(socket: zmq.Socket[bytes]) -> str:
    """With the port that took the place of a *."""
    found = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(found, bytes)
    return found.rstrip(b"\0").decode()
