"""Waiting for a whole result gives what iterating would have given, also when it ends early."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
import uvloop

from tests.fakes.checkpoints import tiny_tokenizer
from tonle.engine import front as front_module
from tonle.engine import link
from tonle.engine.front import Front
from tonle.engine.generation import Generation
from tonle.engine.messages import LoopStats, ModelCard, Step, Submit, ToEngine
from tonle.engine.request import GenerationConfig, GenerationResult, TokenLogprob
from tonle.engine.text import Text
from tonle.errors import CapacityError, EngineRestarting
from tonle.telemetry.time_spent import TimeSpent

TOKENS = [11, 23, 35, 47, 19, 28]


class Engine:
    """A front whose engine is played by hand."""

    def __init__(self) -> None:
        self.sent: list[ToEngine] = []
        text = Text.from_live(tiny_tokenizer())
        self.front = Front(text, "tiny", self.sent.append)
        self.front.deliver(ModelCard("L", 512, 10_000, [], "cpu", "float32", 16, 100, 8, 64, 1.0))

    def submit(self, config: GenerationConfig) -> Generation:
        return self.front.submit([1, 2, 3], config)

    def step(self, handle: int, token: int, *, last: bool = False) -> None:
        finished: dict[int, tuple[str, int | None]] = {handle: ("length", None)} if last else {}
        record = TokenLogprob(token, -token / 10, [])
        self.front.deliver(Step([handle], [1], [token], finished, logprobs={handle: [record]}, stats=LoopStats()))


async def play(config: GenerationConfig, *, waiting: bool, seen_before: int = 0) -> GenerationResult:
    """All tokens, one per step. `waiting`: for the result from the start; else after `seen_before` steps."""
    engine = Engine()
    generation = engine.submit(config)
    for token in TOKENS[:seen_before]:
        engine.step(1, token)
    result = asyncio.ensure_future(generation.result())
    if waiting:
        await asyncio.sleep(0)
    for token in TOKENS[seen_before:]:
        engine.step(1, token, last=token == TOKENS[-1])
        if 1 not in engine.front._live:
            break
    return await result


@pytest.mark.parametrize("stop", [[], ["zz"]], ids=["no stop strings", "a stop string"])
@pytest.mark.parametrize(("waiting", "seen_before"), [(True, 0), (True, 2), (False, 5)])
def test_a_result_is_all_deltas_joined(waiting: bool, seen_before: int, stop: list[str]) -> None:
    config = GenerationConfig(max_length=len(TOKENS), logprobs=0, stop=stop)
    result = asyncio.run(play(config, waiting=waiting, seen_before=seen_before))
    assert result.output_ids == [TOKENS]
    assert result.logprobs is not None and [record.token for record in result.logprobs[0]] == TOKENS
    text = Text.from_live(tiny_tokenizer()).stream([1, 2, 3])
    assert result.texts == [text.push(TOKENS) + text.finish()]
    assert result.usage.completion_tokens == len(TOKENS)
    assert result.finish_reasons == ["length"] and result.timings.first_token_s is not None


def test_a_cancelled_result_keeps_what_was_generated() -> None:
    async def scenario() -> GenerationResult:
        engine = Engine()
        generation = engine.submit(GenerationConfig(max_length=10))
        result = asyncio.ensure_future(generation.result())
        await asyncio.sleep(0)
        for token in TOKENS[:3]:
            engine.step(1, token)
        generation.cancel()
        assert isinstance(engine.sent[0], Submit) and len(engine.sent) == 2
        return await result

    result = asyncio.run(scenario())
    assert result.output_ids == [TOKENS[:3]] and result.finish_reasons == ["cancelled"]
    assert result.usage.completion_tokens == 3


def test_several_continuations_end_one_after_another() -> None:
    async def scenario() -> GenerationResult:
        engine = Engine()
        generation = engine.submit(GenerationConfig(max_length=3, n=2))
        result = asyncio.ensure_future(generation.result())
        await asyncio.sleep(0)
        for place, token in enumerate(TOKENS[:3]):
            engine.step(1, token, last=place == 2)
            engine.step(2, token + 1, last=place == 2)
        return await result

    result = asyncio.run(scenario())
    assert result.output_ids == [TOKENS[:3], [token + 1 for token in TOKENS[:3]]]
    assert result.usage.completion_tokens == 6 and result.finish_reasons == ["length", "length"]


def test_cancelled_before_anybody_waits() -> None:
    async def scenario() -> GenerationResult:
        engine = Engine()
        generation = engine.submit(GenerationConfig(max_length=10))
        engine.step(1, TOKENS[0])
        generation.cancel()
        generation.cancel()
        return await generation.result()

    assert asyncio.run(scenario()).finish_reasons == ["cancelled"]


def test_a_request_the_engine_dropped_can_be_tried_again() -> None:
    """The engine cancels what it computes for a front that does not read, and says so later."""

    async def use() -> None:
        engine = Engine()
        generation = engine.submit(GenerationConfig(max_length=8))
        engine.step(1, TOKENS[0])
        engine.front.deliver(Step([], [], [], {1: ("cancelled", None)}, stats=LoopStats()))
        with pytest.raises(CapacityError, match="did not read its answers in time"):
            await generation.result()
        assert engine.front.num_live == 0

    asyncio.run(use())


def test_an_engine_that_reads_nothing_is_sent_no_more_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped engine holds neither the event loop up nor ever more memory."""
    monkeypatch.setattr(link, "MAX_UNREAD_BYTES", 1 << 20)
    address = str(tmp_path / "engine")

    async def use() -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            own = link.EngineLink(address)
            front = Front(Text.from_live(tiny_tokenizer()), "tiny", own.send)
            own.start(front)
            for _ in range(12_000):
                if own._transport is not None:
                    break
                await asyncio.sleep(0.01)
            front.deliver(ModelCard("L", 200_000, 10_000, [], "cpu", "float32", 16, 100, 8, 64, 1.0))
            accepted: list[Generation] = []
            with pytest.raises(EngineRestarting, match="does not take requests"):
                accepted.extend(front.submit([9_999] * 100_000, GenerationConfig(max_length=1)) for _ in range(200))
            assert front.num_live == len(accepted) > 0, "nothing is left of the one that was refused"
            for generation in accepted:
                generation.cancel()  # this is still sent
            assert front.num_live == 0
            own.stop()

    uvloop.run(use())


def test_a_generation_is_told_where_the_time_of_its_slowest_continuation_went() -> None:
    engine = Engine()
    generation = engine.submit(GenerationConfig(max_tokens=1, n=2))
    slow, quick = TimeSpent(prefill_s=2.0), TimeSpent(queue_s=0.5)
    for handle, spent in ((1, slow), (2, quick)):
        assert generation.spent is (None if handle == 1 else slow)
        engine.front.deliver(Step([handle], [1], [11], {handle: ("length", None)}, spent={handle: spent, 99: quick}))
    assert generation.spent is slow and engine.front.num_live == 0


@pytest.mark.parametrize("how", ["stop string", "cancelled", "length"])
def test_a_generation_is_told_of_all_its_guesses_however_it_ends(how: str) -> None:
    engine = Engine()
    stop = Text.from_live(tiny_tokenizer()).stream([]).push(TOKENS[2:3]) if how == "stop string" else "not there"
    generation = engine.submit(GenerationConfig(max_tokens=9, stop=[stop]))
    counts = [(0, 0), (7, 1), (5, 2)]
    for place, (drafted, accepted) in enumerate(counts):
        guesses = {1: (drafted, accepted), 99: (50, 50)} if drafted else {}
        ends = {1: ("length", None)} if how == "length" and place == 2 else {}
        engine.front.deliver(Step([1], [1], [TOKENS[place]], ends, guesses=guesses))
    if how == "cancelled":
        generation.cancel()
    assert engine.front.num_live == 0
    assert (generation.draft_tokens, generation.accepted_tokens) == (12, 3)


def test_the_latest_requests_are_known_by_their_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_module, "_MAX_NAMES", 3)
    front = Engine().front
    for name in ("a", "b", "c"):
        front.submit([1, 2, 3], GenerationConfig(n=2 if name == "b" else 1), request_id=name)
    assert [front.request_name(handle) for handle in range(6)] == [None, None, "b", "b", "c", None]
