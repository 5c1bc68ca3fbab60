"""Blocks go from one cache to another; whatever goes wrong, the rest is computed, and no lease stays."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from tests.unit.engine.transfer.two_caches import PROMPT, Fetching, Leasing, layout, same
from tonle.engine.transfer import block_server, remote_source
from tonle.engine.transfer.wire import _HEAD, VERSION, Ask, Line, Told
from tonle.errors import ConfigError

BLOCKS = [9, 3, 40, 41, 2, 60, 11]
INTO = [1, 30, 31, 8, 7, 50, 12]


@pytest.fixture
def leasing() -> Iterator[Leasing]:
    found = Leasing()
    yield found
    found.close()


def test_blocks_come_and_the_lease_ends(leasing: Leasing) -> None:
    fetching, kept = Fetching(), leasing.grant(BLOCKS)
    assert fetching.fetch(kept, INTO) == len(BLOCKS)
    assert same(leasing.kv, BLOCKS, fetching.kv, INTO)
    assert leasing.ended() == [1] and not leasing.leases and leasing.leases.num_fetched == 1
    assert fetching.incoming.num_loaded == {remote_source.NAME: 1}


def test_only_what_is_missing_is_fetched(leasing: Leasing) -> None:
    fetching, kept = Fetching(), leasing.grant(BLOCKS)
    assert fetching.fetch(kept, INTO, held=3) == 4
    assert same(leasing.kv, BLOCKS[3:], fetching.kv, INTO[:4])
    assert not fetching.kv.k[:, INTO[4:]].any()


def test_a_lease_that_is_not_needed_ends_at_once(leasing: Leasing) -> None:
    fetching, kept = Fetching(), leasing.grant(BLOCKS)
    assert fetching.fetch(kept, INTO, held=len(BLOCKS)) == 0
    assert leasing.ended() == [1]


def test_many_pieces_are_put_together(leasing: Leasing, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (block_server, remote_source):
        monkeypatch.setattr(module, "PIECE_BYTES", 2100)  # two blocks of 1,024 bytes
    fetching, blocks = Fetching(), list(range(20))
    assert fetching.fetch(leasing.grant(blocks), blocks[::-1]) == 20
    assert same(leasing.kv, blocks, fetching.kv, blocks[::-1])


def test_several_readers_of_one_lease(leasing: Leasing) -> None:
    fetching, kept = Fetching(), leasing.grant(BLOCKS)
    for handle in (5, 6):
        fetching.begin(kept, [block + handle for block in INTO], handle=handle, readers=2)
    assert [fetching.wait(handle) for handle in (5, 6)] == [7, 7]
    assert leasing.ended() == [1]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"token": "guessed"}, "no such lease"),
        ({"lease": "1-other"}, "no such lease"),
        ({"num_blocks": 9}, "the lease has 7 blocks"),
        ({"prompt": [*PROMPT[:5], 0, *PROMPT[6:]]}, "of another prompt"),
        ({"tp_size": 2}, "on 2 devices"),
    ],
)
def test_what_is_refused_is_computed_here(
    leasing: Leasing, changes: dict[str, object], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    fetching, kept = Fetching(), leasing.grant(BLOCKS)
    assert fetching.fetch(kept, list(range(20)), **changes) == 0
    assert why in caplog.text and fetching.incoming.num_failed == {remote_source.NAME: 1}
    assert not fetching.kv.k.any()


@pytest.mark.parametrize(
    ("name", "value"), [("model", "another"), ("dtype", "int8"), ("block_size", 8), ("num_layers", 3), ("tp_size", 2)]
)
def test_another_cache_is_refused_with_the_reason(
    leasing: Leasing, name: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    fetching, kept = Fetching(**{name: value}), leasing.grant(BLOCKS)
    assert fetching.fetch(kept, INTO, tp_size=value if name == "tp_size" else 1) == 0
    assert f"{name} is" in caplog.text


def test_nobody_is_there(leasing: Leasing) -> None:
    kept = leasing.grant(BLOCKS)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        assert Fetching().fetch(kept, INTO, port=unused.getsockname()[1]) == 0
    assert Fetching().fetch(kept, INTO, host="no.such.host.invalid") == 0


def test_a_lease_is_free_after_its_time(leasing: Leasing) -> None:
    short = Leasing(duration_s=0.05)
    kept = short.grant(BLOCKS)
    assert short.ended() == [1] and short.leases.num_expired == 1
    assert Fetching().fetch(kept, INTO) == 0
    short.close()


def test_a_lease_that_is_being_read_does_not_end() -> None:
    short = Leasing(duration_s=0.0)
    kept = short.grant(BLOCKS)
    short.leases.open(kept.lease, kept.token, 0, 0, b"")
    assert short.leases.take_ended(1e12) == []
    short.leases.close(kept.lease, 1)
    assert short.leases.take_ended(1e12) == [1]
    short.close()


# -- the other end is hostile, broken, or gone


def _answering(reply: bytes, *, then: str) -> tuple[int, threading.Thread]:
    """A server that sends this, whatever it is asked."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        with listener, listener.accept()[0] as sock:
            sock.settimeout(120)
            sock.recv(1 << 16)
            sock.sendall(reply)
            if then == "silence":
                with contextlib.suppress(ConnectionResetError):
                    sock.recv(1)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return listener.getsockname()[1], thread


def _frame(body: bytes, *, letters: bytes = b"TNKV", version: int = VERSION, size: int | None = None) -> bytes:
    return _HEAD.pack(letters, version, len(body) if size is None else size) + body


TOLD = b"\x82\xaanum_blocks\x07\xa7refusal\xa0"


@pytest.mark.parametrize("then", ["end", "silence"])
@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        _frame(TOLD, version=9),
        _frame(b"", size=2**32 - 1),
        _frame(b"\xc1garbage"),
        _frame(TOLD.replace(b"\x07", b"\x06")),
        _frame(TOLD) + b"x" * 1500,
    ],
    ids=["nothing", "http", "version", "length", "garbage", "count", "cut off"],
)
def test_a_broken_server_costs_nothing_but_time(leasing: Leasing, reply: bytes, then: str) -> None:
    fetching, kept = Fetching(timeout_s=0.4), leasing.grant(BLOCKS)
    port, thread = _answering(reply, then=then)
    got = fetching.fetch(kept, INTO, port=port)
    assert got == 0
    thread.join(120)
    assert not thread.is_alive(), "the connection is not closed"


def test_blocks_that_came_before_the_server_died_are_kept(leasing: Leasing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_source, "PIECE_BYTES", 1)  # a block at a time
    fetching, kept = Fetching(), leasing.grant(BLOCKS)
    data = torch.arange(7 * 1024, dtype=torch.int64).to(torch.uint8).numpy().tobytes()
    port, _ = _answering(_frame(TOLD) + data[: 3 * 1024 + 100], then="end")
    assert fetching.fetch(kept, INTO, port=port) == 3


def test_a_load_that_is_dropped_writes_nothing_more(leasing: Leasing) -> None:
    fetching, kept = Fetching(timeout_s=30.0), leasing.grant(BLOCKS)
    port, thread = _answering(_frame(TOLD), then="silence")
    assert fetching.begin(kept, INTO, port=port)
    fetching.incoming.advance()
    fetching.incoming.drop(5)
    thread.join(120)
    assert not thread.is_alive() and not fetching.incoming.is_busy
    assert not fetching.kv.k.any() and not fetching.ended.loaded_blocks


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x00" * 100,
        _frame(b"", size=2**32 - 1),
        _frame(b"\x91" * 200),
        _frame(b"\x80"),
    ],
    ids=["http", "zeros", "length", "garbage", "fields"],
)
def test_garbage_does_no_harm(leasing: Leasing, sent: bytes) -> None:
    kept = leasing.grant(BLOCKS)
    with socket.create_connection(("127.0.0.1", leasing.port), 10) as sock:
        sock.sendall(sent)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(100) == b"", "it is closed without a word"
    assert Fetching().fetch(kept, INTO) == len(BLOCKS)


def test_slow_peers_take_no_place_for_long(leasing: Leasing, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = leasing.grant(BLOCKS)
    with monkeypatch.context() as impatient:  # for these, not for the one that is as quick as its machine lets it be
        impatient.setattr(block_server, "_ASK_S", 0.2)
        slow = [socket.create_connection(("127.0.0.1", leasing.port), 10) for _ in range(block_server.MAX_CONNECTIONS)]
        for sock in slow:
            sock.sendall(b"T")
        for sock in slow:  # a letter, and never another
            assert sock.recv(1) == b""
            sock.close()
    assert Fetching().fetch(kept, INTO) == len(BLOCKS)


def test_a_peer_that_never_says_that_it_has_them_loses_the_lease() -> None:
    leasing = Leasing(timeout_s=0.3)
    kept = leasing.grant(BLOCKS)
    with socket.create_connection(("127.0.0.1", leasing.port), 10) as sock:
        line = Line(sock, time.monotonic() + 120)
        line.send_frame(Ask(layout(leasing.kv), kept.lease, kept.token, 0, 0, b"", readers=1))
        assert line.receive_frame(Told) == Told(0)
        assert leasing.ended() == [1]
    leasing.close()


def test_an_address_that_is_not_ours_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="--kv-transfer-host"):
        block_server.listen("192.0.2.1", 0)
