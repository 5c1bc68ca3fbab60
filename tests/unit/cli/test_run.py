"""`tonle run`, with an engine of its own around a tiny model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.unit.cli.terminal import COMMAND, environment, terminal, tonle
from tonle.cli.run import _chat


@pytest.fixture
def small(tiny_folder: Path) -> dict[str, str]:
    """Settings through the environment, as a container would."""
    return {"TONLE_MODEL": str(tiny_folder), "TONLE_DEVICE": "cpu", "TONLE_KV_CACHE_MEMORY": "8MiB"}


def test_the_answer_alone_is_on_standard_output(small: dict[str, str]) -> None:
    """The same prompt as an argument and from a pipe, with the report and without."""
    report = json.loads(tonle("run", "hello there", "--json", "-t", "0", "-n", "8", **small).stdout)
    done = tonle("run", "-t", "0", "-n", "8", stdin="hello there", **small)
    assert done.stdout == report["text"] if report["text"].endswith("\n") else f"{report['text']}\n"
    assert (report["model"], report["completion_tokens"], report["finish_reason"]) == ("tiny-llama", 8, "length")
    assert "8 tokens" in done.stderr and "cut off at max_tokens 8" in done.stderr


def test_no_prompt_at_a_terminal(small: dict[str, str]) -> None:
    """It does not wait for one in silence."""
    with terminal("run", **small) as person:
        assert person.wait() == 2
    assert "pipe it in" in person.seen


def test_a_system_message_comes_first() -> None:
    told, asked = _chat("hello", "be brief")
    assert (told["role"], told["content"], asked["role"], asked["content"]) == ("system", "be brief", "user", "hello")
    assert _chat("hello", None) == [asked]


def test_a_prompt_longer_than_the_context(small: dict[str, str]) -> None:
    done = tonle("run", "-", "--max-model-len", "32", stdin="hello " * 100, **small)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: the prompt has ")


def test_a_reader_who_leaves_is_no_error(small: dict[str, str]) -> None:
    process = subprocess.Popen(
        [*COMMAND, "run", "hello", "-n", "500", "--seed", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(**small),
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    said = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(timeout=60) == 141
    assert "Traceback" not in said and "Exception" not in said


def test_ctrl_c_leaves_without_a_word(small: dict[str, str]) -> None:
    with terminal("run", "hello", "-n", "900", "--seed", "1", **small) as person:
        while b"\x1b[?25h" not in person.raw:  # the spinner is gone, so the engine has started
            assert person._read()
        os.killpg(person.process.pid, signal.SIGINT)  # as a terminal does: to all of the group
        assert person.wait() == 130
    assert "Traceback" not in person.seen and "Error" not in person.seen


def test_a_broken_model_is_told_in_one_line(tmp_path: Path, tiny_folder: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny_folder.iterdir():
        if file.suffix != ".safetensors":
            (broken / file.name).symlink_to(file)
    done = tonle("run", "hello", "--model", str(broken), "--device", "cpu")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ") and "Traceback" not in done.stderr
