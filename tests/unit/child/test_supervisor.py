"""Children that die, hang or ignore requests, and what the supervisor does about it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tests.unit.child.children import MODULE, ChildSettings
from tonle.child.supervisor import Backoff, Supervisor

log = logging.getLogger("tonle.tests")


class Scripted(Backoff):
    """No pauses; counts how often one was due."""

    def __init__(self, pause_s: float = 0.0) -> None:
        super().__init__(pause_s)
        self.pauses: list[float] = []

    def next_s(self) -> float:
        self.pauses.append(super().next_s())
        return self.pauses[-1]


class Owner:
    """Of one supervised child that follows `plan`."""

    def __init__(self, folder: Path, *plan: str, pause_s: float = 0.0, ignores_signals: bool = True) -> None:
        self.messages: list[bytes] = []
        self.reasons: list[str] = []
        self.backoff = Scripted(pause_s)
        self.starts = folder / "starts"
        self.supervisor = Supervisor(
            "the child",
            MODULE,
            ChildSettings(str(self.starts), list(plan), ignores_signals),
            receive=self._receive,
            on_exit=self._lose,
            log=log,
            backoff=self.backoff,
        )

    def _receive(self, body: bytes) -> bool:
        self.messages.append(body)
        return body == b"ready"

    def _lose(self, reason: str) -> Exception:
        self.reasons.append(reason)
        return RuntimeError(reason)

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        for _ in range(12_000):
            if condition():
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"{what}: {self.messages}, {self.reasons}")


def drive(use: Callable[[], Awaitable[None]], run: Callable[..., None] = asyncio.run) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(use(), 100)

    run(bounded())


def is_alive(pid: int | None) -> bool:
    assert pid is not None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# -- pauses


def test_pauses_double_up_to_a_limit_and_start_over_after_a_steady_time() -> None:
    now = 100.0
    backoff = Backoff(0.5, max_s=3.0, steady_s=60.0, clock=lambda: now)

    def pause_after(life_s: float) -> float:
        nonlocal now
        backoff.started()
        now += life_s
        return backoff.next_s()

    assert [pause_after(1.0) for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert pause_after(60.0) == 3.0, "not longer than the steady time"
    assert pause_after(60.1) == 0.5
    assert pause_after(1.0) == 1.0


# -- start and restart


def test_messages_go_both_ways_and_a_request_to_stop_is_enough(tmp_path: Path) -> None:
    async def use() -> None:
        owner = Owner(tmp_path, "echo")
        child = owner.supervisor
        await child.start()
        assert await child.wait_ready()
        child.send(b"hello")
        await owner.until(lambda: b"hello" in owner.messages, "no echo")
        pid = child.pid
        await child.stop(wait_s=60)
        assert not is_alive(pid)
        await child.wait()
        assert owner.reasons == [], "it was asked for"
        assert child.num_starts == 1

    drive(use)


@pytest.mark.parametrize(("plan", "reason"), [("die", "exit code 3"), ("die by a signal", "signal SIGKILL")])
def test_a_child_that_never_was_ready_is_not_started_again(tmp_path: Path, plan: str, reason: str) -> None:
    async def use() -> None:
        owner = Owner(tmp_path, plan)
        await owner.supervisor.start()
        with pytest.raises(RuntimeError, match=reason):
            await owner.supervisor.wait_ready()
        with pytest.raises(RuntimeError, match=reason):
            await owner.supervisor.wait()
        assert owner.supervisor.num_starts == 1
        assert owner.reasons == [reason]
        await owner.supervisor.stop()

    drive(use)


def test_a_program_that_cannot_run_is_an_error_like_any_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use() -> None:
        owner = Owner(tmp_path, "echo")
        monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
        await owner.supervisor.start()
        with pytest.raises(RuntimeError, match=r"could not be started.*missing"):
            await owner.supervisor.wait_ready()
        await owner.supervisor.stop()

    drive(use)


def test_a_restart_that_fails_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use() -> None:
        owner = Owner(tmp_path, "echo")
        await owner.supervisor.start()
        await owner.supervisor.wait_ready()
        with monkeypatch.context() as broken:
            broken.setattr(sys, "executable", str(tmp_path / "missing"))
            assert owner.supervisor.pid is not None
            os.kill(owner.supervisor.pid, signal.SIGKILL)
            await owner.until(lambda: len(owner.reasons) >= 3, "it gave up")
        await owner.until(lambda: owner.messages.count(b"ready") == 2, "it never came back")
        assert owner.reasons[0] == "signal SIGKILL"
        assert all("could not be started" in reason for reason in owner.reasons[1:])
        await owner.supervisor.stop()

    drive(use)


def test_a_child_that_dies_after_it_was_ready_is_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def use() -> None:
        owner = Owner(tmp_path, "be ready, then die", "die", "die by a signal", "be ready, die when told", "echo")
        await owner.supervisor.start()
        assert await owner.supervisor.wait_ready()
        await owner.until(lambda: owner.messages.count(b"ready") == 2, "it never came back")
        assert owner.supervisor.num_starts == 4
        owner.supervisor.send(b"now")
        await owner.until(lambda: owner.messages.count(b"ready") == 3, "it never came back")
        await owner.supervisor.stop()
        assert owner.reasons == ["exit code 4", "exit code 3", "signal SIGKILL", "exit code 5"]
        assert len(owner.backoff.pauses) == 4, "one before each restart"

    drive(use)
    assert "the child died (exit code 4); starting it again in 0.0 s" in caplog.text


def test_a_child_that_closes_its_socket_and_hangs_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tonle.child.spawn.exit_reason.__defaults__", (0.01,))

    async def use() -> None:
        owner = Owner(tmp_path, "close the socket and hang", "echo")
        await owner.supervisor.start()
        await owner.supervisor.wait_ready()
        first = owner.supervisor.pid
        await owner.until(lambda: owner.messages.count(b"ready") == 2, "it was not replaced")
        assert not is_alive(first)
        await owner.supervisor.stop()

    drive(use)


def test_a_child_that_sends_garbage_is_replaced(tmp_path: Path) -> None:
    async def use() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # the loop reports it; here it is expected
        owner = Owner(tmp_path, "send garbage when told", "echo")
        await owner.supervisor.start()
        await owner.supervisor.wait_ready()
        owner.supervisor.send(b"now")
        await owner.until(lambda: owner.messages.count(b"ready") == 2, "it was not replaced")
        await owner.supervisor.stop()

    drive(use)


# -- stop


def test_a_stop_while_it_starts_ends_it_at_once(tmp_path: Path) -> None:
    async def use() -> None:
        owner = Owner(tmp_path, "never be ready")
        await owner.supervisor.start()
        waiting = asyncio.create_task(owner.supervisor.wait_ready())
        await asyncio.sleep(0)
        await owner.supervisor.stop(wait_s=3600)
        assert await waiting is False
        assert not is_alive(owner.supervisor.pid)
        await owner.supervisor.wait()

    drive(use)


def test_a_stop_during_the_pause_starts_no_other(tmp_path: Path) -> None:
    async def use() -> None:
        owner = Owner(tmp_path, "be ready, then die", pause_s=3600.0)
        await owner.supervisor.start()
        await owner.until(lambda: owner.backoff.pauses == [3600.0], "no pause")
        await owner.supervisor.stop(wait_s=3600)
        assert owner.supervisor.num_starts == 1

    drive(use)


def test_a_stop_before_the_connection_is_made_is_not_forgotten(tmp_path: Path) -> None:
    async def use() -> None:
        owner = Owner(tmp_path, "echo")
        starting = asyncio.create_task(owner.supervisor.start())
        await asyncio.sleep(0)  # the process is started, its socket not yet connected
        owner.supervisor.request_stop()
        await starting
        await owner.supervisor.wait()
        assert not is_alive(owner.supervisor.pid)
        assert owner.reasons == []

    drive(use)


def test_a_child_that_ignores_the_request_is_killed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def use() -> None:
        owner = Owner(tmp_path, "ignore the request")
        await owner.supervisor.start()
        await owner.supervisor.wait_ready()
        await owner.supervisor.stop(wait_s=0.01)
        assert not is_alive(owner.supervisor.pid)
        assert owner.reasons == []

    drive(use)
    assert "did not end" not in caplog.text, "killed at once, not after another wait"


def test_a_grandchild_that_holds_the_socket_does_not_delay_a_stop(tmp_path: Path) -> None:
    async def use() -> None:
        owner = Owner(tmp_path, "leave the socket with a grandchild")
        await owner.supervisor.start()
        await owner.supervisor.wait_ready()
        await owner.supervisor.stop(wait_s=0.01)
        assert not is_alive(owner.supervisor.pid)

    drive(use)


def test_sigterm_ends_a_child_that_takes_its_time(tmp_path: Path) -> None:
    async def use() -> None:
        owner = Owner(tmp_path, "ignore the request", ignores_signals=False)
        await owner.supervisor.start()
        await owner.supervisor.wait_ready()
        owner.supervisor.request_stop()
        owner.supervisor.terminate()
        await owner.supervisor.wait()
        owner.supervisor.terminate()  # harmless
        assert not is_alive(owner.supervisor.pid)

    drive(use)


def test_stop_twice_and_before_start_are_harmless(tmp_path: Path) -> None:
    async def use() -> None:
        owner = Owner(tmp_path, "echo")
        await owner.supervisor.start()
        await owner.supervisor.wait_ready()
        await owner.supervisor.stop()
        await owner.supervisor.stop()
        await Owner(tmp_path, "echo").supervisor.stop()

    drive(use)


def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    """The kernel closes the parent's end of the control socket."""
    script = f"""
import asyncio, os, signal, sys
from pathlib import Path
sys.argv = ["parent"]
from tests.unit.child.test_supervisor import Owner
async def run():
    owner = Owner(Path({str(tmp_path)!r}), "echo")
    await owner.supervisor.start()
    await owner.supervisor.wait_ready()
    print(owner.supervisor.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(run())
"""

    async def use() -> None:
        parent = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
        output, _ = await parent.communicate()  # ends when the child's copy of the pipe is closed, too
        assert parent.returncode == -signal.SIGKILL
        assert output.strip().isdigit()

    drive(use)


# -- a machine without descriptors, memory or processes to give


def descriptors_in_use() -> list[int]:
    return [int(entry.name) for entry in Path("/dev/fd").iterdir() if entry.exists()]


@contextlib.contextmanager
def room_for_descriptors(count: int) -> Iterator[None]:
    """The process can open `count` more. The kernel compares numbers, so numbers below the highest are taken first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY)]
    while taken[-1] < max(descriptors_in_use()):
        taken.append(os.open(os.devnull, os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(descriptors_in_use()) + 1 + count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in taken:
            os.close(number)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts descriptors in /dev/fd")
@pytest.mark.parametrize("room", range(8))
def test_a_child_comes_back_once_there_are_descriptors_again(tmp_path: Path, room: int) -> None:
    async def use() -> None:
        owner = Owner(tmp_path, "be ready, die when told", "echo")
        child = owner.supervisor
        await child.start()
        assert await child.wait_ready()
        with room_for_descriptors(room):
            child.send(b"now")
            back = lambda: owner.messages.count(b"ready") == 2  # noqa: E731 (there was room enough)
            await owner.until(lambda: len(owner.reasons) > 2 or back(), "it gave up")
        await owner.until(lambda: owner.messages.count(b"ready") == 2, "it is not back")
        assert all("exit code 5" in reason or "Too many open files" in reason for reason in owner.reasons), (
            owner.reasons
        )
        await child.stop()

    drive(use, uvloop.run)


@pytest.mark.parametrize("error", [OSError(errno.ENOMEM, "no memory"), BlockingIOError(errno.EAGAIN, "no processes"),
                                   MemoryError(), RuntimeError("can't start new thread")])  # fmt: skip
@pytest.mark.parametrize("step", ["spawn", "connect", "wait"])
def test_no_failure_to_start_again_is_the_last(
    tmp_path: Path, error: Exception, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [error, error]

    def failing(original: Callable[..., Any]) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            if failures:
                raise failures.pop()
            return original(*args, **kwargs)

        return function

    async def use() -> None:
        owner = Owner(tmp_path, "be ready, die when told", "echo")
        child = owner.supervisor
        await child.start()
        assert await child.wait_ready()
        if step == "spawn":
            monkeypatch.setattr("subprocess.Popen", failing(subprocess.Popen))
        elif step == "connect":
            loop = asyncio.get_running_loop()
            monkeypatch.setattr(loop, "create_connection", failing(loop.create_connection))
        else:
            monkeypatch.setattr("threading.Thread.start", failing(threading.Thread.start))
        child.send(b"now")
        await owner.until(lambda: owner.messages.count(b"ready") == 2, "it is not back")
        await child.stop()

    drive(use)
