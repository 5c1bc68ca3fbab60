"""`docs/walk.md` is true: requests really pass its stops, in its order."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest

from tests.fakes.checkpoints import tiny_model, tiny_tokenizer
from tests.gateway.running_gateway import Upstream, running_gateway
from tonle.config.engine import EngineConfig
from tonle.config.serve import ServeConfig
from tonle.edge.listening import bind, url_of
from tonle.engine.build import build
from tonle.engine.front import Front
from tonle.engine.mailbox import ThreadMailbox
from tonle.engine.messages import Stop
from tonle.engine.text import Text
from tonle.replica.serve import build_server
from tonle.simulate.fleet import fleet_of
from tonle.simulate.profile import load_profile
from tonle.simulate.run import simulate
from tonle.simulate.trace import Trace, TraceRequest

ROOT = Path(__file__).parents[2]
STOP = re.compile(r"\[`([\w.]+)`\]\(\.\./(src/[\w/.]+)\)")
QUESTION = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "stream": True}


def stops(text: str, numbered: str = "") -> list[tuple[str, str]]:
    """(file, qualified name) of every stop, in order; of those whose line begins like `numbered` only."""
    lines = [line for line in text.splitlines() if re.match(numbered, line)]
    return [(str(ROOT / path), name) for name, path in STOP.findall("\n".join(lines))]


@pytest.fixture(scope="module")
def walk() -> str:
    return (ROOT / "docs" / "walk.md").read_text()


def test_every_stop_exists(walk: str) -> None:
    assert len(stops(walk)) > 40
    for file, name in stops(walk):
        source = Path(file).read_text()
        for part in name.split("."):
            assert re.search(rf"^\s*(async def|def|class) {part}\b", source, re.M), f"{name} is not in {file}"


class Watch:
    """Notes the first visit of each stop, on every thread."""

    def __init__(self, expected: list[tuple[str, str]]) -> None:
        self.visited: list[tuple[str, str]] = []
        self._wanted = set(expected)

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        stop = (frame.f_code.co_filename, frame.f_code.co_qualname)
        if event == "call" and stop in self._wanted and stop not in self.visited:
            self.visited.append(stop)

    def __enter__(self) -> Watch:
        threading.setprofile(self)
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def test_a_request_passes_the_stops_in_order(walk: str) -> None:
    expected = stops(walk, r"\d+\. ")
    assert len(expected) > 30

    async def main() -> list[tuple[str, str]]:
        with Watch(expected) as watch:
            async with served() as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
                reply = await client.post("/v1/chat/completions", json=QUESTION)
        assert reply.status_code == 200 and "[DONE]" in reply.text, reply.text
        return watch.visited

    assert asyncio.run(main()) == expected


@asynccontextmanager
async def served() -> AsyncIterator[str]:
    """The server of a small real model, its engine on a thread."""
    aio = asyncio.get_running_loop()
    mailbox = ThreadMailbox(lambda message: aio.call_soon_threadsafe(front.deliver, message) and None)
    front = Front(Text.from_live(tiny_tokenizer()), "tiny", mailbox.put)
    loop, card = build(tiny_model("llama"), EngineConfig(max_sequence_length=256, memory_pool_size=2**20), mailbox)
    front.card = card  # as if delivered, which is a stop of the walk
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    server, listener = build_server(front, ServeConfig()), bind("127.0.0.1", 0)
    await server.start(listener)
    try:
        yield url_of(*listener.getsockname()[:2])
    finally:
        await server.stop(drain_s=1)
        mailbox.put(Stop())
        thread.join(120)


def test_a_request_passes_the_stops_of_a_gateway_in_order(walk: str, tmp_path: Path) -> None:
    expected = stops(walk, r"- G\d+\. ")
    assert len(expected) > 8

    async def main() -> list[tuple[str, str]]:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            with Watch(expected) as watch:
                reply = await place.ask(stream=True)
        assert reply.status_code == 200 and "[DONE]" in reply.text
        return watch.visited

    assert asyncio.run(main()) == expected


def test_a_simulated_request_passes_the_stops_in_order(walk: str) -> None:
    expected = stops(walk, r"- S\d+\. ")
    assert len(expected) > 10
    request = TraceRequest(index=0, arrival_s=0.0, prompt=[5] * 40, output_tokens=4)
    fleet = fleet_of(load_profile("smollm2-135m-cpu"), replicas=2)
    with Watch(expected) as watch:
        simulate(Trace(label="one", requests=[request]), fleet)
    assert watch.visited == expected
