"""Khmer and Arabic in the playground, streamed in pieces that end inside a letter: the text so far, and its direction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.browser.signed_in import opened
from tests.fakes.chat_in_pieces import DONE, MODEL, ChatInPieces, chat_in_pieces, chunk
from tests.fakes.server import tonle_gateway

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

KHMER = "ភ្នំពេញ"  # signs below, above and after their letter: seven code points, three clusters
ARABIC = "مَرْحَبًا بِكُم"  # with marks of vowels

SHOWN = "text => document.querySelector('[data-testid=answer-text]')?.textContent === text"
DIRECTION = "element => getComputedStyle(element).direction"
# How far the letters from `start` to `end` are from the left and the right of their box, in pixels.
DISTANCES = """(element, [start, end]) => {
  const range = document.createRange();
  range.setStart(element.firstChild, start);
  range.setEnd(element.firstChild, end);
  const text = range.getBoundingClientRect(), box = element.getBoundingClientRect(), style = getComputedStyle(element);
  return [text.left - box.left - parseFloat(style.paddingLeft), box.right - parseFloat(style.paddingRight) - text.right];
}"""


@pytest.fixture(scope="module")
def place(browser: Browser) -> Iterator[tuple[str, ChatInPieces]]:
    with chat_in_pieces() as server, tonle_gateway("--backend", server.url, "--history-db", "memory") as gateway:
        yield gateway.url, server


@pytest.fixture
def page(browser: Browser, place: tuple[str, ChatInPieces]) -> Iterator[Page]:
    with opened(browser, place[0], "playground") as found:
        found.get_by_test_id("model").first.select_option(MODEL)
        yield found


def pieces_of(text: str) -> list[bytes]:
    """An event for each code point. Each piece ends in the middle of the next one's bytes."""
    events = [chunk(character) for character in text]
    cuts = [0, *(event.index(character.encode()) + 1 for event, character in zip(events[1:], text[1:], strict=True))]
    begun = [event[:cut] for event, cut in zip(events[1:], cuts[1:], strict=True)]
    return [event[cut:] + more for event, cut, more in zip(events, cuts, [*begun, b""], strict=True)]


def ask(page: Page) -> None:
    page.get_by_test_id("draft").fill("?")
    page.get_by_test_id("draft").press("Enter")


def end(page: Page, server: ChatInPieces) -> None:
    server.pieces.put(chunk("", "stop") + DONE)
    server.pieces.put(None)
    page.locator("[data-testid=answer][data-state=done]").wait_for()


@pytest.mark.parametrize(("text", "direction"), [(KHMER, "ltr"), (ARABIC, "rtl")], ids=["khmer", "arabic"])
def test_text_is_right_after_each_piece(page: Page, place: tuple[str, ChatInPieces], text: str, direction: str) -> None:
    _, server = place
    ask(page)
    for number, piece in enumerate(pieces_of(text), 1):
        server.pieces.put(piece)
        page.wait_for_function(SHOWN, arg=text[:number])  # no replacement character for the half that has come
        assert page.get_by_test_id("answer-text").evaluate(DIRECTION) == direction
    end(page, server)
    assert page.get_by_test_id("answer-text").text_content() == text


def test_each_paragraph_has_its_own_direction_while_it_streams(page: Page, place: tuple[str, ChatInPieces]) -> None:
    _, server = place
    ask(page)
    paragraphs = (ARABIC, KHMER)
    for number, text in enumerate(("\n\n".join(paragraphs[:1]), "\n\n".join(paragraphs)), 1):
        server.pieces.put(chunk(text if number == 1 else f"\n\n{KHMER}"))
        page.wait_for_function(SHOWN, arg=text)
        answer = page.get_by_test_id("answer-text")
        left, right = answer.evaluate(DISTANCES, [0, len(ARABIC)])
        assert right < 8 < left, "Arabic begins on the right"
        if number == 2:
            left, right = answer.evaluate(DISTANCES, [len(text) - len(KHMER), len(text)])
            assert left < 8 < right, "Khmer begins on the left"
    end(page, server)
