"""Numbers of bytes, as people and platforms write them.

Does: GiB in messages, Kubernetes' quantities, megabytes of Docker and systemd. Does not: read them (`config/values.py`).
"""

from __future__ import annotations

import math

GIB = 1024**3
MIB = 1024**2


def whole_gib(num_bytes: int) -> int:
    """In bytes, rounded up to whole GiB."""
    return math.ceil(num_bytes / GIB) * GIB


def gib(num_bytes: int) -> str:
    """For people: 4.8 GiB, 640 MiB."""
    return f"{math.ceil(num_bytes / MIB)} MiB" if num_bytes < GIB else f"{num_bytes / GIB:.1f} GiB"


def quantity(num_bytes: int) -> str:
    """For Kubernetes: 3Gi, 1536Mi."""
    return f"{num_bytes // GIB}Gi" if num_bytes % GIB == 0 else f"{math.ceil(num_bytes / MIB)}Mi"


def megabytes(num_bytes: int) -> str:
    """For Docker and systemd, whose M is a MiB: 3072M."""
    return f"{math.ceil(num_bytes / MIB)}M"
