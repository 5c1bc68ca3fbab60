"""What the dashboard costs: the browser that shows it, and the server that feeds it.

    python -m benchmarks.dashboard page                # memory and time per update in Chromium: 50 requests/s, 5,000 kept
    python -m benchmarks.dashboard page --profile      # and the functions that took the time
    python -m benchmarks.dashboard server              # throughput: dashboard off, on and closed, open in one page
    python -m benchmarks.dashboard server --only stub  # a gateway with a stub alone, or: model
    python -m benchmarks.dashboard server --quick

Does: print a table for each, with our targets. The measurements are in `dashboard_page.py` and `dashboard_server.py`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks import dashboard_page, dashboard_server


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    page = commands.add_parser("page", help="memory and time per update in Chromium")
    page.add_argument("--seconds", type=int, default=60, help="that each page is watched")
    page.add_argument("--per-s", type=float, default=50.0, help="requests per second")
    page.add_argument("--kept", type=int, default=5000, help="requests before it begins; the server keeps 5,000")
    page.add_argument("--profile", action="store_true", help="print the functions that took the most time")
    server = commands.add_parser("server", help="throughput with and without it")
    server.add_argument("--rounds", type=int, default=10)
    server.add_argument("--only", choices=("stub", "model"), help="one of the two servers")
    server.add_argument("--quick", action="store_true", help="two rounds of fewer requests: does it work?")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.command == "page":
            return dashboard_page.main(Path(folder), arguments)
        return dashboard_server.main(Path(folder), arguments)


if __name__ == "__main__":
    sys.exit(main())
