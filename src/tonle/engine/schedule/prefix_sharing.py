"""`PrefixSharing`: sequences whose prompts begin alike hold the same blocks.

Does: find, publish and withdraw full blocks by the digest of their tokens. Does not: decide who runs, or own blocks (the pool
does).
"""

from __future__ import annotations

from tonle.engine.kv.block_pool import BlockPool
from tonle.engine.plan import Plan
from tonle.engine.schedule.limits import SchedulerLimits
from tonle.engine.schedule.sequence import Sequence
from tonle.telemetry.time_spent import MissReason


class PrefixSharing:
    def __init__(self, limits: SchedulerLimits, pool: BlockPool) -> None:
        self._enabled = limits.prefix_caching
        self._block_size = limits.block_size
        self._pool = pool

    def hold(self, sequence: Sequence) -> None:
        """Hold the longest cached prefix, always leaving at least one token to compute. May be called again later."""
        if not (self._enabled and sequence.request.config.use_cache):
            return
        bs, most = self._block_size, _most_cached(sequence)
        while (sequence.num_named + 1) * bs <= most:
            block = self._pool.lookup(sequence.digests(sequence.num_named + 1, bs)[sequence.num_named])
            if block is None:
                break
            self._pool.hold(block)
            if sequence.num_named < len(sequence.blocks):  # it catches up: its own block for this place is not needed
                self._pool.release([sequence.blocks[sequence.num_named]])
            sequence.blocks[sequence.num_named : sequence.num_named + 1] = [block]
            sequence.num_named += 1
        sequence.num_computed = max(sequence.num_computed, sequence.num_named * bs)

    def wanted(self, sequence: Sequence) -> list[bytes]:
        """Digests of the full blocks that need not be computed if they can be had."""
        if not sequence.request.config.use_cache:
            return []
        most = max(0, _most_cached(sequence)) // self._block_size
        return sequence.digests(most, self._block_size)[:most]

    def missed(self, sequence: Sequence) -> dict[MissReason, int]:
        """Tokens of its prompt that are not among those it holds, by why. Asked when it first runs, after `hold`."""
        size, bs, first = len(sequence.request.prompt), self._block_size, sequence.num_named
        missed: dict[MissReason, int] = {"off": size - first * bs}
        if self._enabled and sequence.request.config.use_cache:
            last = max(first, min(_most_cached(sequence), size) // bs)  # full blocks that could have been found
            present = first
            while present < last and self._was_there(sequence.digests(present + 1, bs)[present]):
                present += 1
            missed = {"evicted": (present - first) * bs, "new": (last - present) * bs}
            missed["tail" if _is_whole(sequence) else "off"] = size - last * bs
        return {why: count for why, count in missed.items() if count > 0}

    def _was_there(self, digest: bytes) -> bool:
        """It was evicted; or it is there, and what precedes it was evicted."""
        return self._pool.was_evicted(digest) or self._pool.lookup(digest) is not None

    def catch_up(self, sequence: Sequence, plan: Plan) -> None:
        """Hold what others with the same prompt have computed since it was admitted, instead of computing it again: the n
        continuations of a prompt that takes several steps keep its blocks once."""
        assert sequence.row is not None
        first = sequence.num_named
        self.hold(sequence)
        if sequence.num_named > first:
            plan.new_blocks.append((sequence.row, first, sequence.blocks[first : sequence.num_named]))

    def publish(self, sequence: Sequence) -> None:
        """Blocks that are full, with all tokens known, can be found from now on.

        A block planned in this step counts: within a step every layer writes all keys and values before it reads any.
        """
        bs = self._block_size
        num_full = min(sequence.num_computed, len(sequence.tokens)) // bs
        if num_full <= sequence.num_named or not self._enabled:
            return
        digests, publish, observer = sequence.digests(num_full, bs), self._pool.publish, self._pool.observer
        for i in range(sequence.num_named, num_full):
            if publish(sequence.blocks[i], digests[i]) and observer is not None:
                parent = digests[i - 1] if i else None
                observer.stored(digests[i], parent, sequence.tokens[i * bs : (i + 1) * bs], sequence.request.adapter)
        sequence.num_named = num_full

    def retract(self, sequence: Sequence) -> None:
        """Its blocks may hold anything: none of them is found again."""
        for block in sequence.blocks:
            self._pool.retract(block)


def _is_whole(sequence: Sequence) -> bool:
    """Its prompt may come from the cache but for its last token: nothing is wanted of each."""
    return sequence.pooling != "mean" and sequence.request.config.prompt_logprobs is None


def _most_cached(sequence: Sequence) -> int:
    """Tokens that need not be computed: all but the last, unless something is wanted of each."""
    config = sequence.request.config
    if sequence.pooling == "mean":
        return 0
    if config.prompt_logprobs is not None:  # the first of them is known from the token before it
        return min(config.prompt_logprobs_start, len(sequence.tokens)) - 1
    return len(sequence.tokens) - 1
