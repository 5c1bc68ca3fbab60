"""The page of `tonle bench report`, opened as a file without a network: it is drawn at every width in both themes, and requests
show where their time went."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser.signed_in import HEIGHT, is_problem
from tests.browser.test_every_page import AXE, COLOURS, WIDTHS, faults
from tests.unit.bench.made_reports import GPU, SLO, made_level, made_report
from tonle.bench.html.page import render_page
from tonle.bench.report import Run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

# Of a canvas: pixels that something was drawn on.
DRAWN = """id => { const canvas = document.getElementById(id);
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return data.filter((value, place) => place % 4 === 3 && value).length; }"""
CANVASES = ("tokens", "users", "heat", "lanes")


@pytest.fixture(scope="module")
def report(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    levels = [made_level(users, slo=SLO, gpus=[GPU], failed=3, requests=60) for users in (1, 4)]
    file: Path = tmp_path_factory.mktemp("report") / "report.html"
    file.write_text(render_page([Run("before", made_report(levels)), Run("after", made_report(levels))]))
    context = browser.new_context(offline=True, bypass_csp=True)  # axe-core is a script of ours, not of the page's
    page = context.new_page()
    problems: list[str] = []
    asked: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda said: problems.append(said.text) if is_problem(said.type, said.text) else None)
    page.on("request", lambda request: asked.append(request.url))
    page.goto(file.as_uri())
    page.evaluate(AXE.read_text())
    yield page
    assert problems == []
    assert asked == [file.as_uri()]
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_it_is_drawn_and_fits(report: Page, scheme: str, width: int) -> None:
    report.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    report.set_viewport_size({"width": width, "height": HEIGHT})
    report.wait_for_function("width => window.innerWidth === width", arg=width)
    for name in CANVASES:
        # Drawn again with the next frame after a change of size.
        report.wait_for_function(f"id => ({DRAWN})(id) > 500", arg=name)
    assert report.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    assert faults(report) == []
    assert faults(report, COLOURS) == []


def test_a_request_under_the_pointer_tells_its_times(report: Page) -> None:
    report.set_viewport_size({"width": 1400, "height": HEIGHT})
    lanes, details = report.locator("#lanes"), report.locator("#request")
    lanes.scroll_into_view_if_needed()
    lanes.hover(position={"x": 300, "y": 10})
    first = details.inner_text()
    assert "ms" in first
    lanes.press("ArrowDown")  # by keyboard, too
    assert details.inner_text() not in ("", first)
    report.locator("#level").select_option(index=1)
    assert details.inner_text() != first


def test_its_policy_stops_other_scripts(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    text = render_page([Run("a", made_report([made_level(1)]))])
    file.write_text(text + "<script>document.title = 'run'</script>")
    context = browser.new_context(offline=True)
    page = context.new_page()
    page.goto(file.as_uri())
    assert page.title() != "run"
    context.close()
