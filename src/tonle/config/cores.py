"""How many processors a program should use at once: those that it may run on, or fewer where its time on them is limited.

A container with a limit (`docker run --cpus 2`, a Kubernetes limit, systemd's CPUQuota) may still run on every processor of its
machine, and would start a thread for each. All together they then use up in some milliseconds what they may have in a tenth of a
second, most of it by waiting for each other, and stand still for the rest.

Does: read the limits of this process's cgroups, version 1 and 2. Does not: start threads.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_OWN = Path("/proc/self/cgroup")
_MOUNTED = Path("/sys/fs/cgroup")


def num_cores() -> int:
    """At least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, cores_of_limit() or cores)


def cores_of_limit(own: Path = _OWN, mounted: Path = _MOUNTED) -> int | None:
    """Processors that this process has the time of, rounded up; None: its time is not limited. `own`: the file that names its
    cgroups, which lie below `mounted`."""
    try:
        lines = own.read_text().splitlines()
    except OSError:  # not Linux
        return None
    shares = [share for line in lines for folder in _folders(line, mounted) if (share := _share(folder)) is not None]
    return max(1, math.ceil(min(shares))) if shares else None


def _folders(line: str, mounted: Path) -> Iterator[Path]:
    """Of `number:controllers:path`: where a limit may be, in the group itself or in one around it. A container may see only its
    own group, at the root, and be told of a path that is not there."""
    _, _, rest = line.partition(":")
    controllers, _, path = rest.partition(":")
    if not controllers:
        roots = [mounted]  # version 2
    elif "cpu" in controllers.split(","):
        roots = [mounted / "cpu", mounted / controllers]
    else:
        return
    inside = PurePosixPath(path.lstrip("/"))
    for root in roots:
        yield root
        for group in (inside, *inside.parents):
            if ".." not in group.parts and group.parts:
                yield root / group


def _share(folder: Path) -> float | None:
    """Of a second, so many; None: as much as it wants."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else float(quota) / float(period)
    with contextlib.suppress(OSError, ValueError):
        quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return float(quota) / float(period) if float(quota) > 0 else None
    return None
