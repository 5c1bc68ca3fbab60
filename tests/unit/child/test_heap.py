"""Memory that is free goes back to the system."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
from tonle.child import heap
{start}
trimmer = heap.HeapTrimmer()
calm = heap._resident_bytes()
blocks = [bytes(4096) for _ in range(40_000)]  # 160 MB in pieces
kept = [bytes(4096) for _ in range(10)]  # above them
peak = heap._resident_bytes()
assert peak - calm > 150e6, (calm, peak)
del blocks
{look}
print((heap._resident_bytes() - calm) // 1_000_000)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_pages_inside_the_heap_go_back_after_a_peak() -> None:
    def left_mb(look: str) -> int:
        code = CODE.format(start="heap.return_large_blocks()", look=look)
        return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)

    if left_mb("pass") < 50:
        pytest.skip("this C library gives them back by itself")
    assert left_mb("assert trimmer.look()") < 20


def test_a_process_that_stays_large_is_not_trimmed_again() -> None:
    code = CODE.format(start="", look="trimmer.look(); held = bytes(100_000_000); assert not trimmer.look()")
    code = code.replace("del blocks", "").replace("bytes(100_000_000)", "None")
    subprocess.run([sys.executable, "-c", code], check=True)
