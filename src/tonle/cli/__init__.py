"""The command line: the subcommands of `tonle`, and the only package that connects all the others.

Does: turn arguments into calls, show progress and results. Does not: hold logic that a program would want; that is in
the packages below. Heavy imports are inside the subcommands, so that help is instant and `tonle bench` never loads torch.
"""

from __future__ import annotations

import sys


def main() -> None:
    """The `tonle` command."""
    try:
        from tonle.cli.app import app

        app(prog_name="tonle")
    except KeyboardInterrupt:  # before a subcommand had begun
        sys.exit(130)
