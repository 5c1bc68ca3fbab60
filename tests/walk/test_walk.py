"""`docs/walk.md` is true: a request really passes its stops, in its order."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest
from tonle.replica.app import build_app

from tests.fakes.checkpoints import tiny_model, tiny_tokenizer
from tonle.config.engine import EngineConfig
from tonle.engine.build import build
from tonle.engine.front import Front
from tonle.engine.mailbox import ThreadMailbox
from tonle.engine.messages import Stop
from tonle.engine.text import Text

ROOT = Path(__file__).parents[2]
STOP = re.compile(r"\[`([\w.]+)`\]\(\.\./(src/[\w/.]+)\)")


def stops(text: str) -> list[tuple[str, str]]:
    """(file, qualified name) of every stop, in order."""
    return [(str(ROOT / path), name) for name, path in STOP.findall(text)]


@pytest.fixture(scope="module")
def walk() -> str:
    return (ROOT / "docs" / "walk.md").read_text()


def test_every_stop_exists(walk: str) -> None:
    assert len(stops(walk)) > 20
    for file, name in stops(walk):
        source = Path(file).read_text()
        for part in name.split("."):
            assert re.search(rf"^\s*(async def|def|class) {part}\b", source, re.M), f"{name} is not in {file}"


def test_a_request_passes_the_stops_in_order(walk: str) -> None:
    numbered = "\n".join(line for line in walk.splitlines() if re.match(r"\d+\. ", line))
    expected = stops(numbered)
    wanted = set(expected)
    visited: list[tuple[str, str]] = []

    def watch(frame: FrameType, event: str, _: Any) -> None:
        stop = (frame.f_code.co_filename, frame.f_code.co_qualname)
        if event == "call" and stop in wanted and stop not in visited:
            visited.append(stop)

    body = asyncio.run(_ask(watch))
    assert "[DONE]" in body
    assert visited == expected


async def _ask(watch: Any) -> str:
    aio = asyncio.get_running_loop()
    mailbox = ThreadMailbox(lambda message: aio.call_soon_threadsafe(front.deliver, message) and None)
    front = Front(Text.from_live(tiny_tokenizer()), "tiny", mailbox.put)
    loop, card = build(tiny_model("llama"), EngineConfig(max_sequence_length=256, memory_pool_size=2**20), mailbox)
    front.deliver(card)
    threading.setprofile(watch)  # for the loop's thread
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    sys.setprofile(watch)
    try:
        client = httpx.AsyncClient(transport=httpx.ASGITransport(build_app(front)), base_url="http://tonle")
        question = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "stream": True}
        reply = await client.post("/v1/chat/completions", json=question)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        mailbox.put(Stop())
        thread.join(10)
    assert reply.status_code == 200, reply.text
    return reply.text
