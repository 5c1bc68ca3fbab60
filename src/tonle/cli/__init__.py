"""The command line: one verb per file, and the only place that wires rooms together.

Does: turn words and flags into calls, show progress and results to people. Does not: hold logic that a program would
want; that lives in the rooms below. Imports heavy things inside the verbs, so that help is instant and `tonle bench`
never loads torch.
"""

from __future__ import annotations

import sys


def main() -> None:
    """The `tonle` command."""
    try:
        from tonle.cli.app import app

        app(prog_name="tonle")
    except KeyboardInterrupt:  # before a verb had begun
        sys.exit(130)
