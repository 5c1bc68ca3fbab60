"""Asking a server."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from tests.fakes.front import CACHED_TOKENS, FakeFront
from tests.http.serving import serving
from tonle.cli.backends import AnswerOptions, AnswerStats, Message, Prompt
from tonle.cli.backends.remote import RemoteBackend
from tonle.errors import CallerError, ContextOverflow, InternalError

QUESTION: list[Message] = [{"role": "user", "content": "hello"}]


def ask(
    url: str, prompt: Prompt, options: AnswerOptions | None = None, *, model: str | None = None
) -> tuple[str, AnswerStats, str]:
    async def main() -> tuple[str, AnswerStats, str]:
        backend, stats = RemoteBackend(url, model=model), AnswerStats()
        try:
            await backend.start()
            pieces = [piece async for piece in backend.answer(prompt, options or AnswerOptions(), stats)]
            return "".join(pieces), stats, backend.name
        finally:
            await backend.close()

    return asyncio.run(main())


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_a_chat_is_answered_and_counted(suffix: str) -> None:
    with serving(FakeFront()) as url:
        text, stats, name = ask(url + suffix, QUESTION)
    assert (text, name, stats.finish_reason) == ("សួស្តី, I am scripted.", "scripted", "stop")
    assert (stats.completion_tokens, stats.cached_tokens, stats.exact) == (len(text.encode()) + 1, CACHED_TOKENS, True)
    assert stats.ttft_s is not None
    assert stats.context_length == 512


def test_line_separators_inside_an_answer_survive() -> None:
    said = "a\u2028b\x85c\rd\ne"
    with serving(FakeFront(lambda prompt, index: said)) as url:
        assert ask(url, QUESTION)[0] == said


def test_text_is_continued_as_it_is_and_sampling_arrives() -> None:
    front = FakeFront(lambda prompt, index: f"({prompt})")
    with serving(front) as url:
        text, stats, _ = ask(url, "abc", AnswerOptions(temperature=0.25, top_p=0.5, max_tokens=3, seed=7))
    assert (text, stats.finish_reason) == ("(ab", "length")
    config = front.submitted[0][0].config
    assert (config.temperature, config.top_p, config.max_length, config.seed) == (0.25, 0.5, 3, 7)


def test_what_is_not_set_is_left_to_the_server() -> None:
    front = FakeFront()
    with serving(front) as url:
        _, tally, _ = ask(url, QUESTION)
    config, prompt = front.submitted[0][0].config, front.submitted[0][0].prompt
    assert (config.temperature, config.top_p, config.seed) == (1.0, 1.0, None)
    assert tally.max_tokens == config.max_length == 512 - len(prompt), "the server tells what it applied"


def test_a_full_context_is_told_apart() -> None:
    with serving(FakeFront()) as url, pytest.raises(ContextOverflow):
        ask(url, [{"role": "user", "content": "x" * 600}])


def test_a_model_the_server_lacks() -> None:
    with serving(FakeFront()) as url, pytest.raises(CallerError, match="has no model 'other'; it has scripted"):
        ask(url, QUESTION, model="other")


def test_an_engine_that_dies_in_mid_answer() -> None:
    front = FakeFront()
    front.die_after = 5
    with serving(front) as url, pytest.raises(InternalError, match="engine stopped"):
        ask(url, QUESTION)


def test_no_server_there() -> None:
    with pytest.raises(CallerError, match=r"no server answers at http://127.0.0.1:1 .* Is it running\?"):
        ask("127.0.0.1:1", QUESTION)


@pytest.mark.parametrize("url", ["http://[::1", "http://host:port"])
def test_no_url_at_all(url: str) -> None:
    with pytest.raises(CallerError, match="is not a valid URL"):
        ask(url, QUESTION)


def test_leaving_early_cancels_at_the_server() -> None:
    front = FakeFront()
    front.stall_after = 3

    async def main(url: str) -> None:
        backend = RemoteBackend(url)
        await backend.start()
        async with contextlib.aclosing(backend.answer(QUESTION, AnswerOptions(), AnswerStats())) as pieces:
            await anext(pieces)
        assert await asyncio.to_thread(front.cancelled.get, timeout=60)
        await backend.close()

    with serving(front) as url:
        asyncio.run(main(url))
