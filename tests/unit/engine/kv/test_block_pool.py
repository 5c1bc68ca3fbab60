"""The block pool's small print; the property tests cover its life."""

import sys
from hashlib import blake2b

import pytest

from tonle.engine.kv.block_pool import BlockPool, block_digests, root_digest


def test_free_blocks_go_before_idle_ones_and_idle_ones_oldest_first() -> None:
    pool = BlockPool(3)
    a, b = pool.take(), pool.take()
    pool.publish(a, b"a")
    pool.publish(b, b"b")
    pool.release([a])
    pool.release([b])
    assert pool.num_idle == 2
    c = pool.take()
    assert pool.lookup(b"a") == a and pool.lookup(b"b") == b
    d = pool.take()  # evicts a, idle for longer
    assert d == a and pool.lookup(b"a") is None and pool.lookup(b"b") == b
    pool.verify([[c], [d]])


def test_the_end_of_a_sequence_is_evicted_before_its_beginning() -> None:
    pool = BlockPool(2)
    blocks = [pool.take(), pool.take()]
    for block, digest in zip(blocks, (b"0", b"1"), strict=True):
        pool.publish(block, digest)
    pool.release(blocks)
    pool.take()
    assert pool.lookup(b"0") == blocks[0] and pool.lookup(b"1") is None


def test_an_idle_block_can_be_held_again() -> None:
    pool = BlockPool(1)
    block = pool.take()
    pool.publish(block, b"x")
    pool.release([block])
    pool.hold(block)
    assert pool.num_available == 0
    pool.verify([[block]])


def test_equal_content_is_published_once() -> None:
    pool = BlockPool(2)
    a, b = pool.take(), pool.take()
    pool.publish(a, b"x")
    pool.publish(b, b"x")
    assert pool.lookup(b"x") == a
    pool.release([b])
    assert pool.num_free == 1  # b was private: nothing to keep
    pool.verify([[a]])


def test_limits_on_what_is_kept() -> None:
    few = BlockPool(10, max_idle=2)
    half = BlockPool(10, gc_threshold=0.5)
    for pool, kept in ((few, 2), (half, 5)):
        blocks = [pool.take() for _ in range(8)]
        for block in blocks:
            pool.publish(block, bytes([block]))
        pool.release(blocks)
        assert pool.num_idle == kept
        pool.verify([])


def test_verify_notices_a_leak() -> None:
    pool = BlockPool(2)
    pool.take()
    with pytest.raises(AssertionError, match="refs"):
        pool.verify([])


@pytest.mark.parametrize("adapted", [False, True])
def test_the_name_of_a_block_covers_all_that_comes_before_it(adapted: bool) -> None:
    tokens, size = list(range(70_000, 70_011)), 4
    names, name = [], root_digest(b"tenant", adapted=adapted)
    for start in (0, 4):  # the last three tokens fill no block
        block = b"".join(token.to_bytes(4, sys.byteorder) for token in tokens[start : start + size])
        name = blake2b(name + block, digest_size=16).digest()
        names.append(name)
    root = root_digest(b"tenant", adapted=adapted)
    assert block_digests(root, tokens, size) == names
    assert block_digests(names[0], tokens[size:], size) == names[1:], "named one after the other, they are the same"
    for other in (root_digest(b"other", adapted=adapted), root_digest(b"tenant", adapted=not adapted)):
        assert not set(block_digests(other, tokens, size)) & set(names)
