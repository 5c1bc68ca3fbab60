"""The `tonle` command as users run it: in a process of its own, on pipes or on a terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

COMMAND = [sys.executable, "-c", "from tonle.cli import main; main()"]
DEADLINE_S = 120.0
_STATE = tempfile.TemporaryDirectory(prefix="tonle-state-")
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def environment(**more: str) -> dict[str, str]:
    """Ours, without settings of the developer's own, and with a state directory that no other test shares."""
    # readline, which debuggers import, leaves the size of the tests' own terminal in LINES and COLUMNS.
    foreign = ("TONLE_", "OPENAI_", "LINES", "COLUMNS")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    if "TONLE_CACHE_DIR" in os.environ:
        clean["TONLE_CACHE_DIR"] = os.environ["TONLE_CACHE_DIR"]
    # This terminal does not tell where its cursor is; without the variable, prompt_toolkit would ask and wait.
    fixed = {
        "TERM": "xterm-256color",
        "PROMPT_TOOLKIT_NO_CPR": "1",
        "XDG_STATE_HOME": tempfile.mkdtemp(dir=_STATE.name),
    }
    return clean | fixed | more


def tonle(*args: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end, on pipes."""
    return subprocess.run(
        [*COMMAND, *args], input=stdin, capture_output=True, text=True, timeout=DEADLINE_S, env=environment(**env)
    )


@dataclass
class Terminal:
    """A process that believes it talks to a person."""

    process: subprocess.Popen[bytes]
    descriptor: int
    seen: str = ""  # all output so far, without colours
    raw: bytes = b""
    _shown: int = field(default=0)  # how much of `seen` earlier calls of `expect` have used up

    def type(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    def expect(self, text: str) -> None:
        """Read until `text` appears after what was expected before."""
        deadline = time.monotonic() + DEADLINE_S
        while (place := self.seen.find(text, self._shown)) < 0:
            assert time.monotonic() < deadline, f"{text!r} did not appear after {self.seen[self._shown :]!r}"
            assert self._read(), f"it ended before {text!r} appeared: {self.seen[self._shown :]!r}"
        self._shown = place + len(text)

    def press(self, key: str, *, until: str) -> None:
        """Press a key until something happens: one pressed in the moment a line editor starts can get lost."""
        for _ in range(int(DEADLINE_S)):
            self.type(key)
            self._read()
            if self.seen.find(until, self._shown) >= 0:
                break
        self.expect(until)

    def wait(self) -> int:
        """The exit code, after reading all there is."""
        deadline = time.monotonic() + DEADLINE_S
        while self._read():
            assert time.monotonic() < deadline, f"it did not end after {self.seen[self._shown :]!r}"
        return self.process.wait(timeout=DEADLINE_S)

    def _read(self) -> bool:
        """Take what comes within a moment. False: there will be no more."""
        if not select.select([self.descriptor], [], [], 1.0)[0]:
            return self.process.poll() is None
        try:
            data = os.read(self.descriptor, 65536)
        except OSError:  # how Linux says that the other side of a terminal is closed
            return False
        self.raw += data
        self.seen = _COLOUR.sub("", self.raw.decode(errors="replace")).replace("\r\n", "\n")
        return bool(data)


@contextlib.contextmanager
def terminal(*args: str, columns: int = 100, **env: str) -> Iterator[Terminal]:
    """Run it on a terminal of its own, where Ctrl-C is a key."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, columns))
    process = subprocess.Popen(
        [*COMMAND, *args],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment(**env),
        start_new_session=True,
        preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # makes it the session's terminal
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
