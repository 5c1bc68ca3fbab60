"""One child: its settings, its sockets, its signals and its end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.unit.child.children import MODULE, ChildSettings
from tonle.child.frames import frame, read_frame, write_frame
from tonle.child.spawn import exit_reason, read_settings, spawn


class Settings(msgspec.Struct):
    folder: Path
    names: tuple[str, ...]


def settings(folder: Path, *plan: str, ignores_signals: bool = True) -> ChildSettings:
    return ChildSettings(str(folder / "starts"), list(plan), ignores_signals)


def test_a_child_gets_settings_and_sockets_and_ends_when_its_control_socket_closes(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    process, control = spawn(MODULE, settings(tmp_path, "echo"), theirs)
    theirs.close()
    with ours, control:
        assert read_frame(control) == b"ready"
        write_frame(control, b"hello")
        assert read_frame(control) == b"hello"
        control.shutdown(socket.SHUT_WR)
        assert read_frame(control) is None
        assert ours.recv(16) == b"bye"
    assert exit_reason(process) == "exit code 0"


@pytest.mark.parametrize(("plan", "reason"), [("die", "exit code 3"), ("die by a signal", "signal SIGKILL")])
def test_how_it_ended(tmp_path: Path, plan: str, reason: str) -> None:
    process, control = spawn(MODULE, settings(tmp_path, plan))
    with control:
        assert read_frame(control) is None
    assert exit_reason(process) == reason


def test_a_signal_without_a_name_has_a_number(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 40)"]) as process:
        assert exit_reason(process) == "signal 40"


def test_a_child_that_hangs_is_killed_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    process, control = spawn(MODULE, settings(tmp_path, "close the socket and hang"))
    with control:
        assert read_frame(control) == b"ready"
        assert read_frame(control) is None
    assert "did not end within 0.01 s" in exit_reason(process, 0.01)
    assert process.returncode == -signal.SIGKILL
    assert MODULE in caplog.text and str(process.pid) in caplog.text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_that_go_to_all_are_ignored(tmp_path: Path, number: signal.Signals) -> None:
    process, control = spawn(MODULE, settings(tmp_path, "echo"))
    with control:
        assert read_frame(control) == b"ready"
        process.send_signal(number)
        write_frame(control, b"still here")
        assert read_frame(control) == b"still here"
    assert exit_reason(process) == "exit code 0"


def test_a_program_that_cannot_be_started_leaves_no_socket_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    before = os.dup(0)  # the lowest free number
    os.close(before)
    with pytest.raises(OSError, match="missing"):
        spawn(MODULE, settings(tmp_path, "die"))
    after = os.dup(0)
    os.close(after)
    assert before == after


def test_settings_travel_whole_paths_as_text() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sent = Settings(Path("/some/folder"), ("a", "ខ"))
        ours.sendall(frame(msgspec.msgpack.encode(sent, enc_hook=str)))
        assert read_settings(theirs, Settings) == sent


@pytest.mark.parametrize("sent", [b"", b"\x05", frame(b"hello")[:-1]])
def test_a_child_whose_parent_is_gone_ends_quietly(sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.sendall(sent)
        ours.close()
        with pytest.raises(SystemExit) as ended:
            read_settings(theirs, Settings)
    assert ended.value.code == 0
