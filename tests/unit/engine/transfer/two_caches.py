"""Two KV caches in one process, one of which leases blocks to the other over a real connection."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from tonle.engine.kv.block_copies import BlockCopies
from tonle.engine.kv.incoming import Incoming
from tonle.engine.request import KeptBlocks, RemoteBlocks, Request, ResolvedConfig
from tonle.engine.transfer.block_server import BlockServer, listen
from tonle.engine.transfer.leases import Leases
from tonle.engine.transfer.remote_source import RemoteSource
from tonle.engine.transfer.wire import CacheLayout
from tonle.models.inputs import KVCache

BLOCK, BLOCKS = 4, 64
PROMPT = [(7 * i) % 50 for i in range(BLOCK * 20 + 1)]


def cache(*, filled: bool) -> KVCache:
    kv = KVCache(num_layers=2, num_blocks=BLOCKS, block_size=BLOCK, num_kv_heads=2, head_dim=8, dtype=torch.float32,
                 device=torch.device("cpu"))  # fmt: skip
    if filled:
        kv.k.normal_()
        kv.v.normal_()
    return kv


def layout(kv: KVCache, **changes: object) -> CacheLayout:
    fields = {"model": "m", "dtype": "float32", "block_size": BLOCK, "num_layers": 2, "num_kv_heads": 2, "head_dim": 8,
              "block_bytes": BlockCopies(kv).block_bytes}  # fmt: skip
    return CacheLayout(**{**fields, **changes})  # type: ignore[arg-type]


@dataclass
class Ended:
    """What the scheduler was told: handle -> blocks that came."""

    loaded_blocks: dict[int, int] = field(default_factory=dict)

    def loaded(self, handle: int, num_blocks: int) -> None:
        self.loaded_blocks[handle] = num_blocks


class Leasing:
    """The engine that computed prompts."""

    def __init__(self, *, duration_s: float = 30.0, timeout_s: float = 5.0) -> None:
        self.kv = cache(filled=True)
        listener = listen("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        self.leases = Leases(block_size=BLOCK, duration_s=duration_s, engine_id="e", host="127.0.0.1", port=self.port)
        self.server = BlockServer(listener, self.leases, BlockCopies(self.kv), layout(self.kv), timeout_s=timeout_s)

    def grant(self, blocks: list[int], handle: int = 1) -> KeptBlocks:
        return self.leases.grant(_request(handle), blocks, time.monotonic())

    def ended(self) -> list[int]:
        """Handles of leases that have ended, once there is one."""
        for _ in range(24_000):
            if found := self.leases.take_ended(time.monotonic()):
                return found
            time.sleep(0.005)
        raise AssertionError("no lease ends")

    def close(self) -> None:
        self.server.close()


class Fetching:
    """The engine that fetches."""

    def __init__(self, *, timeout_s: float = 5.0, **layout_changes: object) -> None:
        self.kv = cache(filled=False)
        copies = BlockCopies(self.kv)
        self.source = RemoteSource(copies, layout(self.kv, **layout_changes), timeout_s=timeout_s)
        self.ended = Ended()
        self.incoming = Incoming(copies, [self.source], self.ended, timeout_s=timeout_s)

    def fetch(self, kept: KeptBlocks, into: list[int], *, held: int = 0, handle: int = 5, **changes: object) -> int:
        """How many blocks came."""
        if not self.begin(kept, into, held=held, handle=handle, **changes):
            return 0
        return self.wait(handle)

    def begin(self, kept: KeptBlocks, into: list[int], *, held: int = 0, handle: int = 5, **changes: object) -> bool:
        fields = {"host": kept.host, "port": kept.port, "lease": kept.lease, "token": kept.token,
                  "num_blocks": len(kept.blocks)}  # fmt: skip
        prompt = changes.pop("prompt", PROMPT)
        remote = RemoteBlocks(**{**fields, **changes})  # type: ignore[arg-type]
        request = _request(handle, remote, prompt)  # type: ignore[arg-type]
        digests = [b""] * ((len(request.prompt) - 1) // BLOCK)
        found = self.incoming.find(request, digests, held)
        if found is not None:
            self.incoming.begin(handle, found, into[: found.num_blocks])
        return found is not None

    def wait(self, handle: int) -> int:
        for _ in range(60_000):
            self.incoming.advance()
            if handle in self.ended.loaded_blocks:
                return self.ended.loaded_blocks.pop(handle)
            time.sleep(0.002)
        raise AssertionError("the load does not end")


def same(one: KVCache, blocks: list[int], other: KVCache, into: list[int]) -> bool:
    return bool(torch.equal(one.k[:, blocks], other.k[:, into]) and torch.equal(one.v[:, blocks], other.v[:, into]))


def _request(handle: int, remote: RemoteBlocks | None = None, prompt: list[int] = PROMPT) -> Request:
    return Request(handle=handle, prompt=prompt, config=ResolvedConfig(), remote=remote, salt=b"tenant %d" % handle)
