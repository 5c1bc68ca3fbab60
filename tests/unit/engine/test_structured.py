"""Structured output through a whole engine, with a tiny model: what is asked for crosses to the loop, and the answer is that."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakes.checkpoints import TURN_END, tiny_model, tiny_tokenizer
from tests.fakes.grammars import BOMBS
from tests.unit.engine.test_front import Engine
from tonle import EngineConfig, GenerationConfig, InferenceEngine, StructuredOutput
from tonle.engine.messages import Submit
from tonle.engine.request import Thinking
from tonle.errors import InvalidRequest

SCHEMA = {
    "type": "object",
    "properties": {
        "ឈ្មោះ": {"type": "string", "maxLength": 4},
        "n": {"type": "integer", "minimum": 1, "maximum": 99},
        "ok": {"enum": [True, None]},
    },
    "required": ["ឈ្មោះ", "n", "ok"],
}


@pytest.fixture(scope="module")
def engine() -> Iterator[InferenceEngine]:
    config = EngineConfig(max_batch_size=8, max_sequence_length=512, memory_pool_size=2**24)
    with InferenceEngine(tiny_model("llama"), tiny_tokenizer(), config) as made:
        yield made


def ask(structured: StructuredOutput | None, **fields: Any) -> GenerationConfig:
    return GenerationConfig(**{"max_tokens": 150, "temperature": 1.0, "structured": structured} | fields)


class TestTheFront:
    def test_the_grammar_crosses_and_the_schema_does_not(self) -> None:
        played = Engine()
        config = ask(StructuredOutput(json=SCHEMA), n=2)
        played.front.submit([1, 2, 3], config)
        (sent,) = [message for message in played.sent if isinstance(message, Submit)]
        assert len({request.grammar for request in sent.requests}) == 1 and "ឈ្មោះ" in sent.requests[0].grammar
        assert all(request.config.structured is None for request in sent.requests)
        assert config.structured is not None, "the caller's own is left as it was"

    @pytest.mark.parametrize(
        ("fields", "param", "words"),
        [
            ({"structured": StructuredOutput()}, "structured", "exactly one of"),
            ({"structured": {"json": {}}}, "structured", "must be a StructuredOutput, not dict"),
            ({"thinking": Thinking(start=[5])}, "thinking", "tokens that end it"),
            ({"thinking": Thinking(end=[5], budget=-1)}, "thinking.budget", "at least 0"),
            ({"thinking": Thinking(end=[10_000])}, "thinking", "0..9999"),
        ],
    )
    def test_mistakes_name_the_field(self, fields: dict[str, Any], param: str, words: str) -> None:
        with pytest.raises(InvalidRequest) as caught:
            Engine().front.submit([1, 2, 3], GenerationConfig(**fields))
        assert caught.value.param == param and words in caught.value.message

    def test_any_depth_of_schema_is_refused_and_no_more(self) -> None:
        schema: Any = {}
        for _ in range(50_000):
            schema = {"items": schema}
        with pytest.raises(InvalidRequest, match="more than 100 levels"):
            Engine().front.submit([1, 2, 3], ask(StructuredOutput(json=schema)))


class TestTheEngine:
    def test_answers_are_what_the_schema_says(self, engine: InferenceEngine) -> None:
        ids = [engine.submit_request("hello", ask(StructuredOutput(json=SCHEMA), seed=seed)) for seed in range(12)]
        free = engine.submit_request("hello", ask(None, max_tokens=40, early_stopping=False))
        for request_id in ids:
            result = engine.result(request_id, timeout=60)
            assert result.finish_reason == "stop"
            assert list(json.loads(result.text)) == ["ឈ្មោះ", "n", "ok"]
        assert len(engine.result(free, timeout=60).output_ids[0]) == 40

    def test_streamed_with_logprobs_and_n(self, engine: InferenceEngine) -> None:
        async def collect(config: GenerationConfig) -> dict[int, str]:
            texts: dict[int, str] = {}
            async for delta in engine.stream("hello", config):
                texts[delta.index] = texts.get(delta.index, "") + delta.text
            return texts

        for fields in (
            {"n": 3},
            {"logprobs": 2},
            {"early_stopping": False},
            {"min_tokens": 100},
            {"stop_token_ids": [TURN_END]},
        ):
            texts = asyncio.run(collect(ask(StructuredOutput(json=SCHEMA), **fields)))
            assert all(json.loads(text)["n"] in range(1, 100) for text in texts.values())

    @pytest.mark.parametrize(
        "structured",
        [
            StructuredOutput(regex=r"[a-c]{3}-\d"),
            StructuredOutput(choice=["ខ្មែរ", "english"]),
            StructuredOutput(grammar='root ::= "a" [0-9]{2}'),
        ],
    )
    def test_greedy_text_is_of_the_grammar_too(self, engine: InferenceEngine, structured: StructuredOutput) -> None:
        from tests.fakes.grammars import accepts

        result = engine.result(engine.submit_request("hello", ask(structured, do_sample=False)), timeout=60)
        assert result.finish_reason == "stop" and accepts(structured, result.text)

    def test_a_budget_closes_the_thoughts(self, engine: InferenceEngine) -> None:
        """The tiny model never ends a thought by itself."""
        thinking = Thinking(start=[3], end=[5, 6], is_open=True, budget=7, closing=[4, 5, 6])
        config = ask(StructuredOutput(choice=["yes", "no"]), thinking=thinking, logit_bias={6: -100.0})
        result = engine.result(engine.submit_request("hello", config), timeout=60)
        tokens = result.output_ids[0]
        assert tokens[7:10] == [4, 5, 6]
        assert engine.tokenizer.decode(tokens[10:]) in ("yes", "no")

    def test_mistakes_are_the_callers(self, engine: InferenceEngine) -> None:
        for structured, words in (
            (StructuredOutput(regex="("), "unclosed group"),
            (
                StructuredOutput(json={"oneOf": [{"type": "integer"}, {"type": "number"}]}),
                "at #: oneOf is supported where",
            ),
        ):
            with pytest.raises(InvalidRequest, match=words.replace("(", r"\(")):
                engine.result(engine.submit_request("hello", ask(structured)), timeout=60)

    def test_others_are_served_while_bombs_go_off(self, engine: InferenceEngine) -> None:
        bombs = [engine.submit_request("hello", ask(bomb, max_tokens=8)) for bomb in BOMBS.values()]
        free = [engine.submit_request("hello", ask(None, max_tokens=20, early_stopping=False)) for _ in range(4)]
        bound = engine.submit_request("hello", ask(StructuredOutput(choice=["yes"])))
        assert all(len(engine.result(request_id, timeout=60).output_ids[0]) == 20 for request_id in free)
        assert engine.result(bound, timeout=60).text == "yes"
        for request_id in bombs:
            try:
                engine.result(request_id, timeout=60)
            except InvalidRequest as error:
                assert "cannot be used" in error.message
        assert engine.is_running


def test_without_a_tokenizer_it_is_refused() -> None:
    config = EngineConfig(max_batch_size=2, max_sequence_length=64, memory_pool_size=2**22)
    with InferenceEngine(tiny_model("llama"), None, config) as engine:
        with pytest.raises(InvalidRequest, match="no tokenizer, which structured output would need"):
            engine.submit_request([5, 6], ask(StructuredOutput(json_object=True), max_tokens=8))
        thinking = Thinking(end=[5], is_open=True, budget=2)
        with pytest.raises(InvalidRequest, match="tokenizer"):
            engine.result(engine.submit_request([5, 6], ask(None, max_tokens=8, thinking=thinking)), timeout=60)
