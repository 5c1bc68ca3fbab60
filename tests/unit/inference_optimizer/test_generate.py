"""Questions and answers: text, cache, history, streams, threads and event loops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from tests.unit.inference_optimizer.engines import LONG, SHORT, adds_up, small_engine, wait_until
from tonle.engine import GenerationConfig, InferenceEngine
from tonle.engine.schedule import Scheduler
from tonle.errors import ContextOverflow, EngineDied, InternalError, InvalidRequest, ShuttingDown
from tonle.inference_optimizer import OptimizedEngine, StreamedAnswer

HISTORY = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi!"}]


def below(engine: OptimizedEngine) -> InferenceEngine:
    return engine._runner._engine


def is_idle(engine: OptimizedEngine) -> bool:
    stats = below(engine).get_stats()
    return below(engine).front.num_live == 0 and (stats["num_running"], stats["num_waiting"]) == (0, 0)


@pytest.fixture(autouse=True)
def nothing_is_left(engine: OptimizedEngine) -> Iterator[None]:
    engine.clear_cache()
    yield
    wait_until(lambda: is_idle(engine) and engine.get_metrics()["in_progress"] == 0)


def test_the_answer_is_the_engines_own(engine: OptimizedEngine) -> None:
    response, metadata = engine.generate("I've been feeling anxious.", HISTORY, **SHORT)
    messages = [*HISTORY, {"role": "user", "content": "I've been feeling anxious."}]
    config = GenerationConfig(max_length=6, temperature=0, early_stopping=False)
    expected = below(engine).result(below(engine).submit_request(messages, config))  # type: ignore[arg-type]
    assert response == expected.text
    assert metadata["prompt_tokens"] == len(expected.prompt_ids) and metadata["completion_tokens"] == 6
    assert metadata["total_tokens"] == metadata["prompt_tokens"] + 6 and metadata["finish_reason"] == "length"
    assert metadata["model"] == engine.model == "tiny" and metadata["cache_hit"] is False
    assert (metadata["history_dropped"], metadata["truncation"]) == (0, None)
    parts = metadata["breakdown"]
    assert list(parts) == ["cache_lookup", "tokenization", "queue", "prefill", "generation", "decoding"]
    assert adds_up(metadata) and all(seconds > 0 for seconds in parts.values())


def test_a_second_time_it_comes_from_the_cache(engine: OptimizedEngine) -> None:
    first, computed = engine.generate("Test", use_cache=True, **SHORT)
    again, metadata = engine.generate("Test", use_cache=True, **SHORT)
    assert metadata["cache_hit"] is True and again == first
    assert adds_up(metadata) and metadata["breakdown"]["generation"] == 0
    assert {name: metadata[name] for name in ("prompt_tokens", "completion_tokens", "finish_reason")} == {
        name: computed[name] for name in ("prompt_tokens", "completion_tokens", "finish_reason")
    }
    assert engine.generate("Test", HISTORY, **SHORT)[1]["cache_hit"] is False
    assert engine.generate("Test", **(SHORT | {"max_tokens": 7}))[1]["cache_hit"] is False
    assert engine.clear_cache() == 3
    assert engine.generate("Test", **SHORT)[1]["cache_hit"] is False


@pytest.mark.parametrize(
    ("sampling", "use_cache", "hit"),
    [({}, None, True), ({}, False, False), ({"temperature": 0.9}, None, False), ({"temperature": 0.9}, True, True),
     ({"temperature": 0.9, "seed": 7}, None, True), ({"temperature": 0.9, "do_sample": False}, None, True)],
)  # fmt: skip
def test_what_is_cached(
    engine: OptimizedEngine, sampling: dict[str, Any], use_cache: bool | None, *, hit: bool
) -> None:
    for expected in (False, hit):
        assert engine.generate("Again?", None, use_cache, **SHORT, **sampling)[1]["cache_hit"] is expected
    assert engine.get_metrics()["cache"]["num_entries"] == int(hit)


def test_answers_expire_and_the_oldest_go_first(folder: Path) -> None:
    with small_engine(folder, cache_ttl_seconds=60, cache_max_size=2, max_tokens=2) as engine:
        now_s = 0.0
        cache = engine._runner.cache
        assert cache is not None
        cache._clock = lambda: now_s
        assert [engine.generate(text)[1]["cache_hit"] for text in "abcba"] == [False, False, False, True, False]
        now_s = 61.0
        assert engine.generate("a")[1]["cache_hit"] is False


def test_without_a_cache(folder: Path) -> None:
    with small_engine(folder, enable_cache=False, max_tokens=2) as engine:
        assert [engine.generate("a", use_cache=True)[1]["cache_hit"] for _ in range(2)] == [False, False]
        assert engine.get_metrics()["cache"] == {"enabled": False} and engine.clear_cache() == 0


def test_twenty_threads_with_one_question_compute_it_once(engine: OptimizedEngine) -> None:
    before = below(engine).get_stats()["generation_tokens"]
    misses = engine.get_metrics()["cache"]["misses"]
    gate = threading.Barrier(20)

    def ask(_: int) -> tuple[str, dict[str, Any]]:
        gate.wait(60)
        return engine.generate("What is the capital?", max_tokens=60, early_stopping=False)

    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(ask, range(20)))
    assert len({text for text, _ in answers}) == 1
    assert sorted(metadata["cache_hit"] for _, metadata in answers) == [False] + [True] * 19
    assert all(adds_up(metadata) for _, metadata in answers)
    assert engine.get_metrics()["cache"]["misses"] == misses + 1
    wait_until(lambda: below(engine).get_stats()["generation_tokens"] >= before + 60)
    assert below(engine).get_stats()["generation_tokens"] == before + 60


def test_twenty_threads_with_questions_of_their_own_get_their_own_answers(engine: OptimizedEngine) -> None:
    questions = [f"Question {number}" for number in range(20)]
    alone = [engine.generate(question, use_cache=False, **SHORT)[0] for question in questions]
    with ThreadPoolExecutor(20) as pool:
        together = list(pool.map(lambda question: engine.generate(question, **SHORT), questions))
    assert [text for text, _ in together] == alone and len(set(alone)) > 4
    assert not any(metadata["cache_hit"] for _, metadata in together)


def test_several_event_loops_at_once(engine: OptimizedEngine) -> None:
    async def ask(name: str) -> list[str]:
        return [
            text for text, _ in await asyncio.gather(*(engine.generate_async(f"{name}{n}", **SHORT) for n in range(4)))
        ]

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda name: asyncio.run(ask(name)), ["a", "b", "c"]))
    assert found == [[engine.generate(f"{name}{n}", **SHORT)[0] for n in range(4)] for name in "abc"]


def test_a_caller_that_gives_up_frees_its_request(engine: OptimizedEngine) -> None:
    async def main() -> None:
        task = asyncio.create_task(engine.generate_async("Go on", **LONG))
        await asyncio.to_thread(wait_until, lambda: below(engine).front.num_live == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    cancelled = engine.get_metrics()["cancelled"]
    asyncio.run(main())
    wait_until(lambda: is_idle(engine) and engine.get_metrics()["cancelled"] == cancelled + 1)


def test_a_request_whose_double_gave_up_is_computed(engine: OptimizedEngine) -> None:
    leader = engine.stream("The same", **LONG)
    next(leader)
    follower = engine.stream("The same", **LONG)
    wait_until(lambda: engine.get_metrics()["in_progress"] == 2)
    assert below(engine).front.num_live == 1
    leader.close()
    assert next(follower)
    assert below(engine).front.num_live == 1 and engine.get_metrics()["cache"]["num_entries"] == 0
    follower.close()
    assert list(leader) == list(follower) == [] and leader.metadata is None


# -- streams


def test_a_stream_has_the_same_text_and_facts(engine: OptimizedEngine) -> None:
    whole, facts = engine.generate("Stream this", use_cache=False, max_tokens=30, early_stopping=False)
    stream = engine.stream("Stream this", max_tokens=30, early_stopping=False)
    assert stream.metadata is None
    pieces = list(stream)
    assert "".join(pieces) == whole and len(pieces) > 3 and list(stream) == []
    assert stream.metadata is not None and adds_up(stream.metadata) and stream.metadata.keys() == facts.keys()
    assert stream.metadata["completion_tokens"] == 30 and stream.metadata["cache_hit"] is False

    async def again() -> None:
        replayed = engine.stream("Stream this", max_tokens=30, early_stopping=False)
        assert [piece async for piece in replayed] == [whole]
        assert replayed.metadata is not None and replayed.metadata["cache_hit"] is True

    asyncio.run(again())


@pytest.mark.parametrize("how", ["break", "close", "async break", "async with"])
def test_leaving_a_stream_early_frees_its_request(engine: OptimizedEngine, how: str) -> None:
    def leave() -> None:
        for _ in engine.stream("Go on", **LONG):
            assert not is_idle(engine)
            return

    async def leave_async() -> None:
        if how == "async with":
            async with aclosing(engine.stream("Go on", **LONG)) as stream:
                async for _ in stream:
                    return
        async for _ in engine.stream("Go on", **LONG):
            return

    if how == "close":
        stream = engine.stream("Go on", **LONG)
        next(stream)
        stream.close()
        assert list(stream) == [] and stream.metadata is None
    elif how == "break":
        leave()
    else:
        asyncio.run(leave_async())
    wait_until(lambda: is_idle(engine))
    assert engine.get_metrics()["cache"]["num_entries"] == 0


def test_a_reader_that_is_interrupted_loses_no_text() -> None:
    """A piece that arrives while the wait for it is cancelled is the next one."""

    async def main() -> None:
        puts: list[Callable[[str], None]] = []
        answer: Future[tuple[str, dict[str, Any]]] = Future()
        stream = StreamedAnswer(lambda put: puts.append(put) or answer, owner=None)
        for place in range(2):
            reading = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            if place:
                puts[0]("one ")
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
        puts[0]("two")
        answer.set_result(("one two", {}))
        assert [piece async for piece in stream] == ["one ", "two"] and stream.metadata == {}

    asyncio.run(main())


def test_a_streams_error_comes_with_its_first_piece(engine: OptimizedEngine) -> None:
    failed = engine.get_metrics()["failed"]
    stream = engine.stream("x" * 20000, **SHORT)
    with pytest.raises(ContextOverflow, match="user_input is too long"):
        next(stream)
    assert list(stream) == [] and engine.get_metrics()["failed"] == failed + 1


# -- prompts


def test_the_system_prompt_stands_before_the_history_unless_that_has_one(folder: Path) -> None:
    with small_engine(folder, system_prompt="Be kind.", context_window=2, max_tokens=2) as engine:
        count = lambda *messages: len(below(engine).tokenizer.encode_chat(list(messages)))  # noqa: E731
        kind, strict = ({"role": "system", "content": text} for text in ("Be kind.", "Be very strict."))
        question = {"role": "user", "content": "Hello?"}
        assert engine.generate("Hello?")[1]["prompt_tokens"] == count(kind, question)
        assert engine.generate("Hello?", [strict])[1]["prompt_tokens"] == count(strict, question)
        longer = [*HISTORY, *HISTORY, *HISTORY]
        metadata = engine.generate("Hello?", longer)[1]
        assert metadata["prompt_tokens"] == count(kind, *HISTORY, question) and metadata["history_dropped"] == 4
        assert metadata["truncation"] == (
            "the oldest 4 messages of the history (2 turns) left out: context_window is 2"
        )
        assert engine.generate("Hello?", longer)[1]["history_dropped"] == 4  # from the cache


@pytest.mark.parametrize(
    ("given", "said"),
    [(("",), "user_input must be a string that is not empty"), ((5,), "user_input must be a string"),
     (("x", "Hello"), "conversation_history must be a list"), (("x", ["Hello"]), r"conversation_history\[0\] must be a message"),
     (("x", [{"role": "user"}]), r"conversation_history\[0\] must be a message"),
     (("x", [{"role": "user", "content": 5}]), r"conversation_history\[0\]: content must be a string, not 5"),
     (("x", [{"role": "user", "content": "x", "odd": object()}]), "must hold strings, numbers"),
     (("x", [{"role": "usr", "content": "x"}]), r"conversation_history\[0\]\.role must be one of assistant, .*not 'usr'"),
     (("x", None, "yes"), "use_cache must be True, False or None")],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(engine: OptimizedEngine, given: tuple[Any, ...], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        engine.generate(*given)
    with pytest.raises(InvalidRequest, match=said):
        engine.stream(*given)


@pytest.mark.parametrize(
    ("sampling", "error", "said"),
    [({"temprature": 1}, TypeError, r"generate\(\) has no setting 'temprature'; did you mean temperature\?"),
     ({"n": 2}, TypeError, "has no setting 'n'"), ({"temperature": -1}, InvalidRequest, "temperature must be between"),
     ({"max_tokens": 0}, InvalidRequest, "max_length must be at least 1"),
     ({"max_tokens": 9000}, ContextOverflow, "max_tokens=9000 leaves no room for a prompt: the context holds 8192")],
)  # fmt: skip
def test_sampling_is_checked(engine: OptimizedEngine, sampling: dict[str, Any], error: type, said: str) -> None:
    with pytest.raises(error, match=said):
        engine.generate("x", **sampling)


def test_closing_ends_what_runs(folder: Path) -> None:
    engine = small_engine(folder)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.generate, "Go on", **LONG)
        wait_until(lambda: below(engine).front.num_live == 1)
        engine.close()
        with pytest.raises(ShuttingDown, match="closed while it worked"):
            running.result(60)
    engine.close()
    with pytest.raises(Exception, match="this engine was closed; create another one"):
        engine.generate("x")
    assert engine.get_metrics()["total_requests"] == 1


def test_closing_that_is_interrupted_still_ends_the_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = small_engine(folder)

    def interrupted(coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        coroutine.close()
        raise KeyboardInterrupt

    monkeypatch.setattr(below(engine), "on_front", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    assert below(engine).get_stats()["engine_status"] == "stopped"


def test_an_engine_that_died_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_engine(folder) as engine:
        monkeypatch.setattr(Scheduler, "plan", lambda *_: 1 / 0)
        with pytest.raises(EngineDied):
            engine.generate("x", **SHORT)
        wait_until(lambda: below(engine)._status == "failed")
        with pytest.raises(
            InternalError, match=r"ended with an error \(see the log\): close\(\) this engine and create"
        ):
            engine.generate("y", **SHORT)
        assert engine.get_metrics()["failed"] == 2
