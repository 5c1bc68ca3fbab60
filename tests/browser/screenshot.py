"""Pictures of the dashboard under load: `python -m tests.browser.screenshot`.

    python -m tests.browser.screenshot                   # docs/images/dashboard.png, the one in the README
    python -m tests.browser.screenshot --all FOLDER      # every page at 390, 820 and 1400 px, light and dark

Does: start two replicas of the default model behind a gateway with keys, an experiment, an audit trail and an adapter; have
them asked by several keys, with some mistakes; draw. Does not: test anything.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from tests.browser import chromium
from tests.browser.house import House, bearer, running
from tests.browser.signed_in import READY, go_to, opened, signed_in

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

README_PICTURE = Path(__file__).parents[2] / "docs/images/dashboard.png"
WIDTH, HEIGHT = 1200, 900
WIDTHS = (390, 820, 1400)
CALLERS = {"mobile-app": ["models"], "nightly-batch": ["models"], "support-desk": ["models", "priority"]}
WARM_S = 280  # of load before the picture: it shows five minutes


@contextlib.contextmanager
def busy(house: House) -> Iterator[None]:
    """Three keys ask, one of them for a model that is not there now and then; some take part in the experiment."""
    stop = threading.Event()
    secrets = [house.make_key(name, *scopes)[1] for name, scopes in CALLERS.items()]
    delta = {"lora_name": "khmer-support", "lora_path": str(house.adapter("khmer-support")), "base_model": house.model}
    reply = httpx.post(f"{house.url}/v1/load_lora_adapter", json=delta, headers=bearer(house.admin_key), timeout=120)
    assert reply.is_success, reply.text

    def caller(number: int, secret: str) -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            model = {3: "river", 5: "khmer-support", 7: "river"}.get(turn % 8, house.model)
            times = 5 if turn % 3 else 40
            system = "A guide of the delta: " + "the water rises in June and falls in November. " * times
            body = {
                "model": "gpt-unknown" if turn % 13 == 0 else model, "user": f"{number}-{turn % 7}",
                "stream": turn % 2 == 0, "max_tokens": 16 + turn % 5 * 12, "ignore_eos": True,
                "messages": [{"role": "system", "content": system}, {"role": "user", "content": f"Question {turn}?"}],
            }  # fmt: skip
            with contextlib.suppress(httpx.HTTPError):
                httpx.post(f"{house.url}/v1/chat/completions", json=body, headers=bearer(secret), timeout=120)

    threads = [threading.Thread(target=caller, args=pair, daemon=True) for pair in enumerate(secrets)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(120)


def settled(page: Page, address: str) -> None:
    """Shown, with figures of this second."""
    go_to(page, address)
    page.get_by_test_id(READY[address if "/" not in address else "requests/{id}"]).first.wait_for()
    page.wait_for_timeout(1500)


def draw_all(browser: Browser, house: House, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    newest = house.told("dashboard/api/requests?status=ok")["requests"][3]["id"]
    addresses = [name.format(id=newest) for name in READY]
    for scheme in ("light", "dark"):
        with signed_in(browser, house.url, house.admin_key, color_scheme=scheme) as page:
            for address in addresses:
                for width in WIDTHS:
                    page.set_viewport_size({"width": width, "height": HEIGHT})
                    settled(page, address)
                    name = address.replace(newest, "one").replace("/", "-")
                    page.screenshot(path=folder / f"{name}-{width}-{scheme}.png", full_page=True)
        with opened(browser, house.url, width=390, color_scheme=scheme) as page:
            page.get_by_test_id("login-key").wait_for()
            page.screenshot(path=folder / f"login-390-{scheme}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", type=Path, metavar="FOLDER", help="every page, there, instead of the README's picture")
    parser.add_argument("--warm-s", type=float, default=WARM_S, help="seconds of load before the first picture")
    arguments = parser.parse_args()
    if chromium.find() is None:
        raise SystemExit(chromium.MISSING)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        house = stack.enter_context(running(Path(folder), num_replicas=2))
        stack.enter_context(busy(house))
        browser = stack.enter_context(chromium.running())
        threading.Event().wait(arguments.warm_s)
        if arguments.all is not None:
            draw_all(browser, house, arguments.all)
            return
        with signed_in(browser, house.url, house.admin_key, width=WIDTH, color_scheme="light") as page:
            page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
            settled(page, "overview")
            README_PICTURE.parent.mkdir(exist_ok=True)
            page.screenshot(path=README_PICTURE)
    print(f"{README_PICTURE}: {README_PICTURE.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
