"""Names and contents of adapters in the engine: what is in memory, what is read again, and what each name stands for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from tonle.engine.adapters import host_adapters
from tonle.engine.adapters.loaded_adapters import LoadedAdapters
from tonle.engine.adapters.reader_thread import ReaderThread
from tonle.engine.kv.block_pool import BlockPool
from tonle.engine.loop import Loop
from tonle.engine.messages import AdapterReply, Adapters, LoadAdapter, ToEngine, ToFront, UnloadAdapter
from tonle.engine.run.runner import Runner
from tonle.engine.schedule import Scheduler, SchedulerLimits
from tonle.errors import InternalError, ModelError
from tonle.models.adapters import Adapter, AdapterPart


def adapter(digest: str) -> Adapter:
    return Adapter(digest, {(0, "q"): AdapterPart(torch.zeros(2, 4), torch.zeros(4, 2))})


class Engine:
    """Adapters whose files are a dict: path -> digest."""

    def __init__(self) -> None:
        self.files = {"/a": "aa", "/b": "bb", "/c": "cc"}
        self.said: list[ToFront] = []
        self.read: list[str] = []
        self.failed: list[int] = []
        self.used: set[int] = set()
        self.loaded = LoadedAdapters(self._read, max_in_memory=2, publish=self.said.append)
        self.host = self.loaded.host
        self.host.is_used = self.used.__contains__

    def _read(self, path: str) -> Adapter:
        self.read.append(path)
        if path == "/broken":
            raise ZeroDivisionError("a bug")
        if path not in self.files:
            raise ModelError(f"{path}: no such folder")
        return adapter(self.files[path])

    def settle(self) -> None:
        """Until all that was asked for has been read."""
        for _ in range(120_000):
            self.failed += self.loaded.take_read()
            if not self.loaded.is_reading:
                return
            time.sleep(0.001)
        raise AssertionError("it is still reading")

    def load(self, name: str, path: str, *, replace: bool = False) -> AdapterReply:
        self.said.clear()
        self.loaded.handle(LoadAdapter(5, name, path, replace))
        self.settle()
        assert isinstance(self.said[-1], AdapterReply) and self.said[-1].reply == 5
        return self.said[-1]

    def unload(self, name: str) -> AdapterReply:
        self.said.clear()
        self.loaded.handle(UnloadAdapter(6, name))
        assert isinstance(self.said[-1], AdapterReply) and self.said[-1].reply == 6
        return self.said[-1]

    @property
    def numbers(self) -> dict[str, int]:
        return {info.name: info.id for info in self.loaded.message.adapters}


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.loaded.close()


def test_a_load_is_told_to_all_and_then_answered(engine: Engine) -> None:
    assert engine.load("one", "/a").exception is None
    told = engine.said[0]
    assert isinstance(told, Adapters) and len(engine.said) == 2
    (info,) = told.adapters
    assert (info.name, info.id, info.digest, info.rank, info.path) == ("one", 1, "aa", 2, "/a")


def test_what_cannot_be_read_is_said_and_changes_nothing(engine: Engine) -> None:
    reply = engine.load("one", "/missing")
    assert isinstance(reply.exception, ModelError)
    assert reply.error == "adapter one cannot be loaded: /missing: no such folder"
    assert isinstance(engine.load("one", "/broken").exception, InternalError)
    assert engine.numbers == {} and not any(isinstance(said, Adapters) for said in engine.said)


@pytest.mark.parametrize(
    "name", ["", "/etc/adapter", "../up", "https://host/x", "a b", "x" * 129, "ខ្មែរ", "a/../b", "a=b"]
)
def test_a_name_that_is_none(engine: Engine, name: str) -> None:
    assert "cannot be called" in str(engine.load(name, "/a").error)
    assert engine.read == []


@pytest.mark.parametrize("name", ["khmer-qa", "org/khmer_qa.v2", "sql:prod", "x" * 128])
def test_a_name(engine: Engine, name: str) -> None:
    assert engine.load(name, "/a").error is None


def test_a_name_is_taken_once_unless_it_is_replaced(engine: Engine) -> None:
    engine.load("one", "/a")
    assert "is loaded already" in str(engine.load("one", "/b").error)
    assert engine.load("one", "/b", replace=True).error is None
    assert engine.numbers == {"one": 2}
    assert engine.host.knows(1), "requests may be on their way with it"
    assert engine.load("one", "/b", replace=True).error is None
    assert engine.numbers == {"one": 2}, "the same content keeps its number"


def test_two_that_ask_for_one_name_at_once(engine: Engine) -> None:
    for reply, path in ((1, "/a"), (2, "/b")):
        engine.loaded.handle(LoadAdapter(reply, "one", path))
    engine.settle()
    replies = {said.reply: said.error for said in engine.said if isinstance(said, AdapterReply)}
    assert replies[1] is None and "is loaded already" in str(replies[2])


def test_an_unloaded_one_stays_until_its_requests_have_ended(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.load("one", "/a")
    engine.used.add(1)
    assert engine.unload("one").error is None and engine.numbers == {}
    assert engine.unload("one").error == "no adapter 'one' is loaded"
    monkeypatch.setattr(host_adapters, "GRACE_S", 0.0)
    engine.settle()
    assert engine.host.knows(1) and engine.host.num_in_memory == 1
    for path in ("/b", "/c", "/b"):  # more than there is room for
        engine.load("two", path, replace=True)
    assert engine.host.want(1), "it cannot be read again, so it stays"
    engine.host.unwant(1)
    engine.used.clear()
    engine.settle()
    assert not engine.host.knows(1)


def test_an_idle_loop_wakes_to_forget_what_was_unloaded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float | None] = []

    class Quiet:
        def take(self, wait_s: float | None) -> list[ToEngine]:
            waits.append(wait_s)
            return []

        def publish(self, message: ToFront) -> None: ...

    limits = SchedulerLimits(max_num_seqs=1, max_num_batched_tokens=4, context_length=8, block_size=4,
                             long_prefill_tokens=4, num_adapter_slots=1)  # fmt: skip
    runner = cast(Runner, SimpleNamespace(profile=None, lag=0, kernel_changes=0))
    loop = Loop(Scheduler(limits, BlockPool(4), [], engine.host), runner, Quiet(), adapters=engine.loaded)
    engine.load("one", "/a")
    loop.step()
    engine.unload("one")
    loop.step()
    monkeypatch.setattr(host_adapters, "GRACE_S", 0.0)  # so long has it slept
    loop.step()
    loop.step()
    assert waits == [None, 30.0, 30.0, None] and engine.host.num_in_memory == 0


def test_one_that_has_just_been_unloaded_takes_requests_on_their_way(engine: Engine) -> None:
    engine.load("one", "/a")
    engine.unload("one")
    engine.settle()
    assert engine.host.knows(1) and engine.host.want(1)


def test_the_end_waits_for_the_adapter_that_is_being_read_and_not_for_those_after_it() -> None:
    begun = threading.Event()
    read: list[str] = []

    def until_closed(path: str) -> Adapter:
        read.append(path)
        begun.set()
        for _ in range(120_000):
            if reader.is_closed:
                break
            time.sleep(0.001)
        return adapter("aa")

    reader = ReaderThread(until_closed)
    for path in ("/a", "/b", "/c"):
        reader.begin(1, path)
    assert begun.wait(60)
    reader.close()
    assert read == ["/a"]


def test_those_unused_for_longest_leave_memory_and_are_read_again(engine: Engine) -> None:
    for name in ("a", "b"):
        engine.load(name, f"/{name}")
    engine.host.get(1)
    engine.load("c", "/c")  # room for two
    assert engine.host.num_in_memory == 2 and engine.read == ["/a", "/b", "/c"]
    assert engine.host.want(1) and not engine.host.want(2), "the one used last stayed"
    engine.settle()
    assert engine.read[3:] == ["/b"] and engine.host.want(2) and engine.failed == []
    assert engine.host.get(2).digest == "bb"
    assert engine.host.want(1), "what is on its way to the device stays"


def test_one_that_requests_use_leaves_memory_last(engine: Engine) -> None:
    engine.load("a", "/a")
    engine.load("b", "/b")
    engine.used.add(1)
    engine.load("c", "/c")
    assert engine.host.want(1) and not engine.host.want(2)


@pytest.mark.parametrize("content", ["other", None])
def test_files_that_changed_are_not_taken_for_the_old_ones(
    engine: Engine, content: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b", "c"):
        engine.load(name, f"/{name}")
    if content is None:
        del engine.files["/a"]
    else:
        engine.files["/a"] = content
    assert not engine.host.want(1)
    engine.settle()
    assert engine.failed == [1] and "adapter a had to be read again" in caplog.text and "/a" in caplog.text
    assert ("have changed since it was loaded" in caplog.text) == (content is not None)
    assert not engine.host.want(1)
