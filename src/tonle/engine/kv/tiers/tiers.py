"""`KvTiers`: blocks evicted from the device go to host memory, from there to disk, and at once to a store that engines share; a
prompt whose beginning is found in one of them is not computed again.

Does: copy blocks out before a step overwrites them, keep them on a thread of its own, bring them back on others. Does not: ever
hold up a step for a disk or a network: what cannot be kept in time is dropped, what cannot be found in time is computed.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import torch

from tonle.engine.kv.block_copies import BlockCopies, PendingRead
from tonle.engine.kv.block_pool import BlockPool
from tonle.engine.kv.tiers.host_memory import HostMemory
from tonle.engine.kv.tiers.tier import Tier, TierCounts, timed_load, timed_save
from tonle.engine.request import Request

log = logging.getLogger("tonle.engine")

_MAX_PENDING_BYTES = 512 * 2**20  # copied out and not kept yet
_BLOCKS_AT_ONCE = 16  # handed over together
_READERS = 4
PIECES_AHEAD = 4  # of a load, that the loop has not written yet
_WAIT_S, _PATIENCE_S = 0.001, 30.0  # before a reader looks again whether it has, and before it gives up
_KNOWN_HITS = 32  # blocks of a tier, after which its speed counts
_TRY_EVERY = 64  # lookups, of which one asks every tier, to see whether slow ones still are
_CLOSE_S = 5.0


class TierLoad:
    """Blocks on their way back."""

    name = "tiers"
    failure: str | None = None  # fewer than hoped for is no failure: they are computed

    def __init__(self, tiers: KvTiers, keys: list[bytes], asked: list[Tier]) -> None:
        self.asked = asked  # in this order
        self.num_blocks = len(keys)
        self.is_over = False
        self.keys = keys
        self.is_dropped = False
        self.ready: deque[torch.Tensor] = deque()
        self._tiers = tiers

    def begin(self) -> None:
        self._tiers.read(self)

    def take(self, most: int) -> torch.Tensor | None:
        if not self.ready:
            return None
        data = self.ready.popleft()
        if len(data) > most:
            self.ready.appendleft(data[most:])
        return data[:most]

    def end(self, *, used: bool) -> None:
        self.is_dropped = True

    def wait_for_room(self) -> bool:
        """On a thread that reads: until the loop has taken earlier pieces. False: it does not, or wants no more."""
        ends_s = time.monotonic() + _PATIENCE_S
        while len(self.ready) >= PIECES_AHEAD:
            if self.is_dropped or time.monotonic() > ends_s:
                return False
            time.sleep(_WAIT_S)
        return not self.is_dropped


class KvTiers:
    """The methods are for the loop's thread, but for those that say otherwise."""

    def __init__(
        self,
        pool: BlockPool,
        copies: BlockCopies,
        namespace: Callable[[int], bytes],
        memory: HostMemory | None,
        disk: Tier | None,
        shared: Tier | None,
        *,
        block_size: int,
        min_blocks: int = 2,
    ) -> None:
        """`namespace`: 16 bytes that name the model and its kernels, by how often those have changed since the start.
        `min_blocks`: fewer are computed."""
        # What a prompt token costs to compute, at most; 0: not known
        self.seconds_per_token: Callable[[], float] = lambda: 0.0
        self.num_dropped = 0  # blocks that were not kept, for the thread that keeps them was behind
        self.copies = copies
        self._pool = pool
        pool.just_evicted = []
        self._namespace_of = namespace
        self._namespace = b""
        self._memory = memory
        self._disk = disk
        self._shared = shared
        self._block_size = block_size
        self._min_blocks = min_blocks
        # A block on its way from memory to disk: memory may be cleared meanwhile.
        self._leaving = memoryview(bytearray(copies.block_bytes))
        self._tiers: list[Tier] = [tier for tier in (memory, disk, shared) if tier is not None]
        self._num_lookups = 0
        self._pending: queue.SimpleQueue[tuple[list[bytes], PendingRead] | None] = queue.SimpleQueue()
        self._pending_bytes = 0
        self._lock = threading.Lock()  # of `_pending_bytes`
        self._readers = ThreadPoolExecutor(_READERS, "kv-tier-reader")
        self._keeper = threading.Thread(target=self._keep_all, name="kv-tier-keeper", daemon=True)
        self._keeper.start()

    def use_kernels(self, kernel_changes: int) -> None:
        """Blocks that are evicted from now on are these kernels', and so are those that are found."""
        self._pool.just_evicted = []
        self._namespace = self._namespace_of(kernel_changes)

    # -- out

    def save_evicted(self) -> None:
        """After each plan, before it is launched: what was evicted since the last one may be overwritten then."""
        if evicted := self._pool.just_evicted:
            self._pool.just_evicted = []
            self._save(evicted)

    def _save(self, evicted: list[tuple[int, bytes]]) -> None:
        keys = [self._namespace + digest for _, digest in evicted]
        wanted = [i for i, key in enumerate(keys) if self._memory is None or not self._memory.has(key)]
        size = self.copies.block_bytes
        room = (_MAX_PENDING_BYTES - self._pending_bytes) // size
        if len(wanted) > room:
            self.num_dropped += len(wanted) - room
            wanted = wanted[len(wanted) - room :]  # beginnings of prompts are evicted last, and are worth most
        if wanted:
            with self._lock:
                self._pending_bytes += len(wanted) * size
            read = self.copies.read_later([evicted[i][0] for i in wanted])
            self._pending.put(([keys[i] for i in wanted], read))

    def _keep_all(self) -> None:
        """On the thread that keeps."""
        while (item := self._pending.get()) is not None:
            keys, read = item
            try:
                rows = read.wait().numpy()
                for key, row in zip(keys, rows, strict=True):
                    self._keep(key, row.data)
            except Exception:
                log.exception("KV blocks could not be kept")
            with self._lock:
                self._pending_bytes -= len(keys) * self.copies.block_bytes

    def _keep(self, key: bytes, data: memoryview) -> None:
        if self._shared is not None:
            timed_save(self._shared, key, data)
        if self._memory is None:
            if self._disk is not None:
                timed_save(self._disk, key, data)
            return
        while (oldest := self._memory.oldest()) is not None:
            if self._disk is not None and self._memory.load(oldest, self._leaving):
                timed_save(self._disk, oldest, self._leaving)
            self._memory.drop(oldest)
        timed_save(self._memory, key, data)

    # -- and back

    def find(self, request: Request, digests: list[bytes], num_held: int) -> TierLoad | None:
        """What memory has is known here; what the others have is found out by the thread that reads."""
        keys = [self._namespace + digest for digest in digests[num_held:]]
        asked, count = self._worth_asking(), len(keys)
        if asked == [self._memory] or not asked:
            memory = self._memory if asked else None
            count = next((i for i, key in enumerate(keys) if memory is None or not memory.has(key)), count)
        return TierLoad(self, keys[:count], asked) if count >= self._min_blocks else None

    def _worth_asking(self) -> list[Tier]:
        """The tiers that bring a block back sooner than it is computed, as far as is known; now and then all of them."""
        self._num_lookups += 1
        block_s = self.seconds_per_token() * self._block_size
        if not block_s or self._num_lookups % _TRY_EVERY == 0:
            return self._tiers
        counted = [(tier, tier.counts) for tier in self._tiers]
        return [tier for tier, so_far in counted if so_far.hits < _KNOWN_HITS or so_far.load_s / so_far.hits < block_s]

    def read(self, load: TierLoad) -> None:
        self._readers.submit(self._read, load)

    def _read(self, load: TierLoad) -> None:
        """On a thread that reads."""
        try:
            for first in range(0, load.num_blocks, _BLOCKS_AT_ONCE):
                if not load.wait_for_room():
                    break
                keys = load.keys[first : first + _BLOCKS_AT_ONCE]
                count, data = 0, self.copies.host_buffer(len(keys))
                rows = data.numpy()
                while count < len(keys) and not load.is_dropped and _load(load.asked, keys[count], rows[count].data):
                    count += 1
                if count:
                    load.ready.append(data[:count])
                if count < len(keys):
                    break
        except Exception:
            log.exception("KV blocks could not be read back")
        load.is_over = True

    # -- all of it

    def clear(self) -> None:
        """Forget what only this engine can find: its host memory."""
        if self._memory is not None:
            self._memory.clear()

    def release_memory(self) -> None:
        """As `clear`, and the memory is the system's until it is used again. So is that of the device, perhaps: what was evicted
        and not copied out yet is lost."""
        self._pool.just_evicted = []
        if self._memory is not None:
            self._memory.clear()
            self._memory.release_memory()

    @property
    def counts(self) -> dict[str, TierCounts]:
        """By tier; copies."""
        return {tier.name: msgspec.structs.replace(tier.counts) for tier in self._tiers}

    def close(self) -> None:
        """What has been copied out is kept, for a few seconds at most."""
        self._pending.put(None)
        self._keeper.join(_CLOSE_S)
        self._readers.shutdown(wait=False, cancel_futures=True)
        for tier in self._tiers:
            tier.close()


def _load(tiers: list[Tier], key: bytes, out: memoryview) -> bool:
    return any(timed_load(tier, key, out) for tier in tiers)
