"""How a front asks for embeddings: a bounded number at a time, all or nothing, and nothing left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest
import uvloop

from tests.fakes.checkpoints import tiny_model, tiny_tokenizer
from tests.parity.test_embeddings import expected
from tonle.engine import EngineConfig, InferenceEngine
from tonle.engine.embedding import Embedding, normalized
from tonle.engine.front import Front
from tonle.engine.messages import Cancel, LoopStats, ModelCard, Step, Submit, ToEngine
from tonle.engine.request import Request
from tonle.engine.text import Text
from tonle.errors import ContextOverflow, EngineDied, InternalError, InvalidRequest, TonleError

BATCH = 4


class Engine:
    """A front whose engine is played by hand."""

    def __init__(self) -> None:
        self.sent: list[ToEngine] = []
        self.front = Front(Text.from_live(tiny_tokenizer()), "tiny", self.sent.append)
        self.front.deliver(ModelCard("L", 32, 320, [], "cpu", "float32", 16, 100, BATCH, 64, 1.0, hidden_size=2))

    @property
    def requests(self) -> list[Request]:
        return [request for message in self.sent if isinstance(message, Submit) for request in message.requests]

    @property
    def cancelled(self) -> list[int]:
        return [handle for message in self.sent if isinstance(message, Cancel) for handle in message.handles]

    def answer(self, *requests: Request) -> None:
        """With the first token of each."""
        vectors = {each.handle: np.array([each.prompt[0], 1], "<f4").tobytes() for each in requests}
        started = {each.handle: (each.arrived_s + 1, 1) for each in requests}
        finished = {each.handle: ("stop", None) for each in requests}
        self.front.deliver(Step([], [], [], finished, started=started, embeddings=vectors, stats=LoopStats()))

    def embed(self, prompts: list[list[int]], **how: Any) -> asyncio.Task[list[Embedding]]:
        return asyncio.ensure_future(self.front.embed(prompts, **how))


def run(main: Coroutine[Any, Any, None]) -> None:
    uvloop.run(main)


def test_a_bounded_number_at_a_time() -> None:
    async def main() -> None:
        engine = Engine()
        task = engine.embed([[place + 1] for place in range(30)], pooling="mean", salt=b"tenant")
        await asyncio.sleep(0)
        done = 0
        while not task.done():
            open_now = engine.requests[done:]
            assert len(open_now) == min(2 * BATCH, 30 - done) == engine.front.num_live
            engine.answer(*open_now[1:3], open_now[0])
            done += len(open_now[:3])
            await asyncio.sleep(0)
        found = await task
        assert [each.vector.tolist() for each in found] == [[place + 1, 1] for place in range(30)]
        assert found[0].usage.cached_tokens == 1 and found[0].timings.latency_s is not None
        assert {(each.pooling, each.salt, each.config.max_length) for each in engine.requests} == {
            ("mean", b"tenant", 0)
        }
        assert engine.front.num_live == 0 and not engine.cancelled
        later = [each.arrived_s for each in engine.requests]
        assert later == sorted(later) and later[-1] > later[0], "those sent later stand behind what came meanwhile"

    run(main())


def test_a_caller_that_leaves() -> None:
    async def main() -> None:
        engine = Engine()
        task = engine.embed([[1]] * 30)
        await asyncio.sleep(0)
        first = engine.requests[0]
        engine.answer(first)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert sorted([*engine.cancelled, first.handle]) == [each.handle for each in engine.requests]
        assert engine.front.num_live == 0
        engine.answer(*engine.requests)  # too late, and no harm
        assert len(engine.requests) == 2 * BATCH + 1

    run(main())


@pytest.mark.parametrize("how", ["error", "refused", "lost"])
def test_one_that_fails_ends_all(how: str) -> None:
    async def main() -> None:
        engine = Engine()
        task = engine.embed([[1]] * 3)
        other = engine.embed([[1]])
        await asyncio.sleep(0)
        handle = engine.requests[1].handle
        if how == "lost":
            engine.front.lose(InternalError("out of memory"))
        elif how == "refused":
            engine.front.deliver(Step([], [], [], refused={handle: "no room"}, stats=LoopStats()))
        else:
            engine.front.deliver(Step([], [], [], {handle: ("error", None)}, stats=LoopStats()))
        kinds: dict[str, type[TonleError]] = {"error": InternalError, "refused": InvalidRequest, "lost": EngineDied}
        with pytest.raises(kinds[how]):
            await task
        assert len(engine.cancelled) == (0 if how == "lost" else 3)
        if how != "lost":
            engine.answer(engine.requests[-1])
            assert len(await other) == 1
        else:
            with pytest.raises(EngineDied):
                await other
        assert engine.front.num_live == 0

    run(main())


def test_what_is_refused_at_once() -> None:
    async def main() -> None:
        engine = Engine()
        for prompts, how, error, part in (
            ([[1], [1] * 33], {}, ContextOverflow, r"prompts\[1\] has 33 tokens"),
            ([[1], []], {}, InvalidRequest, "empty"),
            ([[1, 320]], {}, InvalidRequest, "0..319"),
            ([[1]], {"pooling": "max"}, InvalidRequest, "last or mean"),
            ([[1]], {"priority": 9}, InvalidRequest, "priority"),
        ):
            with pytest.raises(error, match=part):
                await engine.front.embed(prompts, **how)  # type: ignore[arg-type]
        assert not engine.sent and await engine.front.embed([]) == []

    run(main())


def test_normalized() -> None:
    vectors = np.array([[3, 4], [0, 0], [1e20, 1e20]], np.float32)
    np.testing.assert_allclose(normalized(vectors), [[0.6, 0.8], [0, 0], [0.70710677, 0.70710677]])


def test_from_python() -> None:
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    with InferenceEngine(model, tokenizer, EngineConfig(max_sequence_length=128, device="cpu")) as engine:
        texts = ["the quick brown fox", "what is the capital?"]
        found = engine.embed(texts, pooling="mean")
        wanted = normalized(np.stack([expected(model, list(tokenizer.encode(text)), "mean") for text in texts]))
        np.testing.assert_allclose(found, wanted, atol=1e-5)
        assert found.dtype == np.float32
        one = engine.embed(list(tokenizer.encode(texts[0])), "mean", normalize=False)
        np.testing.assert_allclose(one, expected(model, list(tokenizer.encode(texts[0])), "mean"), atol=1e-4)
        again = asyncio.run(engine.embed_async([[{"role": "user", "content": "hello"}], [5, 6]]))
        assert again.shape == (2, 64)
        with pytest.raises(InvalidRequest, match="each text"):
            engine.embed([1.5])  # type: ignore[list-item]
        with pytest.raises(ContextOverflow):
            engine.embed([[5] * 129])
        assert engine.front.num_live == 0
