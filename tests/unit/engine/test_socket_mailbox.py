"""Many fronts, one loop: whose handles are whose, and what a lost front leaves behind."""

from __future__ import annotations

import fcntl
import resource
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tonle.child.frames import Frames, frame
from tonle.engine import peer
from tonle.engine.messages import (
    AdapterInfo,
    AdapterReply,
    Adapters,
    Cancel,
    LoadAdapter,
    LoopStats,
    ModelCard,
    Step,
    Stop,
    Submit,
    ToEngine,
    ToFront,
    UnloadAdapter,
)
from tonle.engine.request import Request, ResolvedConfig
from tonle.engine.socket_mailbox import SocketMailbox, split
from tonle.telemetry.time_spent import OtherPrompt, TimeSpent, Wait

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
        self.mailbox = SocketMailbox(theirs, self.listener)

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


def test_where_time_went_names_the_requests_of_the_same_front_alone(engine: Engine) -> None:
    one, two = engine.front(), engine.front()
    one.submit(1, 2)
    mine = submitted(engine.mailbox.take(60))
    two.submit(2)
    (other,) = submitted(engine.mailbox.take(60))
    prompts = [OtherPrompt(mine[1], 6100, 0.4), OtherPrompt(other, 50, 0.1)]
    spent = TimeSpent(
        queue_s=0.5, waits=[Wait("rows", 0.5)], behind=prompts, stalled_by=prompts[::-1], missed={"new": 7}
    )
    ended: dict[int, tuple[str, int | None]] = {mine[0]: ("stop", None), other: ("length", None)}
    engine.mailbox.publish(Step([], [], [], ended, spent={mine[0]: spent, other: TimeSpent(decode_s=1.0)}, stats=BUSY))
    (ours,), (theirs,) = one.read(), two.read()
    told = [OtherPrompt(2, 6100, 0.4), OtherPrompt(0, 50, 0.1)]
    assert ours.spent == {1: msgspec.structs.replace(spent, behind=told, stalled_by=told[::-1])}
    assert theirs.spent == {2: TimeSpent(decode_s=1.0)}


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


def test_all_fronts_hear_of_adapters_and_one_gets_the_reply(engine: Engine) -> None:
    one, two = engine.front(), engine.front()
    one.send(LoadAdapter(1, "a", "/a"))
    (first,) = engine.mailbox.take(60)
    two.send(UnloadAdapter(1, "b"))
    (second,) = engine.mailbox.take(60)
    assert isinstance(first, LoadAdapter) and isinstance(second, UnloadAdapter) and first.reply != second.reply
    known = Adapters([AdapterInfo("a", 1, "aa", 4, "/a")])
    engine.mailbox.publish(known)
    engine.mailbox.publish(AdapterReply(first.reply))
    assert one.read() == [known, AdapterReply(1)] and two.read() == [known] and engine.parent.read() == [known]
    engine.mailbox.publish(AdapterReply(second.reply, "no"))
    assert two.read() == [AdapterReply(1, "no")] and one.read() == []
    one.sock.close()
    engine.mailbox.take(60)
    engine.mailbox.publish(AdapterReply(first.reply))  # to a front that is gone


def test_a_front_that_connects_later_knows_the_adapters_before_it_is_ready(engine: Engine) -> None:
    old, known = Adapters([]), Adapters([AdapterInfo("a", 1, "aa", 4, "/a")])
    for message in (old, CARD, known):
        engine.mailbox.publish(message)
    assert engine.front().read() == [known, CARD]


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


def test_a_front_that_does_not_read_delays_no_other_and_loses_its_requests(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "MAX_UNREAD_BYTES", 1 << 20)
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


class Alone:
    """An engine with one front, which is its parent."""

    def __init__(self, ours: socket.socket, theirs: socket.socket) -> None:
        self.front = Caller(ours)
        self.mailbox = SocketMailbox(theirs)
        self.steps: list[ToFront] = []

    def submit(self, *handles: int) -> None:
        self.front.submit(*handles)
        assert submitted(self.mailbox.take(60)) == list(handles), "with one front, handles stay as they are"

    def publish_much(self, handle: int, count: int) -> None:
        """More than a socket holds, on a thread: it must end though nothing is read."""
        messages = [Step([handle], [20_000], [number] * 20_000, stats=BUSY) for number in range(count)]
        thread = threading.Thread(target=lambda: [self.mailbox.publish(step) for step in messages], daemon=True)
        thread.start()
        thread.join(120)
        assert not thread.is_alive(), "a step waits for a front that does not read"

    def read_all(self) -> None:
        for _ in range(1000):
            self.steps += self.front.read()
            self.mailbox.take(0.0)  # sends the rest as there is room


@pytest.fixture
def alone() -> Iterator[Alone]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Alone(ours, theirs)


def test_a_lone_front_that_does_not_read_delays_no_step_and_misses_nothing(alone: Alone) -> None:
    alone.submit(1)
    alone.publish_much(1, 40)
    alone.read_all()
    assert [step.tokens[0] for step in alone.steps] == list(range(40))


def test_a_lone_front_that_is_too_far_behind_is_told_that_its_requests_are_gone(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "MAX_UNREAD_BYTES", 1 << 20)
    alone.submit(1, 2)
    alone.publish_much(1, 120)
    assert alone.mailbox.take(0.0) == [Cancel([1, 2])], "nothing is computed for it meanwhile"
    alone.front.submit(3)
    assert alone.mailbox.take(60) == [], "nor is anything new, as long as it reads nothing"
    alone.read_all()
    assert [step.tokens[0] for step in alone.steps[:-1]] == list(range(len(alone.steps) - 1)), (
        "none is missing in between"
    )
    assert alone.steps[-1].finished == dict.fromkeys((1, 2, 3), ("cancelled", None))
    alone.submit(4)
    alone.mailbox.publish(Step([4], [1], [9], finished={4: ("length", None)}, stats=IDLE))
    assert alone.front.read()[-1].tokens == [9], "all is well again"


def test_a_front_that_reads_nothing_for_too_long_loses_its_requests(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone.submit(1)
    alone.publish_much(1, 40)
    assert alone.mailbox.take(0.0) == []
    monkeypatch.setattr(peer, "MAX_SILENT_S", -1.0)
    assert alone.mailbox.take(0.0) == [Cancel([1])]
    assert alone.mailbox.take(0.0) == [], "once"
    alone.read_all()
    assert alone.steps[-1].finished == {1: ("cancelled", None)}


def test_a_lone_front_that_leaves_ends_the_loop(alone: Alone) -> None:
    alone.submit(1)
    alone.front.sock.close()
    assert alone.mailbox.take(None) == [Cancel([1]), Stop()]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs descriptors above 1024")
def test_descriptors_of_any_number_will_do(alone: Alone) -> None:
    """A server with many connections hands its engine a descriptor above 1023, which `select` cannot wait for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard <= 1100:
        pytest.skip("this system allows no more than 1,024 descriptors")
    ours, theirs = socket.socketpair()
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1100), hard))
    try:
        high = fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD_CLOEXEC, 1050)
        with ours, theirs, socket.socket(fileno=high) as sock:
            mailbox = SocketMailbox(sock)
            Caller(ours).submit(1)
            assert submitted(mailbox.take(60)) == [1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


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


def test_each_front_is_told_of_its_own_guesses() -> None:
    step = Step([(2 << 40) | 5], [1], [11], guesses={(2 << 40) | 5: (7, 3), (3 << 40) | 5: (1, 0)}, stats=IDLE)
    assert {number: part.guesses for number, part in split(step).items()} == {2: {5: (7, 3)}, 3: {5: (1, 0)}}
