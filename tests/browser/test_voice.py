"""The page Voice, in a browser with a microphone that beeps: a gateway in front of a server with scripted speech."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser.signed_in import opened
from tests.browser.test_every_page import AXE, WIDTHS, faults
from tests.fakes.server import tonle_gateway
from tests.fakes.voice_server import QUESTION, SENTENCES, VoiceServer, voice_server_in_thread, wav_head
from tests.gateway.running_gateway import read_records

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

CHAT, SPEECH, TRANSCRIPTION = "/v1/chat/completions", "/v1/audio/speech", "/v1/audio/transcriptions"
SOUND = {"name": "question.wav", "mimeType": "audio/wav", "buffer": wav_head(32_000) + bytes(32_000)}
OnLoop = Callable[[Callable[[], object]], None]


@pytest.fixture(scope="module")
def place(
    browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, VoiceServer, OnLoop, Path]]:
    folder = tmp_path_factory.mktemp("voice")
    with voice_server_in_thread() as (server, on_loop):
        flags = ("--backend", server.url, "--audit-dir", str(folder / "audit"), "--history-db", "memory")
        with tonle_gateway(*flags) as gateway:
            yield gateway.url, server, on_loop, folder


@pytest.fixture
def page(browser: Browser, place: tuple[str, VoiceServer, OnLoop, Path]) -> Iterator[Page]:
    url, server, on_loop, _ = place
    on_loop(server.text.set)
    with opened(browser, url, "voice", permissions=["microphone"], reduced_motion="reduce") as found:
        found.get_by_test_id("voice").wait_for()
        found.get_by_role("heading", name="Voice").click()  # browsers play nothing before one
        yield found


def ended(page: Page, state: str = "done", number: int = 0) -> Locator:
    turn = page.get_by_test_id("voice-turn").nth(number)
    page.locator(f"[data-testid=voice-turn][data-state={state}]").first.wait_for()
    return turn


def test_a_file_is_transcribed_answered_and_spoken(page: Page, place: tuple[str, VoiceServer, OnLoop, Path]) -> None:
    _, server, _, folder = place
    before, known = len(server.asked), {record["id"] for record in read_records(folder / "audit")}
    page.get_by_test_id("voice-file").set_input_files(files=[SOUND])
    turn = ended(page)
    assert turn.get_by_test_id("voice-question").inner_text() == QUESTION
    assert turn.get_by_test_id("voice-answer").inner_text() == " ".join(SENTENCES)
    for mark in ("transcribed", "token", "sentence", "audio", "text", "speech"):
        assert turn.get_by_test_id(f"mark-{mark}").inner_text().endswith("s")
    turn.locator("summary").click()
    assert turn.locator("tbody tr").count() == 5
    asked = [each for each in server.asked[before:] if each.path in (CHAT, SPEECH, TRANSCRIPTION)]
    assert [each.json["input"] for each in asked if each.path == SPEECH] == SENTENCES
    assert b"\x80>\x00\x00" in next(each.body for each in asked if each.path == TRANSCRIPTION)[:400]  # 16,000 Hz
    turn.locator("tbody a").first.click()
    page.get_by_test_id("waterfall").wait_for()
    records = [record for record in read_records(folder / "audit") if record["id"] not in known]
    assert len({record["chain_id"] for record in records if record["endpoint"] in (CHAT, SPEECH, TRANSCRIPTION)}) == 1


def test_before_the_first_turn_it_says_what_it_does_and_later_turns_are_brought_into_view(page: Page) -> None:
    for width in (1400, 390):
        page.set_viewport_size({"width": width, "height": 700})
        page.get_by_test_id("voice-empty").get_by_text("Nothing was said yet").wait_for()
        for number in range(4):
            page.get_by_test_id("voice-file").set_input_files(files=[SOUND])
            turn = page.locator("[data-testid=voice-turn][data-state=done]").nth(number)
            turn.wait_for()
        assert page.get_by_test_id("voice-empty").count() == 0
        shown = "element => (box => box.top >= 0 && box.bottom <= innerHeight)(element.getBoundingClientRect())"
        assert turn.evaluate(shown) and page.get_by_test_id("talk").evaluate(shown), width
        page.get_by_test_id("voice-clear").click()


def test_talking_records_and_interrupts(page: Page, place: tuple[str, VoiceServer, OnLoop, Path]) -> None:
    _, server, on_loop, _ = place
    on_loop(server.text.clear)
    talk = page.get_by_test_id("talk")
    talk.click()
    page.get_by_test_id("voice-state").get_by_text("Listening").wait_for()
    page.wait_for_timeout(300)  # of sound
    talk.click()
    page.locator("[data-testid=voice-turn][data-state=speaking]").wait_for()
    assert talk.inner_text() == "Interrupt and talk"
    talk.press("Enter")
    ended(page, "stopped")
    on_loop(server.text.set)
    page.get_by_test_id("voice-state").get_by_text("Listening").wait_for()
    page.wait_for_timeout(300)
    talk.press("Enter")
    ended(page, number=1)
    assert server.of(CHAT)[-1].json["messages"][-2]["content"] == SENTENCES[0]  # what was heard


def test_stop_and_escape_end_it(page: Page, place: tuple[str, VoiceServer, OnLoop, Path]) -> None:
    _, server, on_loop, _ = place
    on_loop(server.text.clear)
    for number, stop in enumerate(("click", "Escape")):
        page.get_by_test_id("voice-file").set_input_files(files=[SOUND])
        page.get_by_test_id("voice-turn").nth(number).get_by_test_id("voice-answer").wait_for()
        if stop == "click":
            page.get_by_test_id("voice-stop").click()
        else:
            page.get_by_test_id("talk").press("Escape")
        page.locator("[data-testid=voice-turn][data-state=stopped]").nth(number).wait_for()
        assert page.get_by_test_id("talk").inner_text() == "Talk"


def test_it_is_usable_in_both_themes_and_on_a_phone(page: Page) -> None:
    page.get_by_test_id("voice-file").set_input_files(files=[SOUND])
    ended(page).locator("summary").click()
    page.evaluate(AXE.read_text())
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.wait_for_function("scheme => document.documentElement.dataset.theme === scheme", arg=scheme)
        assert faults(page) == []
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 844})
        page.wait_for_function("width => window.innerWidth === width", arg=width)
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, width


def test_a_server_without_speech_says_what_is_missing(
    browser: Browser, place: tuple[str, VoiceServer, OnLoop, Path]
) -> None:
    url, server, _, _ = place
    models = [entry for entry in server.models if "kind" not in entry]
    with opened(browser, url, "overview") as page:
        page.route("**/v1/models", lambda route: route.fulfill(json={"object": "list", "data": models}))
        page.evaluate("() => { window.location.hash = '#/voice'; }")
        page.get_by_test_id("voice-disabled").get_by_text("tonle serve --worker asr --worker tts").wait_for()
