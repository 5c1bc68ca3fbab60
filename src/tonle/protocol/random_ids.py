"""`random_hex`: ids that never meet, without asking the system for each.

Does: draw from a generator that is seeded by the system once per process. Does not: make secrets; whoever has seen many ids
can tell the next ones (`secrets` is for keys).
"""

from __future__ import annotations

import random

_draw = random.Random().getrandbits  # seeded by the system; one call, so that threads may share it


def random_hex(num_bytes: int) -> str:
    return _draw(8 * num_bytes).to_bytes(num_bytes, "big").hex()
