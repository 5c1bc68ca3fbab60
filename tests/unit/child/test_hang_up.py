"""A socket whose other side is gone is noticed, and one that is only read from is not."""

from __future__ import annotations

import queue
import socket
import threading

import pytest

from tonle.child.hang_up import when_gone


def test_the_first_to_go_is_named_and_messages_are_left_alone() -> None:
    gone: queue.Queue[int] = queue.Queue()
    pairs = [socket.socketpair() for _ in range(3)]
    when_gone([ours for ours, _ in pairs], gone.put)
    pairs[2][1].sendall(b"news")
    pairs[1][1].close()
    assert gone.get(timeout=120) == 1
    assert pairs[2][0].recv(10) == b"news"
    for ours, theirs in pairs:
        ours.close()
        theirs.close()


def test_a_watch_that_was_stopped_calls_nobody() -> None:
    called = threading.Event()
    ours, theirs = socket.socketpair()
    watch = when_gone([ours], lambda _: called.set())
    watch.stop()
    watch.stop()
    theirs.close()
    ours.close()
    assert not called.is_set()
    assert not watch._thread.is_alive()


def test_one_that_was_gone_before_the_stop_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who stops the watch may do so because of that loss, and be faster than the thread that watches."""
    gone: list[int] = []
    stopped = threading.Event()
    run = threading.Thread.run
    monkeypatch.setattr(threading.Thread, "run", lambda thread: (stopped.wait(60), run(thread)))
    ours, theirs = socket.socketpair()
    watch = when_gone([ours], gone.append)
    theirs.close()
    monkeypatch.setattr(watch._thread, "join", lambda join=watch._thread.join: (stopped.set(), join()))
    watch.stop()
    ours.close()
    assert gone == [0]
