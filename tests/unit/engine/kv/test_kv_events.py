"""The bytes of KV events, what they say of a pool, and how they travel."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tests.fakes.checkpoints import tiny_model
from tonle.config.kv_events import KvEventsConfig, read_kv_events
from tonle.engine import EngineConfig, GenerationConfig, InferenceEngine
from tonle.engine.kv import event_publisher
from tonle.engine.kv.block_pool import BlockPool, block_digests, root_digest
from tonle.engine.kv.event_publisher import EventPublisher
from tonle.engine.kv.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Event, KvEvents, encode
from tonle.errors import ConfigError

EVENTS: list[Event] = [
    AllBlocksCleared(),
    BlockStored([b"\x01" * 16, b"\x02" * 16], None, [5, 6, 7, 300], 2, None, "GPU", None),
    BlockStored([b"\x03" * 16], b"\x02" * 16, [8, 9], 2, 4, "GPU", "khmer"),
    BlockRemoved([b"\x01" * 16], "GPU"),
]


def text(word: str) -> bytes:
    return bytes([0xA0 + len(word)]) + word.encode()


def digest(byte: int) -> bytes:
    return b"\xc4\x10" + bytes([byte]) * 16


def test_an_array_event_byte_by_byte() -> None:
    """msgpack's own forms: 0x9n an array of n, 0xan text of n, 0xc4 bytes, 0xc0 nothing, 0xcb a double."""
    tokens = b"\x94\x05\x06\x07\xcd\x01\x2c"
    stored = (
        b"\x98"
        + text("BlockStored")
        + b"\x92"
        + digest(1)
        + digest(2)
        + b"\xc0"
        + tokens
        + b"\x02\xc0"
        + text("GPU")
        + b"\xc0"
    )
    removed = b"\x93" + text("BlockRemoved") + b"\x91" + digest(1) + text("GPU")
    cleared = b"\x91" + b"\xb0AllBlocksCleared"
    wanted = b"\x93" + b"\xcb\x3f\xf8" + bytes(6) + b"\x93" + cleared + stored + removed + b"\x00"
    assert encode(1.5, [EVENTS[0], EVENTS[1], EVENTS[3]], "array") == wanted


def test_the_fields_of_both_layouts() -> None:
    ts, arrays, rank = msgspec.msgpack.decode(encode(2.0, EVENTS, "array"))
    assert (ts, rank) == (2.0, 0)
    assert arrays == [
        ["AllBlocksCleared"],
        ["BlockStored", [b"\x01" * 16, b"\x02" * 16], None, [5, 6, 7, 300], 2, None, "GPU", None],
        ["BlockStored", [b"\x03" * 16], b"\x02" * 16, [8, 9], 2, 4, "GPU", "khmer"],
        ["BlockRemoved", [b"\x01" * 16], "GPU"],
    ]
    ts, maps, rank = msgspec.msgpack.decode(encode(2.0, EVENTS, "map"))
    assert (ts, rank) == (2.0, 0)
    names = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")
    assert maps[0] == {"type": "AllBlocksCleared"}
    assert maps[2] == {"type": "BlockStored"} | dict(zip(names, arrays[2][1:], strict=True))
    assert maps[3] == {"type": "BlockRemoved", "block_hashes": [b"\x01" * 16], "medium": "GPU"}


def test_vllm_reads_them() -> None:
    theirs = pytest.importorskip("vllm.distributed.kv_events", reason="vLLM is not installed here")
    as_arrays = bool(theirs.BlockStored.__struct_config__.array_like)
    batch = msgspec.msgpack.decode(encode(2.0, EVENTS, "array" if as_arrays else "map"), type=theirs.KVEventBatch)
    assert (batch.ts, batch.data_parallel_rank) == (2.0, 0)
    assert [type(event).__name__ for event in batch.events] == [type(event).__name__ for event in EVENTS]
    assert batch.events[2].parent_block_hash == b"\x02" * 16 and batch.events[2].lora_name == "khmer"
    assert batch.events[3].block_hashes == [b"\x01" * 16]


# -- what the pool tells


class Kept:
    """Batches that nobody sends; `room` of them."""

    def __init__(self, room: int = 1000) -> None:
        self.room = room
        self.batches: list[list[Event]] = []

    def put(self, ts: float, events: list[Event]) -> bool:
        if len(self.batches) >= self.room:
            return False
        self.batches.append(events)
        return True

    def close(self) -> None:
        pass


def test_blocks_that_follow_each_other_are_one_event_and_removals_another() -> None:
    kept = Kept()
    events = KvEvents(kept, 2, lambda number: f"adapter {number}")
    chain = block_digests(root_digest(b""), [1, 2, 3, 4, 5, 6], 2)
    for i, each in enumerate(chain):
        events.stored(each, chain[i - 1] if i else None, [2 * i + 1, 2 * i + 2], 0)
    other = block_digests(root_digest(b"x", adapted=True), [1, 2], 2)[0]
    events.stored(other, None, [1, 2], 7)
    events.removed(chain[2])
    events.removed(other)
    events.flush()
    events.flush()  # nothing happened since
    assert kept.batches == [[
        AllBlocksCleared(),
        BlockStored(chain, None, [1, 2, 3, 4, 5, 6], 2, None, "GPU", None),
        BlockStored([other], None, [1, 2], 2, 7, "GPU", "adapter 7"),
        BlockRemoved([chain[2], other], "GPU"),
    ]]  # fmt: skip
    assert (events.num_sent, events.num_lost) == (1, 0)


def test_after_a_lost_batch_all_is_forgotten_first() -> None:
    kept = Kept(room=1)
    events = KvEvents(kept, 1, str)
    for number in range(3):
        events.stored(bytes([number]), None, [number], 0)
        events.flush()
    kept.room = 2
    events.stored(b"last", None, [9], 0)
    events.flush()
    assert events.num_lost == 2
    assert kept.batches[1] == [AllBlocksCleared(), BlockStored([b"last"], None, [9], 1, None, "GPU", None)]


def test_a_pool_without_any_block_left_says_so_at_once() -> None:
    pool, kept = BlockPool(4), Kept()
    pool.observer = events = KvEvents(kept, 1, str)
    blocks = [pool.take() for _ in range(3)]
    for block in blocks:
        assert pool.publish(block, bytes([block]))
        events.stored(bytes([block]), None, [block], 0)
    assert not pool.publish(blocks[0], b"again")
    pool.release(blocks[1:])
    pool.drop_idle()
    events.flush()
    assert kept.batches[-1][-1] == BlockRemoved([bytes([blocks[2]]), bytes([blocks[1]])], "GPU")
    pool.retract(blocks[0])
    events.flush()
    assert kept.batches[-1] == [BlockRemoved([bytes([blocks[0]])], "GPU")]
    pool.publish(blocks[0], b"a")
    pool.release(blocks[:1])
    pool.drop_idle()
    events.flush()
    assert kept.batches[-1] == [AllBlocksCleared()]


# -- on their way


def config(**given: Any) -> KvEventsConfig:
    read = read_kv_events({"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:*"} | given)
    assert read is not None
    return read


@pytest.fixture
def subscribe() -> Iterator[Callable[..., zmq.Socket[bytes]]]:
    context = zmq.Context()

    def open_socket(kind: int, endpoint: str | None, topic: str = "") -> zmq.Socket[bytes]:
        assert endpoint is not None
        socket = context.socket(kind)
        socket.rcvtimeo, socket.linger = 120_000, 0
        if kind == zmq.SUB:
            socket.subscribe(topic)
        socket.connect(endpoint)
        return socket

    yield open_socket
    context.destroy(linger=0)


def until_heard(publisher: EventPublisher, socket: zmq.Socket[bytes]) -> None:
    """A subscription takes a moment to arrive: until then a publisher sends to nobody."""
    for _ in range(1000):
        publisher.put(0.0, [AllBlocksCleared()])
        if socket.poll(20):
            break
    publisher.put(-1.0, [AllBlocksCleared()])
    while msgspec.msgpack.decode(socket.recv_multipart()[2])[0] != -1.0:
        pass


def test_frames_and_replay(subscribe: Callable[..., zmq.Socket[bytes]]) -> None:
    publisher = EventPublisher(config(replay_endpoint="tcp://127.0.0.1:*", topic="kv@10.0.0.7@m", buffer_steps=2))
    try:
        heard = subscribe(zmq.SUB, publisher.endpoint, "kv@")
        other = subscribe(zmq.SUB, publisher.endpoint, "elsewhere")
        until_heard(publisher, heard)
        for ts in (1.0, 2.0, 3.0):
            assert publisher.put(ts, EVENTS)
        batches = [heard.recv_multipart() for _ in range(3)]
        assert {topic for topic, _, _ in batches} == {b"kv@10.0.0.7@m"}
        numbers = [int.from_bytes(number, "big") for _, number, _ in batches]
        assert numbers == [numbers[0], numbers[0] + 1, numbers[0] + 2] and len(batches[0][1]) == 8
        assert [payload for _, _, payload in batches] == [encode(ts, EVENTS, "array") for ts in (1.0, 2.0, 3.0)]
        assert not other.poll(50)

        asking = subscribe(zmq.DEALER, publisher.replay_endpoint)
        asking.send_multipart((b"", b"short"))  # is passed over
        asking.send_multipart((b"", numbers[0].to_bytes(8, "big")))
        replayed = [asking.recv_multipart()[1:] for _ in range(3)]
        assert replayed[:2] == batches[1:]  # the buffer holds two
        assert replayed[2] == [b"", b"\xff" * 8, b""]
    finally:
        publisher.close()
    assert not publisher._thread.is_alive()


def test_what_waits_is_sent_before_it_closes(subscribe: Callable[..., zmq.Socket[bytes]]) -> None:
    publisher = EventPublisher(config(layout="map"))
    heard = subscribe(zmq.SUB, publisher.endpoint)
    until_heard(publisher, heard)
    for ts in range(50):
        publisher.put(float(ts), EVENTS)
    publisher.close()
    assert [msgspec.msgpack.decode(heard.recv_multipart()[2])[0] for _ in range(50)] == list(range(50))


def test_a_full_queue_is_told_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(event_publisher, "encode", lambda *_: str(gate.wait(120)).encode())
    publisher = EventPublisher(config(max_queue_size=1))
    try:
        fits = [publisher.put(0.0, EVENTS) for _ in range(3)]  # one is being sent, perhaps; one waits
        assert fits[0] and not all(fits)
    finally:
        gate.set()
        publisher.close()


def test_an_engine_tells_what_it_has(tmp_path: Path, subscribe: Callable[..., zmq.Socket[bytes]]) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    wanted = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint, "topic": "kv@pod@tiny",
              "replay_endpoint": f"{endpoint}-again", "buffer_steps": 100}  # fmt: skip
    prompt = list(range(3, 53))  # 3 whole blocks of 16
    greedy = GenerationConfig(max_length=1, do_sample=False)
    with InferenceEngine(tiny_model("llama"), None, EngineConfig(kv_events_config=wanted)) as engine:
        engine.result(engine.submit_request(prompt, greedy), timeout=60)
        engine.optimize_memory()
        asking = subscribe(zmq.DEALER, wanted["replay_endpoint"])
        batches: list[Any] = []
        for _ in range(6000):
            asking.send_multipart((b"", bytes(8)))
            batches.clear()
            while (frames := asking.recv_multipart()[1:])[0]:
                batches.append(msgspec.msgpack.decode(frames[2]))
            if len(batches) == 2:
                break
            time.sleep(0.02)
    (_, first, _), (_, second, _) = batches
    chain = block_digests(root_digest(b""), prompt[:48], 16)
    assert first == [["AllBlocksCleared"], ["BlockStored", chain, None, prompt[:48], 16, None, "GPU", None]]
    assert second == [["AllBlocksCleared"]]


# -- settings


@pytest.mark.parametrize(("given", "words"), [
    ({"enable_kv_cache_events": True}, "has no endpoint.*token ids"),
    ({"enable_kv_cache_events": True, "endpoint": "5557"}, "is no address"),
    ({"enable": True}, "unknown field `enable`.*it takes enable_kv_cache_events"),
    ({"enable_kv_cache_events": True, "endpoint": "tcp://*:1", "hwm": 0}, "hwm must be at least 1"),
    ({"publisher": "kafka"}, "Invalid enum value 'kafka'"),
])  # fmt: skip
def test_settings_that_cannot_be(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig(kv_events_config=given).validate()


@pytest.mark.parametrize(
    "given", [None, {}, {"enable_kv_cache_events": False}, {"enable_kv_cache_events": True, "publisher": "null"}]
)
def test_no_events_unless_they_are_wanted(given: dict[str, Any] | None) -> None:
    assert read_kv_events(given) is None


def test_an_address_in_use_is_a_setting_that_is_wrong() -> None:
    publisher = EventPublisher(config())
    try:
        with pytest.raises(ConfigError, match=r"cannot use tcp://127\.0\.0\.1:.*in use"):
            EventPublisher(config(replay_endpoint=publisher.endpoint))
    finally:
        publisher.close()
