"""Few descriptors: servers take as many as they may have, and errors name the lack of them, not what came last."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.checkpoints import save_folder
from tests.unit.cli.terminal import COMMAND, environment
from tonle.child.open_files import describe, is_too_many, raise_limit
from tonle.engine.text import template
from tonle.engine.text.template import ChatTemplate, read_template
from tonle.errors import InternalError

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    save_folder("llama", path)
    (path / "chat.jinja").write_text("{{ messages[0].content }}")
    return path


def limited(soft: int, hard: int | None = None) -> Callable[[], None]:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1] if hard is None else hard
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))


def open_files_limit(pid: int) -> int:
    (line,) = [line for line in Path(f"/proc/{pid}/limits").read_text().splitlines() if "open files" in line]
    return int(line.split()[3])


@pytest.mark.parametrize("verb", ["serve", "gateway"])
def test_servers_take_as_many_as_they_may_have(folder: Path, verb: str) -> None:
    args = ["serve", str(folder)] if verb == "serve" else ["gateway", "--backend", "http://127.0.0.1:9"]
    process = subprocess.Popen(
        [*COMMAND, *args, "--port", "0"], env=environment(), preexec_fn=limited(64),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        for _ in range(12_000):
            if open_files_limit(process.pid) > 64 or process.poll() is not None:
                break
            time.sleep(0.01)
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        assert open_files_limit(process.pid) == min(hard, 1 << 20)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@pytest.mark.parametrize("most", [8, 10, 11, 12, 13, 14, 15, 16])
def test_out_of_descriptors_at_the_start_is_said_plainly(folder: Path, most: int) -> None:
    command = [*COMMAND, "serve", str(folder), "--port", "0", "--chat-template", str(folder / "chat.jinja")]
    done = subprocess.run(
        command,
        env=environment(),
        preexec_fn=limited(most, most),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 1 and "Too many open files" in said and "ulimit -n" in said, said
    assert "Traceback" not in said and "emplate" not in said.replace("--chat-template", ""), said


def test_a_template_is_not_blamed_for_what_the_system_refuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object) -> str:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(template, "run_template", refuse)
    with pytest.raises(InternalError, match="ulimit -n"):
        ChatTemplate("{{ 1 }}", special_tokens={}).render([{"role": "user", "content": "x"}])
    with pytest.raises(Exception, match="No such file") as missing:
        read_template(tmp_path / "missing")
    assert not is_too_many(missing.value)


def test_words() -> None:
    error = RuntimeError("the template is broken")
    error.__cause__ = OSError(23, "Too many open files in system")
    assert is_too_many(error) and "ulimit -n" in describe(error)
    assert describe(OSError(12, "no memory")) == "[Errno 12] no memory"
    assert describe(MemoryError()) == "MemoryError"
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        raise_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= before[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
