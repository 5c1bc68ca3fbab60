"""`state_dir`: the one folder for what Tonle remembers between two starts: keys, limits, what is known of audit trails.

Does: decide the path. Does not: create it or write to it.
"""

from __future__ import annotations

import os
from pathlib import Path


def state_dir() -> Path:
    """Raises `RuntimeError` if the user has no home directory and XDG_STATE_HOME is not set."""
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "tonle"
