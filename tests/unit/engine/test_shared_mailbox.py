"""Many fronts, one loop: whose handles are whose, and what a lost front leaves behind."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tonle.child.frames import Frames, frame
from tonle.engine.messages import Cancel, LoopStats, ModelCard, Step, Stop, Submit, ToEngine, ToFront
from tonle.engine.request import Request, ResolvedConfig
from tonle.engine.shared_mailbox import SharedMailbox, split

CARD = ModelCard("LlamaForCausalLM", 512, 9, [], "cpu", "float32", 16, 100, 8, 64, 1.0)
BUSY, IDLE = LoopStats(num_running=1), LoopStats()


class Caller:
    """A front's end, on a blocking socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._frames = Frames()

    def send(self, message: ToEngine) -> None:
        self.sock.sendall(frame(msgspec.msgpack.encode(message)))

    def submit(self, *handles: int) -> None:
        self.send(Submit([Request(handle=handle, prompt=[1], config=ResolvedConfig()) for handle in handles]))

    def read(self) -> list[ToFront]:
        """What is there now."""
        self.sock.setblocking(False)
        bodies = []
        try:
            while data := self.sock.recv(1 << 20):
                bodies += self._frames.feed(data)
        except BlockingIOError:
            pass
        self.sock.setblocking(True)
        return [msgspec.msgpack.decode(body, type=ToFront) for body in bodies]


class Engine:
    def __init__(self, folder: Path) -> None:
        self.address = str(folder / "engine")
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(self.address)
        self.listener.listen()
        ours, theirs = socket.socketpair()
        self.parent = Caller(ours)
        self.mailbox = SharedMailbox(theirs, self.listener)

    def front(self) -> Caller:
        """Connected, and admitted."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(self.address)
        self.mailbox.take(0.0)
        return Caller(sock)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path)
    yield engine
    engine.parent.sock.close()
    engine.listener.close()


def submitted(mail: list[ToEngine]) -> list[int]:
    return [request.handle for message in mail if isinstance(message, Submit) for request in message.requests]


def test_the_same_handle_of_two_fronts_is_two_requests(engine: Engine) -> None:
    one, two = engine.front(), engine.front()
    one.submit(1, 2)
    two.submit(1)
    handles = submitted(engine.mailbox.take(60))
    handles += submitted(engine.mailbox.take(0.0)) if len(handles) < 3 else []
    assert len(set(handles)) == 3
    first, second, other = handles
    finished = {second: ("stop", 7)}
    engine.mailbox.publish(Step([other, first, second], [1, 2, 1], [10, 20, 21, 30], finished=finished, stats=BUSY))
    (theirs,), (ours,) = two.read(), one.read()
    assert (theirs.handles, theirs.counts, theirs.tokens, theirs.finished) == ([1], [1], [10], {})
    assert (ours.handles, ours.counts, ours.tokens) == ([1, 2], [2, 1], [20, 21, 30])
    assert ours.finished == {2: ("stop", 7)} and ours.stats == theirs.stats == BUSY
    two.send(Cancel([1]))
    assert engine.mailbox.take(60) == [Cancel([other])]


def test_a_front_that_leaves_cancels_what_it_had_under_way_and_nothing_else(engine: Engine) -> None:
    one, two = engine.front(), engine.front()
    one.submit(1, 2, 3)
    mine = submitted(engine.mailbox.take(60))
    two.submit(1)
    engine.mailbox.take(60)
    engine.mailbox.publish(Step([], [], [], finished={mine[0]: ("length", None)}, refused={mine[1]: "no"}, stats=BUSY))
    one.sock.close()
    assert engine.mailbox.take(60) == [Cancel([mine[2]])]
    engine.mailbox.publish(Step([mine[2]], [1], [5], stats=BUSY))  # it was computed when they left
    assert [step.handles for step in two.read() if isinstance(step, Step)] == [[]], "the news only"


def test_a_front_that_sends_garbage_is_cut_off_alone(engine: Engine) -> None:
    bad, good = engine.front(), engine.front()
    bad.submit(1)
    (handle,) = submitted(engine.mailbox.take(60))
    bad.sock.sendall(b"\xff" * 8)
    assert engine.mailbox.take(60) == [Cancel([handle])]
    good.submit(1)
    assert len(submitted(engine.mailbox.take(60))) == 1


def test_only_the_control_socket_ends_the_loop(engine: Engine) -> None:
    front = engine.front()
    front.submit(4)
    handles = submitted(engine.mailbox.take(60))
    engine.parent.sock.close()
    assert engine.mailbox.take(60) == [Stop()]
    front.sock.close()
    assert engine.mailbox.take(60) == [Cancel(handles)]


def test_a_parent_lost_during_a_write_ends_the_loop(engine: Engine) -> None:
    engine.parent.sock.close()
    engine.mailbox.publish(CARD)
    assert engine.mailbox.take(None) == [Stop()]


def test_a_front_that_connects_later_gets_the_card(engine: Engine) -> None:
    early = engine.front()
    assert early.read() == []
    engine.mailbox.publish(CARD)
    assert early.read() == [CARD] and engine.front().read() == [CARD] and engine.parent.read() == [CARD]


def test_fronts_without_tokens_hear_the_state_when_the_engine_falls_idle(engine: Engine) -> None:
    one, two = engine.front(), engine.front()
    one.submit(1)
    (handle,) = submitted(engine.mailbox.take(60))
    engine.mailbox.publish(Step([handle], [1], [5], stats=BUSY))
    assert [step.stats.num_running for step in two.read()] == [1]
    engine.mailbox.publish(Step([handle], [1], [6], stats=BUSY))
    engine.mailbox.publish(Step([handle], [1], [7], finished={handle: ("length", None)}, stats=IDLE))
    assert two.read()[-1].stats.num_running == 0
    assert [step.tokens for step in one.read()] == [[5], [6], [7]]


def test_a_front_that_does_not_read_delays_no_other_and_is_cut_off(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tonle.engine.shared_mailbox._MAX_BEHIND_BYTES", 1 << 20)
    deaf, well = engine.front(), engine.front()
    deaf.submit(1)
    (handle,) = submitted(engine.mailbox.take(60))
    well.submit(1)
    (other,) = submitted(engine.mailbox.take(60))
    step = Step([handle, other], [50_000, 1], [1 << 30] * 50_001, stats=BUSY)
    for _ in range(50):  # 250 kB each: more than a socket holds and we keep
        engine.mailbox.publish(step)
        assert well.read()[-1].tokens == [1 << 30]
    assert Cancel([handle]) in engine.mailbox.take(0.0)


def test_what_was_held_back_arrives_in_order(engine: Engine) -> None:
    slow = engine.front()
    slow.submit(1)
    (handle,) = submitted(engine.mailbox.take(60))
    for number in range(40):
        engine.mailbox.publish(Step([handle], [20_000], [number] * 20_000, stats=BUSY))
    steps: list[ToFront] = []
    for _ in range(1000):
        steps += slow.read()
        engine.mailbox.take(0.0)  # sends the rest as there is room
    assert [step.tokens[0] for step in steps] == list(range(40))


def test_a_step_without_requests_has_no_parts() -> None:
    assert split(Step([], [], [], stats=IDLE)) == {}
