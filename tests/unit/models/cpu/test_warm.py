"""Kernels are compiled once, however many engines start together."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tonle.models.cpu import warm


def test_engines_that_start_together_compile_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    both = threading.Event()

    def compile_for(types: str) -> None:
        calls.append(types)
        if len(calls) == 2:
            both.set()
        both.wait(0.3)  # time enough for another to begin as well, if nothing holds it back
        (tmp_path / f"{types}.ready").touch()

    monkeypatch.setattr(warm, "compile_for", compile_for)
    monkeypatch.setattr(warm, "_marker", lambda types: tmp_path / f"{types}.ready")
    threads = [threading.Thread(target=warm.compile_once, args=("a",)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert calls == ["a"]
    warm.compile_once("b")
    assert calls == ["a", "b"]


def test_different_kernels_are_compiled_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba rewrites one index with every addition; of two that write at once, one would be lost."""
    at_work: list[str] = []
    together: list[list[str]] = []

    def compile_for(types: str) -> None:
        at_work.append(types)
        time.sleep(0.1)  # time for the other, if nothing holds it back
        together.append(list(at_work))
        at_work.remove(types)

    monkeypatch.setattr(warm, "compile_for", compile_for)
    monkeypatch.setattr(warm, "_marker", lambda types: tmp_path / f"{types}.ready")
    threads = [threading.Thread(target=warm.compile_once, args=(types,)) for types in ("a", "a,adapters")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(together) == [["a"], ["a,adapters"]]


def test_a_program_that_ends_first_leaves_the_compilation_running(tmp_path: Path) -> None:
    """Seen from outside: a stand-in for the compiler, in place of the interpreter that would run it, outlives the program."""
    compiler = tmp_path / "compiler"
    compiler.write_text(
        f"#!/bin/sh\necho $$ > {tmp_path}/pid\nwhile [ ! -e {tmp_path}/go ]; do sleep 0.05; done\ntouch {tmp_path}/compiled\n"
    )
    compiler.chmod(0o755)
    imports = "import sys\nfrom tonle.models.cpu.warm import warm_later\n"
    program = f"{imports}sys.executable = {str(compiler)!r}\nwarm_later('x', print)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    for _ in range(2400):
        if (tmp_path / "pid").exists() and (pid := (tmp_path / "pid").read_text().strip()):
            break
        time.sleep(0.05)
    assert os.getsid(int(pid)) == int(pid), "a session of its own: neither Ctrl-C nor a closed terminal ends it"
    (tmp_path / "go").touch()
    for _ in range(2400):
        if (tmp_path / "compiled").exists():
            return
        time.sleep(0.05)
    pytest.fail("the compilation ended with the program")


@pytest.mark.parametrize(("types", "words"), [
    ("x", "compiling the CPU kernels for this machine"), ("x,adapters", "compiling the CPU kernels for adapters"),
])  # fmt: skip
def test_the_log_says_what_is_compiled(
    types: str, words: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/true")
    caplog.set_level("INFO", "tonle.models")
    done = threading.Event()
    warm.warm_later(types, done.set)
    assert done.wait(120)
    assert words in caplog.text
