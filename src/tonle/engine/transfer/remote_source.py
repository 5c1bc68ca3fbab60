"""`RemoteSource`: blocks that another engine has computed and leases to a request of this one.

Does: fetch them over a connection, on a thread for each request, a few megabytes ahead of the loop that writes them. Does not:
try twice: whatever goes wrong, the rest of the prompt is computed here.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time

import torch

from tonle.engine.kv.block_copies import BlockCopies
from tonle.engine.request import RemoteBlocks, Request
from tonle.engine.transfer.leases import prompt_digest
from tonle.engine.transfer.wire import TAKEN, Ask, CacheLayout, Line, Told, WireError

log = logging.getLogger("tonle.engine")

NAME = "prefill server"
MAX_FETCHES = 64  # at a time; requests beyond that compute their prompts
PIECE_BYTES = 8 * 2**20  # received into one buffer
_PIECES_AHEAD = 4  # that the loop has not written yet
_CONNECT_S = 3.0


class RemoteSource:
    def __init__(self, copies: BlockCopies, layout: CacheLayout, *, timeout_s: float) -> None:
        self._copies = copies
        self._layout = layout
        self._timeout_s = timeout_s
        self._places = threading.Semaphore(MAX_FETCHES)

    def find(self, request: Request, digests: list[bytes], num_held: int) -> RemoteLoad | None:
        remote = request.remote
        if remote is None:
            return None
        count = min(len(digests), remote.num_blocks) - num_held
        load = RemoteLoad(self._copies, self._layout, request, num_held, max(0, count), self._timeout_s, self._places)
        if count > 0:
            return load
        load.begin()  # all of it is here: the other engine may free its blocks
        return None

    def close(self) -> None:
        """Fetches under way end with their loads."""


class RemoteLoad:
    """A `BlockLoad`."""

    name = NAME

    def __init__(
        self, copies: BlockCopies, layout: CacheLayout, request: Request, first: int, count: int, timeout_s: float,
        places: threading.Semaphore,
    ) -> None:  # fmt: skip
        self.num_blocks = count
        self.failure: str | None = None
        self.is_over = False
        self._copies = copies
        self._layout = layout
        self._request = request
        self._first = first
        self._timeout_s = timeout_s
        self._places = places
        self._pieces: queue.Queue[torch.Tensor] = queue.Queue(_PIECES_AHEAD)
        self._rest: torch.Tensor | None = None  # of a piece that was more than could be taken
        self._sock: socket.socket | None = None
        self._is_wanted = True

    def begin(self) -> None:
        if not self._places.acquire(blocking=False):
            self.failure, self.is_over = f"{MAX_FETCHES} others are being fetched", True
            return
        threading.Thread(target=self._run, name="tonle-kv-fetch", daemon=True).start()

    def take(self, most: int) -> torch.Tensor | None:
        piece, self._rest = self._rest, None
        if piece is None:
            try:
                piece = self._pieces.get_nowait()
            except queue.Empty:
                return None
        if len(piece) > most:
            self._rest = piece[most:]
        return piece[:most]

    def end(self, *, used: bool) -> None:
        self._is_wanted = False
        if not used and (sock := self._sock) is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes the thread

    # -- on its thread

    def _run(self) -> None:
        remote = self._request.remote
        assert remote is not None
        try:
            self._fetch(remote)
        except (OSError, WireError) as error:
            self.failure = f"{remote.host}:{remote.port}: {error}"
        except Exception as error:
            log.exception("KV blocks could not be fetched")
            self.failure = f"{type(error).__name__}: {error}"
        finally:
            self._places.release()
            self.is_over = True

    def _fetch(self, remote: RemoteBlocks) -> None:
        until_s = time.monotonic() + self._timeout_s
        if remote.tp_size != self._layout.tp_size:
            raise WireError(f"its model is on {remote.tp_size} devices, this one on {self._layout.tp_size}")
        with socket.create_connection((remote.host, remote.port), min(_CONNECT_S, self._timeout_s)) as sock:
            self._sock = sock
            line = Line(sock, until_s)
            line.send_frame(self._ask(remote))
            told = line.receive_frame(Told)
            if told.refusal:
                raise WireError(f"it refuses: {told.refusal[:500]}")
            if told.num_blocks != self.num_blocks:
                raise WireError(f"it sends {told.num_blocks} blocks, not {self.num_blocks}")
            self._receive(line)
            if self.num_blocks and self._is_wanted:
                line.send(TAKEN)

    def _ask(self, remote: RemoteBlocks) -> Ask:
        size, end, digest = self._layout.block_size, self._first + self.num_blocks, b""
        if self.num_blocks:
            digest = prompt_digest(self._request, end * size, size)
        return Ask(self._layout, remote.lease, remote.token, self._first, self.num_blocks, digest, remote.readers)

    def _receive(self, line: Line) -> None:
        at_once, left = max(1, PIECE_BYTES // self._copies.block_bytes), self.num_blocks
        while left and self._is_wanted:
            piece = self._copies.host_buffer(min(at_once, left))
            line.receive_into(piece.numpy().data.cast("B"))
            self._hand_over(piece, line)
            left -= len(piece)

    def _hand_over(self, piece: torch.Tensor, line: Line) -> None:
        """When the loop has taken earlier ones."""
        while self._is_wanted:
            try:
                self._pieces.put(piece, timeout=0.1)
                return
            except queue.Full:
                if time.monotonic() > line.until_s:
                    raise WireError("this engine did not take its blocks in time") from None
