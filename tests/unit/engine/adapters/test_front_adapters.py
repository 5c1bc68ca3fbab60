"""Adapters as a front knows them: asking, finding, and what a new engine gets that the old one had."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.fakes.checkpoints import tiny_tokenizer
from tonle.engine.front import Front
from tonle.engine.messages import (
    AdapterInfo,
    AdapterReply,
    Adapters,
    LoadAdapter,
    ModelCard,
    Step,
    Submit,
    ToEngine,
    UnloadAdapter,
)
from tonle.engine.request import GenerationConfig
from tonle.engine.text import Text
from tonle.errors import EngineDied, EngineRestarting, InvalidRequest, ModelError, UnknownModel

ONE = AdapterInfo("one", 1, "aa" * 32, 4, "/adapters/one")
TWO = AdapterInfo("two", 2, "bb" * 32, 4, "/adapters/two")


def card(engine_id: int = 1, max_loras: int = 8) -> ModelCard:
    return ModelCard(
        "L", 512, 10_000, [], "cpu", "float32", 16, 100, 8, 64, 1.0, max_loras=max_loras, engine_id=engine_id
    )


class Engine:
    """A front whose engine is played by hand."""

    def __init__(self, *infos: AdapterInfo, max_loras: int = 8) -> None:
        self.sent: list[ToEngine] = []
        self.front = Front(Text.from_live(tiny_tokenizer()), "tiny", self.sent.append)
        self.front.deliver(Adapters(list(infos)))
        self.front.deliver(card(max_loras=max_loras))

    def restart(self, *infos: AdapterInfo, engine_id: int = 2) -> None:
        self.sent.clear()
        self.front.lose(EngineDied("it was killed"))
        self.front.deliver(Adapters(list(infos)))
        self.front.deliver(card(engine_id))


def test_a_request_carries_the_number_and_the_digest() -> None:
    engine = Engine(ONE)
    plain = engine.front.submit([1, 2], GenerationConfig(), salt=b"tenant")
    adapted = engine.front.submit([1, 2], GenerationConfig(), salt=b"tenant", adapter="one")
    first, second = (message.requests[0] for message in engine.sent if isinstance(message, Submit))
    assert (first.adapter, first.salt, plain.adapter) == (0, b"tenant", None)
    assert (second.adapter, second.salt, adapted.adapter) == (1, b"aa" * 32 + b"tenant", ONE)


def test_an_unknown_adapter_is_named_with_those_there_are() -> None:
    with pytest.raises(UnknownModel, match="there is no adapter 'three'; loaded are one, two"):
        Engine(TWO, ONE).front.submit([1], GenerationConfig(), adapter="three")
    with pytest.raises(UnknownModel, match="none is loaded"):
        Engine().front.submit([1], GenerationConfig(), adapter="/etc/passwd")


def test_a_load_waits_for_its_reply() -> None:
    async def main() -> None:
        engine = Engine(ONE)
        task = asyncio.ensure_future(engine.front.load_adapter("two", Path("/adapters") / "two"))
        await asyncio.sleep(0)
        (message,) = engine.sent
        assert message == LoadAdapter(1, "two", "/adapters/two", False)
        engine.front.deliver(Adapters([ONE, TWO]))
        assert engine.front.adapters == {"one": ONE, "two": TWO} and not task.done()
        engine.front.deliver(AdapterReply(1))
        engine.front.deliver(Adapters([ONE]))  # another front was quick to unload it
        assert await task == TWO
        engine.front.deliver(Adapters([ONE, TWO]))

        task = asyncio.ensure_future(engine.front.unload_adapter("two"))
        await asyncio.sleep(0)
        assert engine.sent[-1] == UnloadAdapter(2, "two")
        engine.front.deliver(Adapters([ONE]))
        engine.front.deliver(AdapterReply(2))
        await task
        with pytest.raises(UnknownModel):
            await engine.front.unload_adapter("two")

    asyncio.run(main())


def test_of_two_fronts_that_unload_it_one_is_told_that_it_is_gone() -> None:
    async def main() -> None:
        engine = Engine(ONE)
        task = asyncio.ensure_future(engine.front.unload_adapter("one"))
        await asyncio.sleep(0)
        engine.front.deliver(Adapters([]))  # the other's
        engine.front.deliver(AdapterReply(1, "no adapter 'one' is loaded"))
        with pytest.raises(UnknownModel, match="no adapter 'one' is loaded"):
            await task

    asyncio.run(main())


def test_the_home_of_an_unknown_user_is_for_the_engine_to_miss() -> None:
    async def main() -> None:
        engine = Engine()
        task = asyncio.ensure_future(engine.front.load_adapter("one", "~no-such-user/one"))
        await asyncio.sleep(0)
        (message,) = engine.sent
        assert isinstance(message, LoadAdapter) and message.path.endswith("/~no-such-user/one")
        task.cancel()

    asyncio.run(main())


def test_what_a_load_may_end_with() -> None:
    async def main() -> None:
        engine = Engine(ONE)
        wrong = [("one", "/x", "is loaded already"), ("../x", "/x", "cannot be called"), ("x", "", "path must be"),
                 ("tiny", "/x", "the model itself is served under that name")]  # fmt: skip
        for name, path, words in wrong:
            with pytest.raises(InvalidRequest, match=words):
                await engine.front.load_adapter(name, path)
        assert engine.sent == []
        broken = asyncio.ensure_future(engine.front.load_adapter("one", "/x", replace=True))
        await asyncio.sleep(0)
        engine.front.deliver(AdapterReply(1, "tensor q_proj.lora_A has the wrong shape"))
        with pytest.raises(ModelError, match="wrong shape"):
            await broken
        lost = asyncio.ensure_future(engine.front.load_adapter("two", "/x"))
        await asyncio.sleep(0)
        engine.front.lose(EngineDied("it was killed"))
        with pytest.raises(EngineDied):
            await lost
        with pytest.raises(EngineRestarting):
            await engine.front.load_adapter("two", "/x")

    asyncio.run(main())


def test_an_engine_without_adapters_says_how_to_have_them() -> None:
    with pytest.raises(InvalidRequest, match="--enable-lora"):
        asyncio.run(Engine(max_loras=0).front.load_adapter("one", "/x"))


def test_a_new_engine_gets_what_was_loaded_while_the_old_one_ran() -> None:
    async def main() -> None:
        engine = Engine(ONE)
        engine.front.deliver(Adapters([ONE, TWO]))
        engine.restart(ONE)
        assert engine.sent == [LoadAdapter(1, "two", "/adapters/two", False)]
        with pytest.raises(EngineRestarting, match="is being loaded again"):
            engine.front.submit([1], GenerationConfig(), adapter="two")
        engine.front.submit([1], GenerationConfig(), adapter="one")
        assert engine.front.awaited_adapters == {"two": TWO}
        engine.front.deliver(Adapters([ONE, AdapterInfo("two", 7, "bb" * 32, 4, "/adapters/two")]))
        engine.front.deliver(AdapterReply(1))
        engine.front.submit([1], GenerationConfig(), adapter="two")
        assert isinstance(engine.sent[-1], Submit) and engine.sent[-1].requests[0].adapter == 7
        assert not engine.front.awaited_adapters

    asyncio.run(main())


def test_an_engine_that_dies_before_it_has_all_back_is_followed_by_one_that_gets_all() -> None:
    async def main() -> None:
        engine = Engine(ONE)
        engine.front.deliver(Adapters([ONE, TWO]))
        engine.restart(ONE)
        engine.front.lose(EngineDied("it was killed"))  # the connection and the process: twice
        assert engine.front.awaited_adapters == {"one": ONE, "two": TWO}, "while there is no engine, too"
        engine.restart(ONE, engine_id=3)
        assert engine.sent == [LoadAdapter(2, "two", "/adapters/two", False)]
        await asyncio.sleep(0)
        with pytest.raises(EngineRestarting):
            engine.front.submit([1], GenerationConfig(), adapter="two")

    asyncio.run(main())


def test_a_new_engine_is_told_of_what_was_replaced_or_unloaded() -> None:
    async def main() -> None:
        engine = Engine(ONE, TWO)
        engine.front.deliver(Adapters([AdapterInfo("one", 3, "cc" * 32, 4, "/adapters/other")]))
        engine.restart(ONE, TWO)
        assert engine.sent == [UnloadAdapter(1, "two"), LoadAdapter(2, "one", "/adapters/other", True)]

    asyncio.run(main())


def test_a_new_engine_does_not_bring_back_what_was_unloaded_to_the_last() -> None:
    async def main() -> None:
        engine = Engine(ONE)
        engine.front.deliver(Adapters([]))
        engine.front.lose(EngineDied("it was killed"))
        engine.front.deliver(Adapters([ONE]))  # of an engine that does not get ready
        engine.restart(ONE)
        assert engine.sent == [UnloadAdapter(1, "one")]

    asyncio.run(main())


OTHER = AdapterInfo("one", 3, "cc" * 32, 4, "/adapters/other")


def test_what_was_replaced_is_not_answered_with_what_the_engine_was_started_with() -> None:
    async def main() -> None:
        engine = Engine(ONE)
        engine.front.deliver(Adapters([OTHER]))
        engine.restart(ONE)
        engine.front.deliver(Adapters([ONE, TWO]))  # another is loaded first
        with pytest.raises(EngineRestarting, match="is being loaded again"):
            engine.front.submit([1], GenerationConfig(), adapter="one")
        engine.restart(ONE, engine_id=3)  # it died, too
        assert engine.sent[0] == LoadAdapter(2, "one", "/adapters/other", True)
        engine.front.deliver(Adapters([OTHER]))
        assert engine.front.submit([1], GenerationConfig(), adapter="one").adapter == OTHER

    asyncio.run(main())


def test_what_cannot_be_replaced_again_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        engine = Engine(ONE)
        engine.front.deliver(Adapters([OTHER]))
        engine.restart(ONE)
        engine.front.deliver(AdapterReply(1, "adapter one cannot be loaded: /adapters/other: no such folder"))
        await asyncio.sleep(0)
        assert engine.front.submit([1], GenerationConfig(), adapter="one").adapter == ONE

    asyncio.run(main())
    assert "no such folder" in caplog.text


def test_one_that_is_gone_for_good_is_unknown(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        engine = Engine()
        engine.front.deliver(Adapters([TWO]))
        engine.restart()
        engine.front.deliver(AdapterReply(1, "adapter two cannot be loaded: /adapters/two: no such folder"))
        await asyncio.sleep(0)
        with pytest.raises(UnknownModel):
            engine.front.submit([1], GenerationConfig(), adapter="two")

    asyncio.run(main())
    assert "no such folder" in caplog.text


def test_a_connection_that_was_lost_to_the_same_engine_restores_nothing() -> None:
    """Others may have unloaded it meanwhile."""

    async def main() -> None:
        engine = Engine(ONE, TWO)
        engine.restart(ONE, engine_id=1)
        assert engine.sent == [] and engine.front.adapters == {"one": ONE}
        with pytest.raises(UnknownModel):
            engine.front.submit([1], GenerationConfig(), adapter="two")

    asyncio.run(main())


def test_a_request_that_came_too_late_is_told_that_the_adapter_is_gone() -> None:
    async def main() -> None:
        engine = Engine(ONE)
        generation = engine.front.submit([1], GenerationConfig(), adapter="one")
        engine.front.deliver(Adapters([]))
        engine.front.deliver(Step([], [], [], refused={1: "its adapter is not loaded any more"}))
        with pytest.raises(UnknownModel, match="not loaded any more"):
            await generation.result()

    asyncio.run(main())
