"""Asking a server."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from pathlib import Path

import pytest

from tests.fakes.front import CACHED_TOKENS, FakeFront
from tests.http.serving import serving
from tests.unit.bench.scripted import (
    STREAM_END,
    STREAM_HEAD,
    Behaviour,
    Cut,
    Step,
    frame,
    json_reply,
    text_event,
)
from tests.unit.bench.scripted import serving as scripted_serving
from tests.unit.edge.certificates import Authority
from tonle.cli.backends import AnswerOptions, AnswerStats, Message, Prompt
from tonle.cli.backends.remote import RemoteBackend
from tonle.errors import CallerError, ContextOverflow, InternalError

QUESTION: list[Message] = [{"role": "user", "content": "hello"}]


def ask(
    url: str,
    prompt: Prompt,
    options: AnswerOptions | None = None,
    *,
    model: str | None = None,
    api_key: str | None = None,
) -> tuple[str, AnswerStats, str]:
    async def main() -> tuple[str, AnswerStats, str]:
        backend, stats = RemoteBackend(url, model=model, api_key=api_key), AnswerStats()
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


def test_no_server_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    expected = r"no server answers at http://127.0.0.1:1 \(connection refused: 127.0.0.1:1\)\. Is it running\?$"
    with pytest.raises(CallerError, match=expected):
        ask("127.0.0.1:1", QUESTION)
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:3128")
    with pytest.raises(CallerError, match="HTTPS_PROXY is set, but tonle connects directly"):
        ask("127.0.0.1:1", QUESTION)


@pytest.mark.parametrize("url", ["http://no-such-host.invalid:8000", "http://a..b:8000"])
def test_no_such_host(url: str) -> None:
    with pytest.raises(CallerError, match=r"no server answers at http://.*host not found.*Is the host name right\?"):
        ask(url, QUESTION)


def test_tls_that_fails_says_what_to_do(tmp_path: Path) -> None:
    certificate = Authority(tmp_path).issue("server")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate.cert, certificate.key)
    with scripted_serving(tls=tls) as server, pytest.raises(CallerError, match=r"TLS error.*SSL_CERT_FILE"):
        ask(server.url, QUESTION)
    with serving(FakeFront()) as url, pytest.raises(CallerError, match=r"TLS error.*use http://127.0.0.1:\d+$"):
        ask(url.replace("http", "https"), QUESTION)


@pytest.mark.parametrize(("given", "said"), [(None, "needs an API key"), ("wrong", "refuses the API key")])
def test_a_key_that_is_missing_or_wrong(given: str | None, said: str) -> None:
    with scripted_serving(Behaviour(key="right")) as server:
        with pytest.raises(CallerError, match=rf"{said} \(no such key\)\. Give one with --api-key or OPENAI_API_KEY"):
            ask(server.url, QUESTION, api_key=given)
        ask(server.url, QUESTION, AnswerOptions(max_tokens=1), api_key="right")


def test_a_key_that_cannot_be_sent() -> None:
    with pytest.raises(CallerError, match="API key contains a line break"):
        RemoteBackend("http://127.0.0.1:1", api_key="sk-1\n")


def test_a_server_of_another_kind() -> None:
    with (
        scripted_serving(Behaviour(models=None)) as server,
        pytest.raises(CallerError, match="is not an OpenAI-compatible server: it has no /v1/models"),
    ):
        ask(server.url, QUESTION)


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 6\r\n\r\n<html>"], "answer cannot be read"),
        ([json_reply(200, {"hello": 1})], "its answer has no choices"),
        ([STREAM_HEAD, frame(b"data: {oops\n\n"), STREAM_END], "a part of its answer cannot be read"),
        ([b"SSH-2.0-OpenSSH_9.9\r\n", 5.0], r"unreadable answer.*If it uses TLS, give its address as https://127"),
        ([json_reply(500, {"error": {"message": "out of order"}})], "the server answered 500: out of order$"),
        ([b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n"], "the server answered 502: Bad Gateway$"),
        (
            [b"HTTP/1.1 308 Moved\r\nLocation: https://there/\r\nContent-Length: 0\r\n\r\n"],
            "redirects to https://there/; give that address with --url",
        ),
    ],
)
def test_an_answer_that_is_none(steps: list[Step], said: str) -> None:
    with scripted_serving(Behaviour(script=lambda asked: steps)) as server, pytest.raises(CallerError, match=said):
        ask(server.url, QUESTION)


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([STREAM_HEAD, text_event("a"), Cut()], "the connection to http://.* broke: connection closed: by the server"),
        ([STREAM_HEAD, text_event("a"), STREAM_END], "ended its answer before it was complete"),
        ([Cut()], "connection closed: by the server, before it answered"),
    ],
)
def test_an_answer_that_breaks_off(steps: list[Step], said: str) -> None:
    with scripted_serving(Behaviour(script=lambda asked: steps)) as server, pytest.raises(InternalError, match=said):
        ask(server.url, QUESTION)


def test_a_server_that_closes_after_done_has_said_everything() -> None:
    steps = [STREAM_HEAD, text_event("a", "stop"), frame(b"data: [DONE]\n\n"), Cut()]
    with scripted_serving(Behaviour(script=lambda asked: steps)) as server:
        assert ask(server.url, QUESTION)[0] == "a"


def test_a_server_that_does_not_stream() -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": "all at once"}, "finish_reason": "stop"}
    steps = [json_reply(200, {"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 9}})]
    with scripted_serving(Behaviour(script=lambda asked: steps)) as server:
        text, stats, _ = ask(server.url, QUESTION)
    assert (text, stats.finish_reason, stats.completion_tokens) == ("all at once", "stop", 9)


def test_one_connection_serves_a_conversation() -> None:
    async def main(url: str) -> None:
        backend = RemoteBackend(url)
        await backend.start()
        for _ in range(3):
            answer = backend.answer(QUESTION, AnswerOptions(max_tokens=2), AnswerStats())
            assert [piece async for piece in answer] == [" word", " word"]
        await backend.close()

    with scripted_serving() as server:
        asyncio.run(main(server.url))
        assert server.num_connections == 1


def test_text_that_is_not_utf_8() -> None:
    with scripted_serving() as server, pytest.raises(CallerError, match="bytes that are not UTF-8"):
        ask(server.url, "a\udc80")


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
