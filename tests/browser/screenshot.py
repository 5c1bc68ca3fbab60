"""The picture of the dashboard in the README: `python -m tests.browser.screenshot docs/images/dashboard.png`.

Does: serve the default model, keep it busy for a minute and a half, look at the overview. Does not: run as a test.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.browser import chromium
from tests.fakes.server import tonle_serve

WIDTH, HEIGHT = 1200, 790  # pixels
BUSY_S = 90
LOADS = ((2, 20), (8, 40), (4, 30))  # users, seconds


def take(path: Path) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        tonle_serve(
            None, "--price-per-hour", "2.5", "--sla-p95", "30s", "--history-db", f"{folder}/history.db"
        ) as server,
    ):
        commands = [
            f"{sys.executable} -m tonle bench --url {server.url} --quiet --concurrency {users} --duration {seconds} "
            "--input-tokens 40-300 --output-tokens 16-96 --shared-prefix-tokens 64"
            for users, seconds in LOADS
        ]
        load = subprocess.Popen(["sh", "-c", "; ".join(commands)], stdout=subprocess.DEVNULL)
        try:
            with chromium.running() as browser:
                page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
                page.goto(f"{server.url}/dashboard")
                page.get_by_test_id("page-overview").wait_for()
                page.wait_for_timeout(BUSY_S * 1000)  # a picture of a minute and a half takes that long
                path.parent.mkdir(parents=True, exist_ok=True)
                page.screenshot(path=path)
        finally:
            load.terminate()
            load.wait()


if __name__ == "__main__":
    take(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images/dashboard.png"))
