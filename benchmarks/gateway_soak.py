"""Many requests through one gateway: does its memory grow, and does the trail they leave verify in reasonable time?"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gateway_load import drive
from benchmarks.gateway_servers import stub, tonle
from tonle.edge.listening import run

CALLERS = 50
NUM_PARTS = 10


def soak(folder: Path, total: int) -> None:
    """Three whole answers for every streamed one."""
    with stub(folder) as upstream, tonle(folder, upstream.url, audit=True) as gateway:
        part = total // NUM_PARTS
        print(f"{'requests':>9} {'per s':>7}  MB: gateway, writer of records")
        for number in range(1, NUM_PARTS + 1):
            began_s = time.perf_counter()
            levels = [run(drive(gateway.url, CALLERS, part - part // 4, stream=False)),
                      run(drive(gateway.url, CALLERS, part // 4, stream=True))]  # fmt: skip
            per_s = part / (time.perf_counter() - began_s)
            failed = sum(level.num_failed for level in levels)
            memory = ", ".join(f"{each:.1f}" for each in gateway.memory_mb)
            print(f"{number * part:9} {per_s:7.0f}  {memory}" + (f"  {failed} failed" if failed else ""), flush=True)
    began_s = time.perf_counter()
    command = [sys.executable, "-m", "tonle", "audit", "verify", str(folder / "audit")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(f"tonle audit verify: {time.perf_counter() - began_s:.1f} s, exit status {done.returncode}")
    print(done.stdout[-500:] + done.stderr[-500:])
