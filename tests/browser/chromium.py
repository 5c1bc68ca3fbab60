"""Which Chromium there is, and how it is started.

Does: find one on the path, or the one that Playwright installed; install one if it is run (`python -m tests.browser.chromium`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Nothing of the browser's own may touch a network.
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--enable-precise-memory-info",
    "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream",  # a microphone that beeps
)  # fmt: skip
MISSING = "there is no Chromium here; `make test-browser` installs one and runs these tests"


def find() -> str | None:
    """Its path; None if there is none."""
    for name in NAMES:
        if (path := shutil.which(name)) is not None:
            return path
    own = sorted(
        Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH", Path.home() / ".cache/ms-playwright")).glob(
            "chromium-*/*/chrome"
        )
    )
    return str(own[-1]) if own else None


@contextmanager
def running() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find(), args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


def install() -> int:
    if (path := find()) is not None:
        print(f"Chromium is installed: {path}")
        return 0
    if shutil.which("apt-get") and os.geteuid() == 0:
        print("Installing Chromium with apt-get")
        command = "apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium fonts-noto-core"
        done = subprocess.run(["sh", "-c", command], check=False).returncode
    else:
        print("Installing Chromium with Playwright")
        done = subprocess.run([sys.executable, "-m", "playwright", "install", "chromium"], check=False).returncode
    if find() is None:
        print("Chromium could not be installed: install it with the packages of your system, then try again")
        return done or 1
    return 0


if __name__ == "__main__":
    sys.exit(install())
