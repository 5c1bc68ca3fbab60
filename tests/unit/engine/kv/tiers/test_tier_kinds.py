"""Host memory, a folder, and what threads make of them: bounds, order, damage, and who may read what."""

from __future__ import annotations

import os
import stat
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tonle.engine.kv.block_copies import BlockCopies, PendingRead
from tonle.engine.kv.block_pool import BlockPool, block_digests, root_digest
from tonle.engine.kv.tiers import tiers as tiers_module
from tonle.engine.kv.tiers.disk import DiskTier
from tonle.engine.kv.tiers.host_memory import HostMemory
from tonle.engine.kv.tiers.namespace import namespace_of
from tonle.engine.kv.tiers.stored_block import HEADER_BYTES, header_of, is_whole
from tonle.engine.kv.tiers.tier import TierCounts
from tonle.engine.kv.tiers.tiers import KvTiers
from tonle.engine.request import Request, ResolvedConfig
from tonle.errors import ConfigError
from tonle.models.inputs import KVCache

SIZE = 100
FILE_BYTES = SIZE + HEADER_BYTES


def key(number: int, namespace: int = 0) -> bytes:
    return bytes([namespace]) * 16 + number.to_bytes(16, "big")


def block(number: int) -> memoryview:
    return memoryview(bytes([number]) * SIZE)


def loaded(tier: DiskTier | HostMemory, of: bytes) -> bytes | None:
    out = bytearray(SIZE)
    return bytes(out) if tier.load(of, memoryview(out)) else None


# -- one block


def test_a_block_is_whole_or_it_is_none() -> None:
    data = block(7)
    header = header_of(key(1), data)
    assert is_whole(header, key(1), data)
    assert not is_whole(header, key(2), data)
    assert not is_whole(header[:-1], key(1), data)
    assert not is_whole(header, key(1), data[:-1])
    assert not is_whole(header, key(1), block(8))
    assert not is_whole(b"x" + header[1:], key(1), data)


def test_a_namespace_is_of_the_model_and_of_everything_that_rounds() -> None:
    names = {namespace_of(model, facts) for model in (b"a", b"b") for facts in ((1, "x"), (1, "y"), ("1", "x"))}
    assert len(names) == 6 and namespace_of(b"a", (1, "x")) in names


# -- host memory


def test_memory_keeps_the_most_recently_used() -> None:
    memory = HostMemory(np.zeros((3, SIZE), np.uint8))
    for number in range(3):
        assert memory.oldest() is None
        memory.save(key(number), block(number))
    assert loaded(memory, key(0)) == bytes(block(0))  # it is used now
    assert memory.oldest() == key(1)
    memory.drop(key(1))
    memory.drop(key(1))  # it may have been cleared meanwhile
    memory.save(key(9), block(9))
    assert [memory.has(key(number)) for number in (0, 1, 2, 9)] == [True, False, True, True]
    assert loaded(memory, key(9)) == bytes(block(9)) and loaded(memory, key(1)) is None
    assert (memory.counts.num_blocks, memory.counts.num_bytes, memory.counts.evicted) == (3, 3 * SIZE, 1)


def test_memory_may_be_given_back_while_a_block_goes_to_disk() -> None:
    kv = KVCache(num_layers=2, num_blocks=4, block_size=16, num_kv_heads=4, head_dim=64, dtype=torch.float32,
                 device=torch.device("cpu"))  # fmt: skip
    kv.k.fill_(1.5)
    kv.v.fill_(1.5)
    saved: list[bytes] = []

    class Disk(DiskTier):
        def __init__(self) -> None:
            self.counts = TierCounts()

        def save(self, key: bytes, data: memoryview) -> None:
            tiers.release_memory()  # as an engine does that falls asleep meanwhile
            saved.append(bytes(data))

    pool, copies = BlockPool(4), BlockCopies(kv)
    memory = HostMemory(np.zeros((1, copies.block_bytes), np.uint8))
    tiers = KvTiers(pool, copies, lambda changes: bytes(16), memory, Disk(), None, block_size=16)
    tiers.use_kernels(0)
    pool.just_evicted = [(block, bytes([block]) * 16) for block in range(3)]
    tiers.save_evicted()
    tiers.close()
    assert saved and set(saved) == {np.full(copies.block_bytes // 4, 1.5, np.float32).tobytes()}
    assert memory.counts.num_blocks == 1


# -- a folder


def test_a_folder_is_bounded_and_the_least_recently_used_leaves(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, 10 * FILE_BYTES)
    for number in range(10):
        disk.save(key(number), block(number))
    assert loaded(disk, key(0)) == bytes(block(0))
    disk.save(key(10), block(10))
    left = {number for number in range(11) if loaded(disk, key(number)) is not None}
    assert 0 in left and 10 in left and 1 not in left and len(left) == 9
    assert len(list(tmp_path.glob("*/*/*"))) == disk.counts.num_blocks == 9
    assert disk.counts.num_bytes == 9 * FILE_BYTES and disk.counts.evicted == 2
    disk.save(key(99), memoryview(bytes(100 * FILE_BYTES)))  # larger than all of it
    assert disk.counts.num_blocks == 9


def test_engines_share_a_folder_and_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = DiskTier(tmp_path, 10 * FILE_BYTES), DiskTier(tmp_path, 10 * FILE_BYTES)
    for number in range(8):
        one.save(key(number), block(number))
        os.utime(next(tmp_path.glob(f"*/*/{key(number)[16:].hex()}.kv")), (number, number))
    assert loaded(other, key(3)) == bytes(block(3))
    monkeypatch.setattr("tonle.engine.kv.tiers.disk._LIST_S", 0.0)  # it looks again before each save
    for number in range(8, 13):
        other.save(key(number), block(number))
    assert len(list(tmp_path.glob("*/*/*.kv"))) <= 10
    assert loaded(other, key(3)) is not None, "it was read a moment ago"
    assert loaded(one, key(0)) is None and loaded(one, key(12)) == bytes(block(12))


def test_a_restart_finds_what_was_there_and_removes_what_is_too_much(tmp_path: Path) -> None:
    first = DiskTier(tmp_path, 100 * FILE_BYTES)
    for number in range(10):
        first.save(key(number), block(number))
    unfinished = next(tmp_path.glob("*/*")) / "crashed.1-1.part"
    unfinished.write_bytes(b"half")
    os.utime(unfinished, (1, 1))
    again = DiskTier(tmp_path, 5 * FILE_BYTES)
    assert again.counts.num_blocks == 4 and not unfinished.exists()


@pytest.mark.parametrize("damage", ["short", "long", "flipped", "another's", "empty"])
def test_a_damaged_file_is_a_miss_and_is_removed(tmp_path: Path, damage: str) -> None:
    disk = DiskTier(tmp_path, 100 * FILE_BYTES)
    for number in range(2):
        disk.save(key(number), block(number))
    path = next(tmp_path.glob(f"*/*/{key(0)[16:].hex()}.kv"))
    data = path.read_bytes()
    path.write_bytes({
        "short": data[:-1], "long": data + b"x", "flipped": data[:-1] + b"x", "empty": b"",
        "another's": next(tmp_path.glob(f"*/*/{key(1)[16:].hex()}.kv")).read_bytes(),
    }[damage])  # fmt: skip
    assert loaded(disk, key(0)) is None and not path.exists()
    assert disk.counts.damaged == 1 and loaded(disk, key(1)) == bytes(block(1))


def test_files_are_private(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path / "kv", 100 * FILE_BYTES)
    disk.save(key(0), block(0))
    for path in [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_a_folder_that_cannot_be_is_a_wrong_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="kv_offload_dir: cannot write to"):
        DiskTier(tmp_path / "file" / "kv", 1000)


def test_a_full_disk_is_said_once_and_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = DiskTier(tmp_path, 100 * FILE_BYTES)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tonle.engine.kv.tiers.disk.os.open", full)
    for number in range(3):
        disk.save(key(number), block(number))
    assert disk.counts.errors == 3 and disk.counts.num_blocks == 0
    assert len([r for r in caplog.records if "No space left" in r.getMessage()]) == 1


# -- all of them


def small_cache() -> KVCache:
    return KVCache(num_layers=2, num_blocks=8, block_size=2, num_kv_heads=1, head_dim=4, dtype=torch.float32,
                   device=torch.device("cpu"))  # fmt: skip


def request(salt: bytes = b"") -> Request:
    return Request(handle=1, prompt=[1], config=ResolvedConfig(max_length=1), arrived_s=0.0, salt=salt)


def read_back(tiers: KvTiers, digests: list[bytes], held: int = 0) -> list[torch.Tensor]:
    load = tiers.find(request(), digests, held)
    if load is None:
        return []
    load.begin()
    for _ in range(12_000):
        if load.is_over:
            break
        time.sleep(0.01)
    rows: list[torch.Tensor] = []
    while (data := load.take(3)) is not None:
        assert len(data) <= 3
        rows += list(data)
    return rows


def test_a_run_of_blocks_comes_back_as_far_as_it_goes(tmp_path: Path) -> None:
    kv = small_cache()
    kv.k.copy_(torch.rand(kv.k.shape))
    copies = BlockCopies(kv)
    disk = DiskTier(tmp_path, 2**20)
    tiers = KvTiers(BlockPool(8), copies, lambda changes: bytes([changes]) * 16, None, disk, None, block_size=2)
    tiers.use_kernels(1)
    digests = block_digests(root_digest(b""), list(range(16)), 2)
    wanted = copies.read([0, 1, 2, 3, 4])
    tiers._save([(number, digests[number]) for number in (0, 1, 2, 4)])
    for _ in range(12_000):
        if disk.counts.num_blocks == 4:
            break
        time.sleep(0.01)
    assert torch.equal(torch.stack(read_back(tiers, digests)), wanted[:3]), "the fourth was not saved"
    assert torch.equal(torch.stack(read_back(tiers, digests, 1)), wanted[1:3])
    others = block_digests(root_digest(b"another tenant"), list(range(16)), 2)
    assert read_back(tiers, others) == [], "another tenant's"
    tiers.use_kernels(2)
    assert read_back(tiers, digests) == [], "of other kernels"
    tiers.close()


def test_blocks_in_memory_alone_are_counted_before_anyone_waits() -> None:
    copies = BlockCopies(small_cache())
    memory = HostMemory(np.zeros((8, copies.block_bytes), np.uint8))
    tiers = KvTiers(BlockPool(8), copies, lambda _: bytes(16), memory, None, None, block_size=2, min_blocks=2)
    tiers.use_kernels(0)
    digests = block_digests(root_digest(b""), list(range(16)), 2)
    assert tiers.find(request(), digests, 0) is None
    for digest in digests[:3]:
        memory.save(bytes(16) + digest, memoryview(bytes(copies.block_bytes)))
    found = tiers.find(request(), digests, 0)
    assert found is not None and found.num_blocks == 3
    assert tiers.find(request(), digests, 2) is None, "one block is not worth it"
    tiers.close()


def test_a_long_prompt_comes_back_no_faster_than_it_is_written_to_the_device() -> None:
    """Else all of it would be in host memory a second time."""
    copies = BlockCopies(small_cache())
    digests = block_digests(root_digest(b""), list(range(256)), 2)
    memory = HostMemory(np.zeros((len(digests), copies.block_bytes), np.uint8))
    tiers = KvTiers(BlockPool(8), copies, lambda _: bytes(16), memory, None, None, block_size=2)
    tiers.use_kernels(0)
    for number, digest in enumerate(digests):
        memory.save(bytes(16) + digest, memoryview(bytes([number]) * copies.block_bytes))
    load, dropped = tiers.find(request(), digests, 0), tiers.find(request(), digests, 0)
    assert load is not None and dropped is not None
    load.begin()
    dropped.begin()
    for _ in range(12_000):
        if min(len(load.ready), len(dropped.ready)) >= tiers_module.PIECES_AHEAD:
            break
        time.sleep(0.01)
    time.sleep(0.1)  # in which more would come
    assert len(load.ready) == len(dropped.ready) == tiers_module.PIECES_AHEAD and not load.is_over
    dropped.end(used=False)
    rows: list[int] = []
    for _ in range(120_000):
        if (data := load.take(3)) is not None:
            rows += data[:, 0].tolist()
        elif load.is_over and dropped.is_over:
            break
        else:
            time.sleep(0.001)
    assert rows == list(range(len(digests)))
    tiers.close()


def test_a_keeper_that_is_behind_drops_blocks_not_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = BlockCopies(small_cache())
    monkeypatch.setattr(tiers_module, "_MAX_PENDING_BYTES", 3 * copies.block_bytes)
    gate = threading.Event()
    monkeypatch.setattr(PendingRead, "wait", lambda read: (gate.wait(120), read._data)[1])
    memory = HostMemory(np.zeros((8, copies.block_bytes), np.uint8))
    tiers = KvTiers(BlockPool(8), copies, lambda _: bytes(16), memory, None, None, block_size=2)
    tiers.use_kernels(0)
    digests = block_digests(root_digest(b""), list(range(16)), 2)
    tiers._save([(number, digests[number]) for number in range(5)])
    tiers._save([(6, digests[6])])
    gate.set()
    tiers.close()
    assert tiers.num_dropped == 3
    assert [memory.has(bytes(16) + digest) for digest in digests[:7]] == [False, False, True, True, True, False, False]


def test_a_tier_that_is_slower_than_computing_is_left_out_but_for_a_look_now_and_then(tmp_path: Path) -> None:
    copies = BlockCopies(small_cache())
    disk = DiskTier(tmp_path, 2**20)
    memory = HostMemory(np.zeros((8, copies.block_bytes), np.uint8))
    tiers = KvTiers(BlockPool(8), copies, lambda _: bytes(16), memory, disk, None, block_size=2)
    tiers.use_kernels(0)
    digests = block_digests(root_digest(b""), list(range(16)), 2)
    disk.counts.hits, disk.counts.load_s = 100, 10.0  # 0.1 s per block
    assert tiers.find(request(), digests, 0) is not None, "what computing costs is not known"
    tiers.seconds_per_token = lambda: 0.06  # 0.12 s per block
    assert tiers.find(request(), digests, 0) is not None
    tiers.seconds_per_token = lambda: 0.04
    found = [tiers.find(request(), digests, 0) for _ in range(200)]
    assert 1 <= sum(each is not None for each in found) <= 4
    for digest in digests[:3]:
        memory.save(bytes(16) + digest, memoryview(bytes(copies.block_bytes)))
    load = tiers.find(request(), digests, 0)
    assert load is not None and load.num_blocks == 3 and load.asked == [memory]
    tiers.close()
