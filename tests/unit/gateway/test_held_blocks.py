"""What a gateway makes of KV events: which blocks backends have, and which of them a prompt is sent to."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tests.unit.gateway.test_policies import backend, busy, names, request
from tonle.config.gateway import GatewayConfig
from tonle.engine.kv.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Event, encode
from tonle.errors import ConfigError
from tonle.gateway.routing import held_blocks
from tonle.gateway.routing.held_blocks import HeldBlocks, short_hash
from tonle.gateway.routing.policies import LOAD_SLACK, ByPrefix, Candidates
from tonle.protocol.kv_blocks import MAX_TOLD, read_blocks, write_blocks

CONFIG = GatewayConfig()
TEXT = "a long beginning of a prompt, " * 40  # four pieces
DIGESTS = [bytes([number]) * 16 for number in range(1, 76)]  # of its prompt's blocks


@pytest.fixture
def held() -> Iterator[HeldBlocks]:
    blocks = HeldBlocks({"a": "ipc:///tmp/nobody-a", "b": "ipc:///tmp/nobody-b"})
    yield blocks
    blocks.close()


class Speaker:
    """A backend's batches, numbered."""

    def __init__(self, held: HeldBlocks, name: str, layout: Any = "array") -> None:
        self._held, self._name, self._layout = held, name, layout
        self.number = 0

    def say(self, *events: Event) -> None:
        self._held.take(self._name, [b"", self.number.to_bytes(8, "big"), encode(0.0, list(events), self._layout)])
        self.number += 1


def stored(*digests: bytes, medium: str = "GPU") -> BlockStored:
    return BlockStored(list(digests), None, [], 16, None, medium, None)


@pytest.mark.parametrize("layout", ["array", "map"])
def test_blocks_come_and_go(held: HeldBlocks, layout: str) -> None:
    a = Speaker(held, "a", layout)
    assert not held.tells("a")
    a.say(AllBlocksCleared(), stored(DIGESTS[0], DIGESTS[1]), stored(DIGESTS[2], medium="CPU"))
    assert held.tells("a") and held.num_blocks("a") == 2
    assert held.has("a", short_hash(DIGESTS[1])) and not held.has("b", short_hash(DIGESTS[1]))
    a.say(BlockRemoved([DIGESTS[1]], "GPU"), BlockRemoved([DIGESTS[0]], "CPU"))
    assert held.num_blocks("a") == 1
    a.say(AllBlocksCleared())
    assert held.num_blocks("a") == 0


def test_after_a_gap_or_a_restart_nothing_is_known(held: HeldBlocks) -> None:
    a = Speaker(held, "a")
    a.say(stored(*DIGESTS))
    a.number += 1  # one was missed
    a.say(stored(DIGESTS[0]))
    assert held.num_blocks("a") == 1
    a.number = 0  # it was started again
    a.say(stored(DIGESTS[5]))
    assert held.num_blocks("a") == 1 and held.has("a", short_hash(DIGESTS[5]))


@pytest.mark.parametrize(
    "frames", [[b""], [b"", bytes(8), b"\xc1"], [b"", bytes(8), msgspec.msgpack.encode([1.0, [7]])]]
)
def test_what_cannot_be_read_harms_nothing(held: HeldBlocks, frames: list[bytes]) -> None:
    with pytest.raises((msgspec.MsgspecError, ValueError, TypeError, KeyError, IndexError)):  # what its thread expects
        held.take("a", frames)


def test_a_backend_that_talks_nonsense_or_too_much_does_not_end_it(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    held, context = HeldBlocks({"a": endpoint}), zmq.Context()
    speaker = context.socket(zmq.PUB)
    speaker.bind(endpoint)
    held.start()
    sent = encode(0.0, [stored(DIGESTS[0])], "array")
    try:
        for number in range(12_000):
            for payload in (b"\x91" * 100_000, sent):  # a list in a list in a list
                speaker.send_multipart((b"", number.to_bytes(8, "big"), payload))
            if held.tells("a") and held.num_blocks("a"):
                break
            time.sleep(0.01)  # a subscription takes a moment to arrive
        assert held.num_blocks("a") == 1
    finally:
        held.close()
        context.destroy(linger=0)


def test_blocks_and_messages_are_bounded(held: HeldBlocks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_blocks, "_MAX_BLOCKS", 10)
    Speaker(held, "a").say(stored(*DIGESTS[:6]), stored(*DIGESTS[6:60]))
    assert held.num_blocks("a") == 10
    assert {socket.getsockopt(zmq.MAXMSGSIZE) for socket in held._names} == {held_blocks.MAX_MESSAGE_BYTES}


def test_an_address_that_is_none_is_a_wrong_setting() -> None:
    with pytest.raises(ConfigError, match="kv_events of backend a"):
        HeldBlocks({"a": "tcp://nowhere"})


def test_the_header_tells_of_a_few_blocks_at_even_distances() -> None:
    told = read_blocks(write_blocks(DIGESTS))
    assert len(told) == MAX_TOLD and told[-1] == short_hash(DIGESTS[-1])
    assert read_blocks(write_blocks(DIGESTS[:3])) == [short_hash(digest) for digest in DIGESTS[:3]]
    for wrong in ("", "x", "////", write_blocks(DIGESTS) * 2):
        assert read_blocks(wrong) == [] or wrong == ""


def test_a_prompt_goes_where_most_of_its_blocks_are(held: HeldBlocks) -> None:
    backends = [backend("a"), backend("b")]
    a, b = Speaker(held, "a"), Speaker(held, "b")
    policy, candidates = ByPrefix(held), Candidates(backends, "load")
    (home,) = policy(candidates, request(TEXT)).backends
    other = next(each for each in backends if each is not home)
    for each in backends:
        policy.learn(request(TEXT).accepted, each.name, write_blocks(DIGESTS))
    of_home, of_other = (a, b) if home.name == "a" else (b, a)
    of_home.say(stored(*DIGESTS[:30]))
    of_other.say(stored(*DIGESTS))
    assert policy(candidates, request(TEXT + "one")).backends == [other], "it has more of them"
    of_other.say(BlockRemoved(DIGESTS[10:], "GPU"))
    assert policy(candidates, request(TEXT + "two")).backends == [home], "now the first has more"
    of_home.say(AllBlocksCleared())
    of_other.say(AllBlocksCleared())
    assert names(policy(candidates, request(TEXT + "three"))) in (["a"], ["b"]), (
        "nobody has any: a home as for a new one"
    )


def test_of_several_that_have_it_the_least_busy_and_none_that_is_far_too_busy(held: HeldBlocks) -> None:
    backends = [backend("a"), backend("b")]
    policy, candidates = ByPrefix(held), Candidates(backends, "load")
    for each in backends:
        policy.learn(request(TEXT).accepted, each.name, write_blocks(DIGESTS))
        Speaker(held, each.name).say(stored(*DIGESTS))
    busy(backends[0], 2)
    assert policy(candidates, request(TEXT)).backends == [backends[1]]
    busy(backends[0], 0)
    busy(backends[1], 2)
    assert policy(candidates, request(TEXT)).backends == [backends[0]]
    Speaker(held, "a").say(AllBlocksCleared())
    busy(backends[1], 4 * LOAD_SLACK)
    assert policy(candidates, request(TEXT)) is candidates
