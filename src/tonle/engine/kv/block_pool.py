"""The pool of KV blocks: reference counts, the prefix index, eviction of the longest unused, and the digests that name prefixes.

A block is in exactly one of three places:
  free   no sequence holds it and its content is worthless
  idle   no sequence holds it, but its content is a known prefix and may be held again (oldest first)
  held   `refs[block]` sequences read it; it may be published (known by its hash) or private
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Protocol


def root_digest(salt: bytes, *, adapted: bool = False) -> bytes:
    """The parent of a sequence's first block. Equal prompts under different salts share nothing.

    `adapted`: computed with an adapter, whose digest begins the salt. Whatever salts there are, such blocks are no base model's.
    """
    return blake2b(salt, digest_size=16, person=b"tonle-lora" if adapted else b"tonle-kv").digest()


def block_digests(parent: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """Of the full blocks of `tokens`, which follow the block named `parent`. Each covers the block's tokens, all tokens before
    it, and the tenant's salt. 16 bytes: no prompts can be made to collide."""
    known = array("i", tokens)
    data, size = known.tobytes(), block_size * known.itemsize
    digests = []
    for end in range(size, len(data) + 1, size):
        parent = blake2b(parent + data[end - size : end], digest_size=16).digest()
        digests.append(parent)
    return digests


_MAX_EVICTED = 32_768  # digests of evicted blocks that are remembered


class BlockObserver(Protocol):
    """Is told which prefixes can be found, and which no longer."""

    def stored(self, digest: bytes, parent: bytes | None, tokens: list[int], adapter: int) -> None:
        """A block with these tokens can be found. `parent`: the block before it; None if it is the first."""
        ...

    def removed(self, digest: bytes) -> None: ...
    def cleared(self) -> None:
        """None can be found any more."""
        ...


class BlockPool:
    def __init__(self, num_blocks: int, *, max_idle: int | None = None, gc_threshold: float = 1.0) -> None:
        self.num_blocks = num_blocks
        self._max_idle = num_blocks if max_idle is None else min(max_idle, num_blocks)
        self._max_occupied = int(num_blocks * gc_threshold)  # held + idle blocks tolerated before idle ones are dropped
        self._refs = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack; block 0 first
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._evicted: OrderedDict[bytes, None] = OrderedDict()  # the latest digests, oldest first
        self.observer: BlockObserver | None = None
        # Evicted for want of room since last asked: block, digest. A step may overwrite them. None: nobody asks.
        self.just_evicted: list[tuple[int, bytes]] | None = None

    # -- counts

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_available(self) -> int:
        """Blocks `take` can still give."""
        return len(self._free) + len(self._idle)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available

    # -- holding

    def take(self) -> int:
        """A block with no content and one reference. The caller checked `num_available`."""
        block = self._free.pop() if self._free else self._make_free()
        self._refs[block] = 1
        return block

    def hold(self, block: int) -> None:
        """One more reader of a published block."""
        if self._refs[block] == 0:
            del self._idle[block]
        self._refs[block] += 1

    def release(self, blocks: list[int]) -> None:
        """One reader less of each. Last block first, so that a prefix outlives its continuation."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if block in self._hash_of:
                    self._idle[block] = None
                else:
                    self._free.append(block)
        self._collect()

    # -- prefixes

    def lookup(self, digest: bytes) -> int | None:
        return self._block_of.get(digest)

    def was_evicted(self, digest: bytes) -> bool:
        """Whether a block with this content was dropped to make room, not too long ago."""
        return digest in self._evicted

    def publish(self, block: int, digest: bytes) -> bool:
        """Let others find this held block. The first block with some content wins; later ones stay private (False)."""
        if digest in self._block_of or block in self._hash_of:
            return False
        self._block_of[digest] = block
        self._hash_of[block] = digest
        return True

    @property
    def published(self) -> set[bytes]:
        """The digests of all blocks that can be found."""
        return set(self._block_of)

    def retract(self, block: int) -> None:
        """The content of a held block turned out to be wrong: no sequence may find it any more."""
        digest = self._hash_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
            if self.observer is not None:
                self.observer.removed(digest)

    def drop_idle(self, keep: int = 0) -> int:
        """Forget idle blocks for good, oldest first, until `keep` are left. Returns how many were dropped."""
        dropped = max(0, len(self._idle) - keep)
        for _ in range(dropped):
            self._free.append(self._evict()[0])
        if dropped and not self._hash_of and self.observer is not None:
            self.observer.cleared()
        return dropped

    def _collect(self) -> None:
        over = len(self._idle) - self._max_idle
        over = max(over, self.num_blocks - len(self._free) - self._max_occupied)
        for _ in range(min(over, len(self._idle))):
            self._free.append(self._make_free())

    def _make_free(self) -> int:
        """The block that was idle for longest. Its content may be kept elsewhere."""
        block, digest = self._evict()
        if self.just_evicted is not None:
            self.just_evicted.append((block, digest))
        return block

    def _evict(self) -> tuple[int, bytes]:
        block, _ = self._idle.popitem(last=False)
        digest = self._hash_of.pop(block)
        del self._block_of[digest]
        if self.observer is not None:
            self.observer.removed(digest)
        self._evicted[digest] = None
        self._evicted.move_to_end(digest)
        if len(self._evicted) > _MAX_EVICTED:
            self._evicted.popitem(last=False)
        return block, digest

    # -- truth

    def verify(self, holders: Iterable[list[int]]) -> None:
        """Recount everything against the block lists of all sequences. Raises AssertionError on any disagreement."""
        counted = Counter(block for blocks in holders for block in blocks)
        for block in range(self.num_blocks):
            assert self._refs[block] == counted[block], (
                f"block {block}: {self._refs[block]} refs, {counted[block]} holders"
            )
        free, idle = set(self._free), set(self._idle)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & idle, "a block is both free and idle"
        for block in free | idle:
            assert counted[block] == 0, f"block {block} is held and available"
        assert len(free) + len(idle) + len(counted) == self.num_blocks, "a block leaked"
        assert idle <= set(self._hash_of), "an idle block that is in no index"
        assert not free & set(self._hash_of), "a free block that can be found"
        assert {h: b for b, h in self._hash_of.items()} == self._block_of, "the two prefix indexes disagree"
