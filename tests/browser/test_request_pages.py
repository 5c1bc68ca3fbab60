"""Requests with their waterfall and record, experiments, usage and audit, in a browser, against a real model."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.browser.house import House, bearer
from tests.browser.signed_in import HEIGHT, WIDTH, go_to, signed_in

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture(scope="module")
def asked(house: House) -> list[str]:
    """Ids of answered requests, of which the last ones took part in the experiment."""
    replies = [house.ask(f"Count to {number}.", stream=number % 2 == 0, max_tokens=12) for number in range(3)]
    replies += [house.ask(f"Say {number}.", model="river", user=f"user-{number}", max_tokens=8) for number in range(6)]
    assert all(reply.status_code == 200 for reply in replies)
    return [reply.headers["x-request-id"] for reply in replies]


@pytest.fixture(scope="module")
def admin(browser: Browser, house: House, asked: list[str]) -> Iterator[Page]:
    with signed_in(browser, house.url, house.admin_key, "requests") as page:
        yield page


def seconds(page: Page, test_id: str, name: str) -> list[float]:
    return [float(each.get_attribute(name) or "nan") for each in page.get_by_test_id(test_id).all()]


def test_a_waterfall_adds_up_to_the_latency_of_its_request(admin: Page, house: House, asked: list[str]) -> None:
    go_to(admin, f"requests/{asked[0]}")
    waterfall = admin.get_by_test_id("waterfall")
    waterfall.wait_for()
    admin.get_by_test_id("facts").get_by_text("not used").wait_for()  # the response cache
    total_s = float(waterfall.get_attribute("data-total") or "nan")
    starts, lengths = seconds(admin, "span", "data-start"), seconds(admin, "span", "data-seconds")
    assert len(lengths) >= 3
    assert sum(lengths) == pytest.approx(total_s, rel=1e-6)
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    assert starts == pytest.approx([0.0, *ends[:-1]], abs=1e-6)
    row = house.told(f"dashboard/api/requests/{asked[0]}")["request"]
    assert total_s == pytest.approx(row["total_s"], rel=1e-6)
    assert admin.get_by_test_id("sentences").locator("li").count() >= 1


def test_bars_are_where_their_spans_are(admin: Page, asked: list[str]) -> None:
    go_to(admin, f"requests/{asked[0]}")
    admin.get_by_test_id("waterfall").wait_for()
    track = admin.locator(".waterfall-track").first.bounding_box()
    bars = [bar.bounding_box() for bar in admin.locator("[data-testid=span] .waterfall-bar:first-child").all()]
    assert track is not None
    assert all(bar is not None for bar in bars)
    total_s = float(admin.get_by_test_id("waterfall").get_attribute("data-total") or "nan")
    for bar, start_s in zip(bars, seconds(admin, "span", "data-start"), strict=True):
        assert bar is not None
        assert bar["x"] - track["x"] == pytest.approx(track["width"] * start_s / total_s, abs=1.5)


def test_requests_of_one_id_open_one_by_one(admin: Page, house: House) -> None:
    headers = bearer(house.user_key) | {"x-request-id": "always-the-same"}
    texts = [f"Say {word}." for word in ("one", "two", "three")]
    for text in texts:
        body = {"model": house.model, "max_tokens": 2, "messages": [{"role": "user", "content": text}]}
        reply = httpx.post(f"{house.url}/v1/chat/completions", json=body, headers=headers, timeout=120)
        assert reply.status_code == 200
    go_to(admin, "requests")
    admin.get_by_test_id("filter-text").fill("always-the-same")
    rows = admin.get_by_test_id("requests-table").locator("tbody tr.opens")
    rows.nth(2).wait_for()
    assert rows.count() == 3
    for place, text in enumerate(reversed(texts)):
        rows.nth(place).locator("button.open-row").click()
        admin.get_by_test_id("audit-record").locator("summary").first.click()
        admin.locator("[data-field=user_input]", has_text=text).wait_for()
        assert admin.locator("tbody tr.open").count() == 1
        rows.nth(place).locator("button.open-row").click()
        admin.get_by_test_id("request-detail").wait_for(state="detached")
    admin.get_by_test_id("filter-clear").click()


def test_the_record_of_a_request_is_shown_and_verified(admin: Page, asked: list[str]) -> None:
    go_to(admin, f"requests/{asked[1]}")
    detail = admin.get_by_test_id("request-detail")
    detail.get_by_test_id("verified").get_by_text("verified", exact=True).wait_for()
    detail.get_by_test_id("audit-record").locator("summary").first.click()
    assert detail.locator("[data-field=user_input]").inner_text().endswith("Count to 1.")
    detail.get_by_test_id("close-detail").click()
    detail.wait_for(state="detached")


def test_requests_appear_as_they_end_and_can_be_filtered(admin: Page, house: House, asked: list[str]) -> None:
    go_to(admin, "requests")
    table = admin.get_by_test_id("requests-table")
    admin.get_by_test_id("filter-text").fill("no-such-request")
    table.get_by_text("No request meets these conditions.").wait_for()
    admin.get_by_test_id("filter-clear").click()
    admin.get_by_test_id("pause").click()
    new = house.ask("Are you there?", max_tokens=4).headers["x-request-id"]
    admin.get_by_test_id("pause").get_by_text("1 new").wait_for()
    admin.get_by_test_id("filter-text").fill(new)
    table.get_by_text("No request meets these conditions.").wait_for()
    admin.get_by_test_id("pause").click()
    table.locator(".open-row").first.click()
    admin.get_by_role("heading", name=f"Request {new}").wait_for()
    go_to(admin, "requests")
    assert house.ask("Who?", model="no-such-model").status_code == 404
    admin.get_by_test_id("filter-text").fill("no-such-model")
    refused = table.locator("tbody tr", has_text="no-such-model").first
    refused.wait_for()
    assert refused.locator("td").all_inner_texts()[6:8] == ["–", "–"]  # it never had tokens
    admin.get_by_test_id("filter-text").fill("")


def test_an_experiment_shows_its_arms_with_their_requests(admin: Page) -> None:
    go_to(admin, "experiments")
    experiment = admin.get_by_test_id("experiment")
    experiment.get_by_test_id("arm").nth(1).wait_for()
    assert experiment.get_by_test_id("arm").count() == 2
    experiment.get_by_text("running", exact=True).wait_for()
    experiment.get_by_text("Too few to tell").or_(experiment.get_by_test_id("comparison").first).first.wait_for()


def test_usage_adds_up_and_can_be_downloaded(admin: Page, house: House) -> None:
    go_to(admin, "usage")
    table = admin.get_by_test_id("usage-table")
    table.get_by_text("user", exact=True).wait_for()
    rows = house.told("dashboard/api/usage")["rows"]
    total = admin.get_by_test_id("total-requests").inner_text()
    assert int(total.replace(",", "")) == sum(row["requests"] for row in rows) >= 10
    admin.get_by_test_id("usage-group").select_option("model")
    table.get_by_text("river", exact=True).wait_for()
    with admin.expect_download() as downloading:
        admin.get_by_test_id("usage-csv").click()
    assert Path(downloading.value.path()).read_text().startswith("day,key_id,")


def test_usage_of_sound_and_images_fits_the_screen(browser: Browser, house: House) -> None:
    more = {"sound": {"audio_s": 100.4, "characters": 732}, "ជំនួយអតិថិជន": {"images": 37}, "nightly-batch-of-texts": {}}
    rows = [
        {
            "day": f"{datetime.now(UTC):%Y-%m-%d}", "key_id": name, "key_name": name, "model": "m", "requests": 1140, "failed": 2,
            "prompt_tokens": 2_121_514, "cached_tokens": 20_464, "completion_tokens": 12_732, "device_s": 4210.2, "audio_s": 0,
            "characters": 0, "images": 0, "cost": 0.014067, **used,
        }
        for name, used in more.items()
    ]  # fmt: skip
    with signed_in(browser, house.url, house.reader_key) as page:
        page.route("**/dashboard/api/usage?*", lambda route: route.fulfill(json={"rows": rows}))
        go_to(page, "usage")
        table = page.get_by_test_id("usage-table")
        table.get_by_text("sound", exact=True).wait_for()
        for width in (1400, 820, 390):
            page.set_viewport_size({"width": width, "height": 844})
            page.wait_for_function("width => window.innerWidth === width", arg=width)
            assert table.evaluate("box => box.scrollWidth - box.clientWidth") <= 0, width
        page.get_by_test_id("usage-measure").select_option(
            "audio_s"
        )  # on a phone it has a column when the chart shows it
        page.get_by_role("heading", name="Sound per day (UTC)").wait_for()
        table.get_by_role("columnheader", name="Sound").wait_for()
        assert table.locator("tbody tr").first.locator("td:visible").all_inner_texts()[2] in ("–", "1 min 40 s")
        assert page.get_by_test_id("usage-chart").locator("text").last.inner_html() == f"{datetime.now(UTC):%m-%d}"


def test_the_audit_is_searched_and_verified(admin: Page) -> None:
    go_to(admin, "audit")
    table = admin.get_by_test_id("audit-table")
    admin.get_by_test_id("audit-text").fill("Count to 2.")
    admin.get_by_test_id("audit-search").click()
    table.locator("tbody tr").nth(1).wait_for(state="detached")
    assert table.get_by_role("columnheader", name="Path").is_visible()
    admin.set_viewport_size({"width": 820, "height": 900})
    table.get_by_role("columnheader", name="Path").wait_for(state="hidden")  # or names of models have three lines
    admin.set_viewport_size({"width": WIDTH, "height": HEIGHT})
    admin.get_by_test_id("verify-now").click()
    admin.locator("[data-testid=verify-report][data-ok=true]").wait_for()
    table.locator(".open-row").click()
    admin.get_by_test_id("audit-record-page").get_by_test_id("verified").wait_for()
    assert "Count to 2." in admin.get_by_test_id("record").inner_text()


def test_a_key_that_may_only_read_sees_requests_and_why_it_may_not_chat(
    browser: Browser, house: House, asked: list[str]
) -> None:
    with signed_in(browser, house.url, house.reader_key, "requests") as page:
        go_to(page, "playground")
        page.get_by_test_id("playground-disabled").get_by_text("scope").wait_for()
        assert page.get_by_test_id("draft").count() == 0
        go_to(page, f"requests/{asked[0]}")
        page.get_by_test_id("waterfall").wait_for()
