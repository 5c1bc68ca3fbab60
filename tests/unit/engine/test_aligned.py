"""Log-probabilities arrive with the text of their tokens, through a real front whose engine is played by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tests.unit.engine.text.corpus import CORPUS
from tests.unit.engine.text.tokenizers_for_tests import EOS, PlainTokenizer, byte_level_tokenizer
from tonle.engine.front import Front
from tonle.engine.generation import Generation
from tonle.engine.messages import LoopStats, ModelCard, Step, ToEngine
from tonle.engine.request import Delta, GenerationConfig, TokenLogprob
from tonle.engine.text import Text, load_text
from tonle.models.source import ModelSource

BYTES = Text.from_live(byte_level_tokenizer())
PROMPT = [65, 66]


class Play:
    """One request, one step at a time."""

    def __init__(self, text: Text, config: GenerationConfig, hold: str = "auto") -> None:
        self.sent: list[ToEngine] = []
        self.front = Front(text, "tiny", self.sent.append, hold_clusters=hold)
        self.front.deliver(ModelCard("L", 4096, 60_000, [EOS], "cpu", "float32", 16, 100, 8, 64, 1.0))
        self.generation: Generation = self.front.submit(PROMPT, config)

    def step(self, tokens: Sequence[int], *, last: bool = False) -> Delta | None:
        """The delta that these tokens bring, if any."""
        finished: dict[int, tuple[str, int | None]] = {1: ("length", None)} if last else {}
        logprobs = {1: [TokenLogprob(token, -token / 10, []) for token in tokens]}
        if self.generation.config.logprobs is None:
            logprobs = {}
        self.front.deliver(Step([1], [len(tokens)], list(tokens), finished, logprobs=logprobs, stats=LoopStats()))
        return self.generation._deltas.popleft() if self.generation._deltas else None

    def all(self, tokens: Sequence[int], size: int = 1) -> list[Delta]:
        groups = [tokens[at : at + size] for at in range(0, len(tokens), size)]
        found = [self.step(group, last=place == len(groups) - 1) for place, group in enumerate(groups)]
        return [delta for delta in found if delta is not None]


def config(**fields: object) -> GenerationConfig:
    return GenerationConfig(max_length=900, logprobs=0, **fields)  # type: ignore[arg-type]


def check(deltas: list[Delta], tokens: Sequence[int], text: Text) -> None:
    """Every delta's text is that of its tokens, whose log-probabilities it has."""
    for delta in deltas:
        assert delta.tokens and delta.text == text.decode(delta.tokens)
        assert [record.token for record in delta.logprobs or ()] == delta.tokens
    assert [token for delta in deltas for token in delta.tokens] == list(tokens)


@pytest.mark.parametrize("hold", ["auto", "always"])
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("script", ["khmer", "hindi", "emoji", "vietnamese_nfd", "mixed"])
def test_text_and_tokens_go_together(script: str, size: int, hold: str) -> None:
    for sentence in CORPUS[script]:
        tokens = list(sentence.encode())
        deltas = Play(BYTES, config(), hold).all(tokens, size)
        check(deltas, tokens, BYTES)
        assert "".join(delta.text for delta in deltas) == sentence


@pytest.mark.parametrize("sentence", ["hello, world", "សួស្តី!"])
def test_with_any_tokenizer(sentence: str) -> None:
    text, tokens = Text.from_live(PlainTokenizer()), list(sentence.encode())
    check(Play(text, config()).all(tokens), tokens, text)


@pytest.mark.model
def test_english_has_one_delta_per_token(default_model: ModelSource) -> None:
    text = load_text(default_model)
    tokens = text.encode("The capital of France is Paris; it has 2 million people.")
    deltas = Play(text, config()).all(tokens)
    assert [delta.tokens for delta in deltas] == [[token] for token in tokens]
    check(deltas, tokens, text)


@pytest.mark.parametrize(("hold", "shown"), [("auto", "The"), ("always", "Th")])
def test_the_first_token_brings_its_text(hold: str, shown: str) -> None:
    first = Play(BYTES, GenerationConfig(max_length=9), hold).step(list(b"The"))
    assert first is not None and (first.text, first.tokens) == (shown, [*b"The"])


def test_tokens_run_ahead_without_log_probabilities() -> None:
    play = Play(BYTES, GenerationConfig(max_length=9))
    delta = play.step("ក".encode())
    assert delta is not None and (delta.text, delta.tokens, delta.logprobs) == ("", list("ក".encode()), None)


def test_a_stop_string_ends_with_all_tokens() -> None:
    play = Play(BYTES, config(stop=["END"]))
    assert play.step(b"go E") is not None
    assert play.step(b"N") is None  # it may become the stop string
    last = play.step(b"D")
    assert last is not None and (last.text, last.tokens) == ("", [*b"END"])
    assert (last.finish_reason, last.stop_reason) == ("stop", "END")
    assert [record.token for record in last.logprobs or ()] == last.tokens
    assert play.generation.usage.completion_tokens == 6


def test_the_end_brings_what_waited() -> None:
    play = Play(BYTES, config())
    khmer = list("ស្ត".encode())
    assert play.step(khmer[:-1]) is None
    assert play.generation.timings.first_token_s is not None and play.generation.usage.completion_tokens == 0
    last = play.step(khmer[-1:], last=True)
    assert last is not None and last.finish_reason == "length"
    check([last], khmer, BYTES)


def test_an_end_inside_a_letter_keeps_its_log_probabilities() -> None:
    play = Play(BYTES, config())
    tokens = list("aក្".encode())
    deltas = play.all(tokens)
    assert "".join(delta.text for delta in deltas) == "aក"  # COENG waits for a letter that does not come
    assert [record.token for delta in deltas for record in delta.logprobs or ()] == tokens


def test_a_cancelled_request_counts_the_tokens_that_waited() -> None:
    play = Play(BYTES, config())
    play.step("aក".encode())
    play.generation.cancel()
    assert play.generation.usage.completion_tokens == 4


@pytest.mark.parametrize("steps_before", [0, 2, 4])
def test_a_whole_result_is_in_order(steps_before: int) -> None:
    async def scenario() -> None:
        play, tokens = Play(BYTES, config()), list("aក្ខ!".encode())
        deltas = [play.step([token]) for token in tokens[:steps_before]]
        seen = [token for delta in deltas if delta for token in delta.tokens]
        result = asyncio.ensure_future(play.generation.result())
        await asyncio.sleep(0)
        for token in tokens[steps_before:]:
            play.front.deliver(
                Step([1], [1], [token], {1: ("length", None)} if token == tokens[-1] else {},
                     logprobs={1: [TokenLogprob(token, -0.5, [])]}, stats=LoopStats())
            )  # fmt: skip
        done = await result
        assert seen + done.output_ids[0] == tokens
        assert done.logprobs is not None and [record.token for record in done.logprobs[0]] == done.output_ids[0]
        assert done.usage.completion_tokens == len(tokens)

    asyncio.run(scenario())
