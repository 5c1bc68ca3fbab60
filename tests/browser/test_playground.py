"""The playground, in a browser, against a real model: streams, two at once, stop, tools, a schema, code to copy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.browser.house import House
from tests.browser.signed_in import go_to, signed_in

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

KHMER = "ភ្នំពេញជារាជធានី"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"const": KHMER}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{
    "type": "function",
    "function": {
        "name": "get_time",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Phnom Penh"]}}, "required": ["city"]},
    },
}]  # fmt: skip


@pytest.fixture(scope="module")
def opened(browser: Browser, house: House) -> Iterator[Page]:
    with signed_in(browser, house.url, house.admin_key, "playground") as page:
        page.get_by_test_id("model").first.wait_for()
        yield page


@pytest.fixture
def page(opened: Page, house: House) -> Page:
    """Nothing said, settings as at first."""
    if opened.get_by_test_id("clear").is_enabled():
        opened.get_by_test_id("clear").click()
    opened.get_by_test_id("double").uncheck()
    if opened.get_by_test_id("reset").count():
        opened.get_by_test_id("reset").click()
    opened.get_by_test_id("model").select_option(house.model)
    opened.get_by_test_id("field-max_tokens").fill("24")
    return opened


def say(page: Page, text: str) -> None:
    page.get_by_test_id("draft").fill(text)
    page.get_by_test_id("draft").press("Enter")


def ended(page: Page, state: str = "done", number: int = 0) -> Locator:
    answer = page.locator(f"[data-testid=answer][data-state={state}]").nth(number)
    answer.wait_for()
    return answer


def set_json(page: Page, name: str, title: str, value: object) -> None:
    field = page.get_by_test_id(f"field-{name}")
    if not field.is_visible():
        page.locator("summary", has_text=title).click()
    field.fill(json.dumps(value))


def test_an_answer_streams_with_its_figures(page: Page) -> None:
    say(page, "Name a river in Cambodia.")
    answer = ended(page)
    assert answer.get_by_test_id("answer-text").inner_text()
    assert answer.get_by_test_id("figure-ttft").inner_text().endswith("s")
    assert float(answer.get_by_test_id("figure-speed").inner_text().replace(",", "")) > 0
    assert answer.get_by_test_id("figure-finish").inner_text() in ("stop", "length")
    say(page, "And another?")
    second = ended(page, number=1)
    assert "cached" in second.get_by_test_id("figure-prompt").inner_text()  # the first turn is its beginning


def test_an_answer_leads_to_where_its_time_went(page: Page) -> None:
    say(page, "Hello")
    ended(page).get_by_test_id("explain-link").click()
    page.get_by_test_id("waterfall").wait_for()
    go_to(page, "playground")
    ended(page)  # the conversation is still there


def test_khmer_comes_whole_and_is_pretty_printed(page: Page) -> None:
    set_json(page, "schema", "JSON schema", SCHEMA)
    page.get_by_test_id("field-max_tokens").fill("200")
    say(page, "រាជធានីនៃកម្ពុជា?")
    text = ended(page).get_by_test_id("answer-json").inner_text()
    assert json.loads(text) == {"city": KHMER}
    assert "\n" in text


def test_two_models_answer_side_by_side(page: Page) -> None:
    page.get_by_test_id("double").check()
    page.get_by_test_id("model").nth(1).select_option("river")
    say(page, "Say hello.")
    ended(page, number=1)
    assert page.get_by_test_id("pane").count() == 2
    assert all(pane.get_by_test_id("figure-ttft").count() == 1 for pane in page.get_by_test_id("pane").all())


def test_an_answer_is_stopped_and_keeps_what_came(page: Page) -> None:
    page.get_by_test_id("field-max_tokens").fill("2000")
    say(page, "Write a long story about a fisherman.")
    page.get_by_test_id("answer-text").first.wait_for()
    page.get_by_test_id("stop").click()
    assert ended(page, "stopped").get_by_test_id("answer-text").inner_text()
    page.get_by_test_id("send").wait_for()


def test_a_tool_is_called_and_its_result_sent(page: Page) -> None:
    set_json(page, "tools", "Tools", TOOLS)
    page.get_by_test_id("tool-choice").select_option("required")
    page.get_by_test_id("field-max_tokens").fill("60")
    say(page, "What time is it in Phnom Penh?")
    call = ended(page).get_by_test_id("tool-call")
    assert "get_time" in call.inner_text()
    assert "Phnom Penh" in call.inner_text()
    page.get_by_test_id("tool-choice").select_option("none")
    page.get_by_test_id("tool-result").fill("12:30")
    page.get_by_test_id("send-results").click()
    assert ended(page, number=1).get_by_test_id("answer-text").inner_text()


def test_what_is_wrong_is_said_before_anything_is_sent(page: Page) -> None:
    page.get_by_test_id("draft").fill("Hello")
    page.get_by_test_id("field-temperature").fill("9")
    page.get_by_text("Temperature must be 2 or less.").first.wait_for()
    assert page.get_by_test_id("send").is_disabled()
    page.get_by_test_id("field-temperature").fill("0")
    assert page.get_by_test_id("send").is_enabled()
    page.get_by_test_id("draft").fill("")


def test_a_refusal_of_the_server_is_shown_and_can_be_retried(page: Page) -> None:
    page.get_by_test_id("field-max_tokens").fill("999999")
    say(page, "Hello")
    assert ended(page, "failed").get_by_test_id("answer-error").inner_text()
    page.get_by_test_id("field-max_tokens").fill("4")
    page.get_by_test_id("retry").click()
    ended(page)


def test_code_has_the_request_and_no_key(page: Page, house: House) -> None:
    page.get_by_test_id("draft").fill("it's ភ្នំពេញ")
    if not page.get_by_test_id("code-curl").count():
        page.get_by_test_id("code").locator("summary").click()
    page.get_by_test_id("code-curl").click()
    curl = page.get_by_test_id("code-text").inner_text()
    assert f"{house.url}/v1/chat/completions" in curl
    assert "$TONLE_API_KEY" in curl
    above, code = page.get_by_test_id("code-copy").bounding_box(), page.get_by_test_id("code-text").bounding_box()
    assert above is not None and code is not None and above["y"] + above["height"] <= code["y"], (
        "it hides a part of the code"
    )
    page.get_by_test_id("code-python").click()
    python = page.get_by_test_id("code-text").inner_text()
    assert f'base_url="{house.url}/v1"' in python
    assert house.admin_key not in curl + python
    compile(python, "copied.py", "exec")
    page.get_by_test_id("draft").fill("")
