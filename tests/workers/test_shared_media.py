"""Memory that carries media is gone when nobody needs it, however a job, a worker or the pool's process ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workers.pools import lines, run, running, until
from tonle.errors import TonleError
from tonle.workers.kind import Job
from tonle.workers.shared_media import INLINE_BYTES, Packer, Segment, Span

MEDIA = os.urandom(300_000)

HOST = """
import asyncio, sys
from tests.workers.pools import ONE_BY_ONE, new_pool, until
from tonle.workers.kind import Job

async def main():
    async with new_pool(ONE_BY_ONE, instances=2) as pool:
        job = Job({"do": "hang"}, (b"x" * 1_000_000,))
        tasks = [asyncio.create_task(pool.run(job)) for _ in range(2)]
        await until(lambda: pool.num_running == 2)
        print(*pool.pids, flush=True)
        await asyncio.gather(*tasks)

asyncio.run(main())
"""


def held(pid: int | str = "self") -> int:
    """Segments that a process maps or has a descriptor of."""
    descriptors = [str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()]
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return sum("tonle-media" in one for one in (*descriptors, *maps))


def names() -> set[str]:
    """Of shared memory that has a name, as Python, torch and Tonle call theirs: a PostgreSQL may start beside this test."""
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(("psm_", "torch_", "tonle"))}


def test_what_is_packed_is_unpacked() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        packer = Packer()
        media = (b"small", MEDIA, memoryview(MEDIA)[1:], b"")
        carried = packer.pack(media)
        assert [type(one) for one in carried] == [bytes, Span, Span, bytes]
        packer.send(ours)
        segment = Segment(theirs, packer.num_bytes)
        found = segment.unpack(carried)
        assert [bytes(one) for one in found] == [bytes(one) for one in media]
        with pytest.raises(TypeError):
            found[1][0] = 0  # type: ignore[index]
        assert held() == 2  # one mapping, with its descriptor
        del segment, found
        assert held() == 0
        assert Packer().pack((b"x" * (INLINE_BYTES - 1),)) == [b"x" * (INLINE_BYTES - 1)]
        Packer().send(ours)  # nothing to send
        assert Segment(theirs, 0).unpack([b"y"]) == (b"y",)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_is_left_by_jobs_however_they_end(tmp_path: Path) -> None:
    async def steps() -> None:
        before, flag, notes = names(), tmp_path / "flag", tmp_path / "notes"
        async with running(instances=2, max_batch=2, timeout_s=30, options={"notes": str(notes)}) as pool:
            results = await pool.run_all([Job({}, (MEDIA, MEDIA)) for _ in range(8)])
            assert held() > 0  # results are views
            del results
            for fields in ({"do": "raise"}, {"do": "refuse"}, {"do": "die"}):
                with pytest.raises(TonleError):
                    await pool.run(Job(fields, (MEDIA,)))
            with pytest.raises(TonleError):
                await pool.run(Job({"do": "hang"}, (MEDIA,)), timeout_s=0.2)
            async with contextlib.aclosing(pool.stream(Job({"pieces": 3}, (MEDIA,)))) as pieces:
                await anext(pieces)
            task = asyncio.create_task(pool.run(Job({"name": "left", "do": "wait", "flag": str(flag)}, (MEDIA,))))
            await until(lambda: "left" in lines(notes))
            task.cancel()
            await until(task.cancelled)
            flag.touch()
            await until(lambda: pool.num_ready == 2 and not pool.num_running)
            gc.collect()
            assert held() == 0
            await until(lambda: [held(pid) for pid in pool.pids] == [0, 0])
            assert names() <= before
        assert held() == 0 and names() <= before

    run(steps())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_end_with_their_pool_although_they_hang() -> None:
    before = names()
    with subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        pids = [int(pid) for pid in host.stdout.readline().split()]
        assert len(pids) == 2

        async def steps() -> None:
            try:
                await until(lambda: all(held(pid) for pid in pids))
            finally:
                host.kill()
            await until(lambda: not any(_is_alive(pid) for pid in pids))

        run(steps())
    assert names() <= before


def _is_alive(pid: int) -> bool:
    """A zombie that nobody waits for is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
