"""Memory that is free goes back to the system."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
from tonle.child import heap
{start}
trimmer = heap.HeapTrimmer()
calm = heap.resident_bytes()
blocks = [bytes(4096) for _ in range(40_000)]  # 160 MB in pieces
kept = [bytes(4096) for _ in range(10)]  # above them
peak = heap.resident_bytes()
assert peak - calm > 150e6, (calm, peak)
del blocks
{look}
print((heap.resident_bytes() - calm) // 1_000_000)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_pages_inside_the_heap_go_back_after_a_peak() -> None:
    def left_mb(look: str) -> int:
        code = CODE.format(start="heap.return_large_blocks()", look=look)
        return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)

    if left_mb("pass") < 50:
        pytest.skip("this C library gives them back by itself")
    assert left_mb("assert trimmer.look()") < 20


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_a_process_that_stays_large_is_trimmed_less_and_less_often() -> None:
    look = "print(sum(trimmer.look() for _ in range(60)), file=sys.stderr)"
    code = "import sys" + CODE.format(start="", look=look).replace("del blocks", "")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 2 <= int(done.stderr) <= 6  # after 1, 3, 7, 15, 31 looks


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_a_look_at_the_peak_does_not_hide_what_is_free_later() -> None:
    code = CODE.format(start="", look="assert trimmer.look()").replace(
        "del blocks", "assert trimmer.look(); trimmer.look(); del blocks"
    )
    assert int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout) < 20
