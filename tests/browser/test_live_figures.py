"""Figures under load, as a person sees them: charts move, history grows and is there after a reload, waterfalls add up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.browser.house import House
from tests.browser.signed_in import go_to, opened, signed_in

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

# Keeps what a card says, whenever it says something else.
WATCH = """(id) => {
  const value = document.querySelector(`[data-testid=${id}-value]`);
  window.said = [value.textContent];
  new MutationObserver(() => { if (value.textContent !== window.said.at(-1)) window.said.push(value.textContent); })
    .observe(value, { childList: true, characterData: true, subtree: true });
}"""
DRAWN = "(id) => document.querySelector(`[data-testid=${id}] canvas`).toDataURL()"
LONGEST_MS = 60_000  # of a wait; under load a request takes seconds


@pytest.fixture(scope="module")
def loaded(house: House) -> Iterator[House]:
    with house.load():
        yield house


@pytest.fixture(scope="module")
def page(browser: Browser, loaded: House) -> Iterator[Page]:
    with signed_in(browser, loaded.url, loaded.admin_key) as found:
        found.set_default_timeout(LONGEST_MS)
        yield found


def wait_for_figure(page: Page, name: str) -> None:
    """Until it is more than nothing."""
    page.wait_for_function(
        "id => /[1-9]/.test(document.querySelector(`[data-testid=${id}-value]`)?.textContent ?? '')", arg=name
    )


def history_of(page: Page, name: str) -> list[float]:
    """What the page would draw of the last five minutes."""
    found: list[float] = page.evaluate(
        """async (name) => (await (await fetch("/dashboard/api/history?range=300")).json())
             .series[name].filter((each) => each !== null)""",
        name,
    )
    return found


def test_charts_move_and_history_grows(page: Page) -> None:
    go_to(page, "overview")
    for name in ("requests-per-s", "output-tokens", "ttft", "itl", "e2e"):
        wait_for_figure(page, name)
    before, drawn = history_of(page, "e2e_p95"), page.evaluate(DRAWN, "output-tokens")
    page.evaluate(WATCH, "output-tokens")
    page.wait_for_function("() => window.said.length >= 4")
    assert page.evaluate(DRAWN, "output-tokens") != drawn
    page.wait_for_function(
        """async (least) => (await (await fetch("/dashboard/api/history?range=300")).json())
             .series.e2e_p95.filter((each) => each !== null).length > least""",
        arg=len(before),
    )
    assert history_of(page, "e2e_p95")[: len(before)] == pytest.approx(before)


def told_by_mouse(page: Page, most: int = 60) -> dict[str, str]:
    """What a chart tells beside the mouse, from its newest second backwards: the time, and the figure there."""
    plot = page.get_by_test_id("output-tokens").locator(".u-over")
    tooltip = page.get_by_test_id("output-tokens").locator(".tooltip")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box is not None
    told = {}
    for pixels in range(1, most):
        page.mouse.move(box["x"] + box["width"] - pixels, box["y"] + box["height"] / 2)
        if tooltip.is_visible():
            time, _, figure = tooltip.inner_text().partition("\n")
            told[time.strip()] = figure.strip()
    return told


def test_a_reload_shows_what_was_before(page: Page) -> None:
    go_to(page, "overview")
    wait_for_figure(page, "output-tokens")
    before = {time: figure for time, figure in told_by_mouse(page, 15).items() if any(map(str.isdigit, figure))}
    assert before
    with page.expect_response("**/dashboard/api/history?range=300"):
        page.reload()
    wait_for_figure(page, "output-tokens")
    after = told_by_mouse(page)
    kept = [time for time in before if time in after]
    assert kept
    assert {time: after[time] for time in kept} == {time: before[time] for time in kept}


def test_an_hour_is_drawn_from_what_the_server_kept(page: Page) -> None:
    go_to(page, "overview")
    with page.expect_response("**/dashboard/api/history?range=3600") as asking:
        page.get_by_test_id("range-3600").click()
    assert any(value for value in asking.value.json()["series"]["output_tokens_per_s"])
    assert "range=3600" in page.url
    page.get_by_test_id("range-300").click()


def test_the_waterfall_of_each_request_adds_up_while_others_run(page: Page) -> None:
    go_to(page, "requests")
    table = page.get_by_test_id("requests-table")
    table.locator(".open-row").nth(2).wait_for()
    page.get_by_test_id("pause").click()  # rows stay where they are
    for number in range(3):
        table.locator(".open-row").nth(number).click()
        waterfall = page.get_by_test_id("waterfall")
        waterfall.wait_for()
        spans = [float(span.get_attribute("data-seconds") or "nan") for span in page.get_by_test_id("span").all()]
        assert sum(spans) == pytest.approx(float(waterfall.get_attribute("data-total") or "nan"), rel=1e-6)
        shown = table.locator("tr.open td").last.inner_text()  # what the list calls its total
        assert shown in page.get_by_test_id("request-detail").inner_text()
        page.get_by_test_id("close-detail").click()
        waterfall.wait_for(state="detached")
    page.get_by_test_id("pause").click()


def test_backends_models_and_keys_have_lines_that_move(page: Page, loaded: House) -> None:
    for address, row in (("backends", "replica-a"), ("models", loaded.model), ("keys", "user")):
        go_to(page, address)
        line = page.get_by_test_id(address).locator("tbody tr", has_text=row).locator("canvas").first
        line.wait_for()
        drawn = line.evaluate("canvas => canvas.toDataURL()")
        page.wait_for_function("([canvas, drawn]) => canvas.toDataURL() !== drawn", arg=[line.element_handle(), drawn])


def test_a_lost_connection_is_told_and_comes_back(page: Page) -> None:
    go_to(page, "overview")
    page.get_by_test_id("connection").get_by_text("Live").wait_for()
    page.context.route("**/dashboard/api/live", lambda route: route.abort())
    page.reload()
    page.get_by_test_id("banner").get_by_text("The connection to the server is lost").wait_for()
    page.context.unroute("**/dashboard/api/live")
    page.get_by_test_id("connection").get_by_text("Live").wait_for()
    assert page.get_by_test_id("banner").inner_text() == ""


def test_motion_is_reduced_where_the_reader_asks_for_it(browser: Browser, house: House) -> None:
    moves = """() => [...document.querySelectorAll("*")].filter((each) => {
      const style = getComputedStyle(each);
      return [...style.transitionDuration.split(","), ...style.animationDuration.split(",")].some((time) => parseFloat(time) > 0);
    }).length"""
    found = {}
    for choice in ("reduce", "no-preference"):
        with opened(browser, house.backend_url, "overview", reduced_motion=choice) as quiet:
            quiet.get_by_test_id("kv-usage").wait_for()
            found[choice] = quiet.evaluate(moves)
    assert found["reduce"] == 0
    assert found["no-preference"] > 0  # there is something to reduce
