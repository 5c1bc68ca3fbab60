"""An answer on its way from the engine to a sink: pressure, order, failures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tests.fakes.front import FakeFront
from tests.http.serving import events
from tonle.edge.client import UpstreamError
from tonle.engine.messages import AdapterInfo
from tonle.protocol.answers import Answer
from tonle.replica.dispatch import ReplicaTransport
from tonle.replica.generate import THREAD_BYTES
from tonle.replica.replica import Replica, ReplicaOptions
from tonle.telemetry.time_spent import TimeSpent

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}], "stream": True}


class PressingSink:
    """Says that it is full after `full_after` pieces, and has room again when told to."""

    def __init__(self, full_after: int | None = None) -> None:
        self.status = 0
        self.pieces: list[bytes] = []
        self.answer: Answer | None = None
        self.press: Callable[[bool], None] = lambda full: None
        self._full_after = full_after

    def attach(self, press: Callable[[bool], None]) -> None:
        self.press = press

    def know(self, answer: Answer) -> None:
        self.answer = answer

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.status = status

    def data(self, piece: bytes) -> None:
        self.pieces.append(piece)
        if len(self.pieces) == self._full_after:
            self.press(True)

    @property
    def text(self) -> str:
        chunks = events(b"".join(self.pieces).decode())
        return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk != "[DONE]")


async def send(
    front: FakeFront, sink: PressingSink, first_s: float = 60.0, *, path: str = CHAT, request_id: str = "", **body: Any
) -> None:
    transport = ReplicaTransport(Replica(front, ReplicaOptions()))  # type: ignore[arg-type]
    body = body if path != CHAT else {**BODY, **body}
    headers = {"x-request-id": request_id} if request_id else {}
    await transport.send("POST", path, msgspec.json.encode(body), headers, sink, first_s=first_s, silence_s=60)


def test_a_full_sink_gets_nothing_until_it_has_room_and_then_all_in_order() -> None:
    async def main() -> None:
        front, sink = FakeFront(lambda prompt, index: "abcdefghij"), PressingSink(full_after=3)
        front.stall_after = 8
        task = asyncio.create_task(send(front, sink))
        for _ in range(200):
            await asyncio.sleep(0)
        assert len(sink.pieces) == 3, "the engine went on, the sink was left alone"
        sink.press(False)
        assert len(sink.pieces) == 4 and sink.text == "abcdefgh"
        task.cancel()
        await asyncio.wait({task})
        assert front.cancelled.get_nowait() == front.submitted[0][0].request_id

    asyncio.run(main())


def test_what_is_held_back_is_not_lost_at_the_end() -> None:
    front, sink = FakeFront(lambda prompt, index: "abcdefghij"), PressingSink(full_after=2)
    asyncio.run(send(front, sink))
    assert sink.text == "abcdefghij" and sink.pieces[-1].endswith(b"data: [DONE]\n\n")


def test_the_answer_is_told_beside_the_bytes() -> None:
    front, sink = FakeFront(lambda prompt, index: "hello"), PressingSink()
    asyncio.run(send(front, sink))
    assert sink.answer is not None and sink.answer.complete
    assert (sink.answer.text, sink.answer.finish_reason) == ("hello", "stop")
    assert sink.answer.usage is not None and sink.answer.usage["completion_tokens"] == 6
    assert b'"usage"' not in b"".join(sink.pieces), "nothing the caller did not ask for"
    assert set(sink.answer.engine_s or {}) == {"queue", "prefill", "decode"}
    assert sink.answer.spent is None, "the engine did not tell"


def test_the_answer_says_where_the_time_of_the_slowest_prompt_went() -> None:
    front, sink = FakeFront(lambda prompt, index: "hello"), PressingSink()
    slow = TimeSpent(queue_s=1.0, decode_s=3.0, num_steps=6)
    front.spent = [TimeSpent(queue_s=2.0), slow, TimeSpent(prefill_s=3.5)]
    asyncio.run(send(front, sink, path="/v1/completions", request_id="req-7f", prompt=["a", "b", "c"]))
    assert sink.answer is not None and sink.answer.complete and sink.answer.spent is slow
    assert [generation.request_id for generation, _ in front.submitted] == ["req-7f"] * 3, "as other requests name it"


@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_beside_the_bytes_has_calls_and_thoughts(stream: bool) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    front, sink = FakeFront(lambda prompt, index: f"<think>Hm.</think>So: {call}"), PressingSink()
    front.text.tool_template = "{{ tools }}<tool_call></tool_call><think></think>"
    asyncio.run(send(front, sink, stream=stream, tools=[{"type": "function", "function": {"name": "f"}}]))
    assert sink.answer is not None and sink.answer.complete
    choice = sink.answer.choices[0]
    assert (choice.text, choice.reasoning, choice.finish_reason) == ("So:", ["Hm."], "tool_calls")
    sent = b"".join(sink.pieces)
    (call_sent,) = choice.tool_calls.values()
    assert call_sent["id"].encode() in sent
    assert call_sent["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert sink.answer.usage is not None and sink.answer.usage["completion_tokens_details"] == {"reasoning_tokens": 18}


def test_an_engine_that_dies_ends_the_stream_with_an_error_and_an_incomplete_answer() -> None:
    front, sink = FakeFront(lambda prompt, index: "hello"), PressingSink()
    front.die_after = 3
    asyncio.run(send(front, sink))
    *_, last = events(b"".join(sink.pieces).decode())
    assert last["error"]["code"] == "engine_died"
    assert sink.answer is not None and sink.answer.error["code"] == "engine_died" and not sink.answer.complete


def test_an_adapter_that_is_unloaded_while_a_long_prompt_is_read_is_unknown() -> None:
    async def main() -> None:
        front, sink = FakeFront(), PressingSink()
        front.adapters = {"khmer-qa": AdapterInfo("khmer-qa", 1, "aa" * 32, 8, "/adapters/khmer")}
        task = asyncio.create_task(send(front, sink, model="khmer-qa", user="x" * THREAD_BYTES))
        await asyncio.sleep(0)
        front.adapters = {}
        await task
        assert sink.status == 404 and b"khmer-qa" in sink.pieces[0]

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_in_time_is_the_gateways_to_explain(stream: bool) -> None:
    front, sink = FakeFront(), PressingSink()
    front.stall_after = 0
    with pytest.raises(UpstreamError, match="timeout"):
        asyncio.run(send(front, sink, first_s=0.05, stream=stream))
    assert not sink.pieces and front.cancelled.get_nowait()
