"""`Leases`: blocks of prompts that are computed and wait for the engine that fetches them.

The loop grants them and takes back what has ended; threads of the server open and close them. Does: names, tokens, moments, the
comparison of prompts. Does not: hold blocks (the scheduler does), or send them.
"""

from __future__ import annotations

import hmac
import secrets
import threading
from dataclasses import dataclass

from tonle.engine.kv.block_pool import block_digests, root_digest
from tonle.engine.request import KeptBlocks, Request

POLL_S = 0.005  # longest sleep of the loop while there are leases: one that was fetched ends soon
_ADAPTER_DIGEST_CHARS = 64  # of a request's salt, if it has an adapter


class LeaseError(Exception):
    """What was asked for is not there, or not for whom asks."""


def prompt_digest(request: Request, num_tokens: int, block_size: int) -> bytes:
    """Of the first tokens of a prompt, which are whole blocks, and of the adapter that computes them. The tenant is no part of
    it: what is computed is the same."""
    adapter = request.salt[:_ADAPTER_DIGEST_CHARS] if request.adapter else b""
    return block_digests(root_digest(adapter), request.prompt[:num_tokens], block_size)[-1]


@dataclass(slots=True)
class _Lease:
    handle: int
    request: Request
    blocks: list[int]
    token: str
    until_s: float
    num_open: int = 0  # connections that read it
    num_done: int = 0  # and those that have


class Leases:
    """`engine_id`, `host` and `port` tell others where its blocks are."""

    def __init__(self, *, block_size: int, duration_s: float, engine_id: str, host: str, port: int) -> None:
        self._block_size = block_size
        self._duration_s = duration_s
        self._engine_id, self._host, self._port = engine_id, host, port
        self._lock = threading.Lock()
        self._by_name: dict[str, _Lease] = {}
        self._ended: list[int] = []
        self.num_granted = self.num_fetched = self.num_expired = 0

    # -- on the loop's thread

    def __len__(self) -> int:
        return len(self._by_name) + len(self._ended)

    def grant(self, request: Request, blocks: list[int], now: float) -> KeptBlocks:
        """`blocks` are full, and stay as they are until `take_ended` gives the request's handle."""
        name, token = f"{request.handle}-{secrets.token_hex(8)}", secrets.token_urlsafe(32)
        lease = _Lease(request.handle, request, blocks, token, now + self._duration_s)
        with self._lock:
            self._by_name[name] = lease
            self.num_granted += 1
        return KeptBlocks(
            engine_id=self._engine_id, host=self._host, port=self._port, lease=name, token=token, blocks=blocks,
            num_tokens=len(blocks) * self._block_size,
        )  # fmt: skip

    def take_ended(self, now: float) -> list[int]:
        """Handles of leases that were fetched, or whose time is over; one that is being read is waited for."""
        with self._lock:
            late = [name for name, lease in self._by_name.items() if lease.until_s <= now and not lease.num_open]
            self.num_expired += len(late)
            ended = self._ended + [self._by_name.pop(name).handle for name in late]
            self._ended = []
        return ended

    # -- on threads of the server

    def open(self, name: str, token: str, first: int, count: int, digest: bytes) -> list[int]:
        """The blocks to read; `close` follows. Raises `LeaseError`."""
        with self._lock:
            lease = self._by_name.get(name)
            if lease is None or not hmac.compare_digest(lease.token.encode(), token.encode()):
                raise LeaseError("there is no such lease, or it has ended")
            lease.num_open += 1
        try:
            if first < 0 or count < 0 or first + count > len(lease.blocks):
                raise LeaseError(f"the lease has {len(lease.blocks)} blocks, not those from {first} to {first + count}")
            size = self._block_size
            if count and prompt_digest(lease.request, (first + count) * size, size) != digest:
                raise LeaseError("it is of another prompt; do both servers have the same tokenizer and chat template?")
        except LeaseError:
            self.close(name, 1)
            raise
        return lease.blocks[first : first + count]

    def close(self, name: str, readers: int) -> None:
        """A connection is over, however it went: nobody comes a second time. `readers`: as many as there are of them."""
        with self._lock:
            lease = self._by_name[name]
            lease.num_open -= 1
            lease.num_done += 1
            if lease.num_done >= readers and not lease.num_open:
                del self._by_name[name]
                self._ended.append(lease.handle)
                self.num_fetched += 1
