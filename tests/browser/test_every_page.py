"""What holds for every page: no serious accessibility fault in either theme or on a phone, nothing wider than the window, no
refused request, all of it by keyboard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.house import House
from tests.browser.signed_in import HEIGHT, READY, WIDTH, go_to, opened, signed_in

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

AXE = Path(__file__).parent / "vendor/axe.min.js"
WIDTHS = (390, 820, 1400)
SERIOUS = """async (options) => (await axe.run(document, { resultTypes: ["violations"], ...options })).violations
  .filter((each) => ["serious", "critical"].includes(each.impact))
  .map((each) => `${each.id}: ${each.nodes[0].html.slice(0, 200)}`)"""
COLOURS = {"runOnly": ["color-contrast", "link-in-text-block"]}  # all that a theme can change


@pytest.fixture(scope="module")
def request_id(house: House) -> str:
    """Of an answered request; others failed, and some took part in the experiment."""
    for number in range(4):
        assert house.ask(f"Say {number}.", model="river", user=f"user-{number}", max_tokens=4).is_success
    assert house.ask("Hello", model="no-such-model").status_code == 404
    reply = house.ask("Name a river.", stream=True)
    assert reply.is_success
    return reply.headers["x-request-id"]


@pytest.fixture(scope="module")
def admin(browser: Browser, house: House, request_id: str) -> Iterator[Page]:
    refused: list[str] = []
    # Without motion, so that colours are not looked at while they change.
    with signed_in(browser, house.url, house.admin_key, reduced_motion="reduce") as page:
        page.on("response", lambda reply: refused.append(reply.url) if reply.status >= 400 else None)
        page.evaluate(AXE.read_text())
        yield page
        assert refused == []


@pytest.fixture(params=list(READY))
def shown(admin: Page, request: pytest.FixtureRequest, request_id: str) -> Iterator[Page]:
    """Each page, in the light theme and at full width, with its data."""
    go_to(admin, request.param.format(id=request_id))
    admin.get_by_test_id(READY[request.param]).first.wait_for()
    yield admin
    admin.emulate_media(color_scheme="light")
    admin.set_viewport_size({"width": WIDTH, "height": HEIGHT})


def faults(page: Page, options: dict[str, Any] | None = None) -> list[str]:
    found: list[str] = page.evaluate(SERIOUS, options or {})
    return found


def test_it_has_no_serious_accessibility_fault(shown: Page) -> None:
    assert faults(shown) == []
    shown.emulate_media(color_scheme="dark")
    shown.wait_for_function("() => document.documentElement.dataset.theme === 'dark'")
    assert faults(shown, COLOURS) == []
    shown.set_viewport_size({"width": 390, "height": 844})
    assert faults(shown) == []


def test_nothing_is_wider_than_the_window(shown: Page) -> None:
    for width in WIDTHS:
        shown.set_viewport_size({"width": width, "height": HEIGHT})
        shown.wait_for_function("width => window.innerWidth === width", arg=width)
        assert shown.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, width


def test_no_column_is_cut_off_on_a_small_laptop(shown: Page) -> None:
    shown.set_viewport_size({"width": 1280, "height": HEIGHT})
    shown.wait_for_function("() => window.innerWidth === 1280")
    boxes = "[...document.querySelectorAll('.table-box')].map((box) => box.scrollWidth - box.clientWidth)"
    assert max(shown.evaluate(boxes), default=0) <= 0


def test_the_page_that_asks_for_a_key(browser: Browser, house: House) -> None:
    for scheme in ("light", "dark"):
        with opened(browser, house.url, width=390, color_scheme=scheme) as page:
            page.get_by_test_id("login-key").wait_for()
            page.evaluate(AXE.read_text())
            assert faults(page) == []
            assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_a_theme_is_chosen_and_stays(admin: Page) -> None:
    theme = "() => document.documentElement.dataset.theme"
    button = admin.get_by_test_id("theme")
    assert admin.evaluate(theme) == "light"
    button.click()
    button.click()
    assert (button.inner_text(), admin.evaluate(theme)) == ("Theme: dark", "dark")
    button.click()
    assert button.inner_text() == "Theme: system"


def focused(page: Page) -> str:
    """Its test id, or the text of it."""
    found: str = page.evaluate(
        "() => document.activeElement.dataset.testid ?? document.activeElement.textContent.trim()"
    )
    return found


def tab_to(page: Page, wanted: str, most: int = 60) -> None:
    for _ in range(most):
        page.keyboard.press("Tab")
        if focused(page) == wanted:
            outline = "getComputedStyle(document.activeElement).outlineStyle"
            assert page.evaluate(f"() => {outline}") != "none", f"{wanted} does not show that it has the keyboard"
            return
    raise AssertionError(f"{most} times Tab did not reach {wanted}; the last was {focused(page)}")


def test_all_can_be_done_by_keyboard(browser: Browser, house: House) -> None:
    with opened(browser, house.url) as page:
        page.get_by_test_id("login-key").wait_for()
        assert focused(page) == "login-key"
        page.keyboard.type(house.admin_key)
        page.keyboard.press("Enter")
        page.get_by_test_id("page-overview").wait_for()
        page.evaluate("() => document.activeElement.blur()")
        tab_to(page, "Skip to the page")
        page.keyboard.press("Enter")
        assert focused(page) == "page-overview"
        page.evaluate("() => { document.activeElement.blur(); window.getSelection().removeAllRanges(); }")
        page.reload()
        tab_to(page, "nav-keys")
        page.keyboard.press("Enter")
        page.get_by_test_id("page-keys").wait_for()
        tab_to(page, "Create a key")
        page.keyboard.press("Enter")
        tab_to(page, "key-name")
        page.keyboard.type("by keyboard")
        tab_to(page, "scope-metrics")
        page.keyboard.press("Space")
        page.keyboard.press("Enter")  # as in any form
        page.get_by_test_id("key-secret").wait_for()
        row = page.get_by_test_id("keys").locator("tbody tr", has_text="by keyboard")
        row.get_by_text("models, metrics").wait_for()
        row.get_by_role("button", name="Revoke by keyboard").focus()
        page.keyboard.press("Enter")
        page.wait_for_function("() => document.activeElement.textContent === 'Yes'")  # the question has the keyboard
        page.keyboard.press("Enter")
        row.wait_for(state="detached")
