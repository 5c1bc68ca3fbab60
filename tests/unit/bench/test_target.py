"""Getting to know servers of different makes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.unit.bench.scripted import Behaviour, ScriptedServer, json_reply, serving
from tonle.bench import BenchOptions, Span
from tonle.bench.target import Target, explore
from tonle.edge.client import Address, HttpClient
from tonle.errors import ConfigError


def know(server: ScriptedServer, **options: Any) -> Target:
    async def run() -> Target:
        client = HttpClient(Address.parse(server.url), api_key=options.get("api_key"))
        try:
            return await explore(client, BenchOptions(**options))
        finally:
            client.close()

    return asyncio.run(run())


def test_the_first_model_is_taken() -> None:
    with serving(Behaviour(models=["one", "two"])) as server:
        target = know(server)
    assert target.model == "one"
    assert any("2 models" in note for note in target.notes)


def test_the_named_model_is_taken_whatever_is_listed() -> None:
    with serving(Behaviour(models=["one"])) as server:
        assert know(server, model="adapter").model == "adapter"


@pytest.mark.parametrize("models", [None, []])
def test_servers_that_list_nothing_are_tolerated(models: list[str] | None) -> None:
    with serving(Behaviour(models=models)) as server:
        target = know(server)
    assert target.model == "default"
    assert any("no models" in note for note in target.notes)


@pytest.mark.parametrize("field", ["prompt", "content"])  # vLLM's and Tonle's, llama-server's
def test_token_ids_where_the_server_tokenizes_and_takes_them(field: str) -> None:
    with serving(Behaviour(tokenize=field)) as server:
        target = know(server)
        probe = server.completions[-1].body["prompt"]
    assert target.scale is not None
    assert target.scale.kind == "ids"
    assert len(target.scale.units) >= 64
    assert set(probe) <= set(target.scale.units)
    assert target.scale.overhead == 0


def test_a_beginning_of_text_token_is_no_word_and_is_counted_as_overhead() -> None:
    class Beginning(ScriptedServer):
        def _script(self, asked: Any) -> Any:
            if asked.path == "/tokenize":
                words = asked.body["prompt"].split()
                return [json_reply(200, {"tokens": [1, *(hash(word) % 2**30 + 10 for word in words)]})]
            return super()._script(asked)

        def count_prompt(self, body: dict[str, Any]) -> int:
            return super().count_prompt(body) + 1

    server = Beginning(Behaviour())
    server.start()
    try:
        target = know(server)
    finally:
        server.stop()
    assert target.scale is not None
    assert 1 not in target.scale.units
    assert target.scale.overhead == 1


@pytest.mark.parametrize(
    "behaviour", [Behaviour(tokenize=None), Behaviour(takes_ids=False)], ids=["no tokenize", "no ids"]
)
def test_words_everywhere_else(behaviour: Behaviour) -> None:
    behaviour.words_overhead, behaviour.tokens_per_word = 7, 1.5
    with serving(behaviour) as server:
        target = know(server, input_tokens=Span(200, 200))
    assert target.scale is not None
    assert target.scale.kind == "words"
    assert target.scale.tokens_per_unit == pytest.approx(1.5, abs=0.02)
    assert target.scale.overhead == pytest.approx(7, abs=0.5)


def test_chat_means_words() -> None:
    with serving(Behaviour(words_overhead=20)) as server:
        target = know(server, endpoint="chat")
        assert {asked.path for asked in server.completions} == {"/v1/chat/completions"}
    assert target.scale is not None
    assert (target.scale.kind, target.scale.overhead, target.scale.tokens_per_unit) == ("words", 20, 1)


def test_without_usage_word_lengths_are_said_to_be_estimates() -> None:
    with serving(Behaviour(usage=False, tokenize=None)) as server:
        target = know(server)
    assert any("estimates" in note for note in target.notes)


def test_ids_can_be_insisted_on() -> None:
    with serving(Behaviour(tokenize=None)) as server:
        target = know(server, prompt_kind="ids")
    assert target.scale is not None
    assert target.scale.kind == "ids"
    with serving(Behaviour(takes_ids=False)) as server, pytest.raises(ConfigError, match="prompt must be a string"):
        know(server, prompt_kind="ids")


def test_a_server_that_reads_ids_as_text_gets_words() -> None:
    class Textual(ScriptedServer):
        def count_prompt(self, body: dict[str, Any]) -> int:
            return (
                6 * super().count_prompt(body) if isinstance(body.get("prompt"), list) else super().count_prompt(body)
            )

    server = Textual(Behaviour())
    server.start()
    try:
        target = know(server)
    finally:
        server.stop()
    assert target.scale is not None
    assert target.scale.kind == "words"
    assert any("192 tokens" in note for note in target.notes)


def test_a_wrong_key_is_an_error_that_says_so() -> None:
    with serving(Behaviour(key="right")) as server:
        with pytest.raises(ConfigError, match="--api-key"):
            know(server, api_key="wrong")
        assert know(server, api_key="right").model == "scripted"


def test_a_server_that_is_still_loading_is_an_error_that_says_so() -> None:
    class Loading(ScriptedServer):
        def _script(self, asked: Any) -> Any:
            return [json_reply(503, {"error": {"message": "loading weights"}})]

    server = Loading(Behaviour())
    server.start()
    try:
        with pytest.raises(ConfigError, match="not ready: HTTP 503, loading weights"):
            know(server)
    finally:
        server.stop()


def test_a_server_that_cannot_complete_anything_is_an_error() -> None:
    with (
        serving(Behaviour(script=lambda asked: [json_reply(500, {"error": {"message": "no weights"}})])) as server,
        pytest.raises(ConfigError, match="HTTP 500: no weights"),
    ):
        know(server)


def test_nobody_there_is_an_error_that_says_what_to_do() -> None:
    with serving() as server:
        pass
    with pytest.raises(ConfigError, match="Start the server"):
        know(server)
