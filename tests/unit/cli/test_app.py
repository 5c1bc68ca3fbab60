"""How the command line behaves as a whole: help, exit codes, errors, and what it does not import."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from tests.unit.cli.terminal import environment, terminal, tonle
from tonle import __version__
from tonle.cli.app import VERBS, app, load_verb
from tonle.config.serve import SETTINGS


def test_version() -> None:
    assert tonle("--version").stdout == f"tonle {__version__}\n"


def test_help_lists_every_verb() -> None:
    shown = tonle("--help", COLUMNS="200").stdout
    for name, summary in VERBS.items():
        assert name in shown
        assert summary in shown


@pytest.mark.parametrize("verb", VERBS)
def test_the_overview_quotes_each_verb(verb: str) -> None:
    assert load_verb(verb).help.splitlines()[0] == VERBS[verb]


HELPS = [
    *([verb] for verb in VERBS),
    *(["audit", name] for name in load_verb("audit").commands),
    *(["ray", name] for name in load_verb("ray").commands),
]  # fmt: skip


@pytest.mark.parametrize("words", [[], *HELPS], ids=" ".join)
def test_help_shows_values_in_one_style(words: list[str]) -> None:
    """FILE, N, MODEL; no types of Python, no braces but those that `tonle rollout` fills in."""
    shown = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "200"}).stdout
    assert "Usage:" in shown
    assert not re.search(r"<[a-z].*?>|\blist\[|\{(?!name\}|url\})\w+\}", shown), shown


@pytest.mark.parametrize("words", HELPS, ids=" ".join)
def test_every_option_names_its_value(words: list[str]) -> None:
    command = load_verb(words[0])
    if words[1:]:
        command = command.commands[words[1]]
    assert [param.name for param in command.params if param.metavar is None] == []


def test_every_setting_has_a_flag() -> None:
    shown = tonle("serve", "--help", COLUMNS="200").stdout
    for name, setting in SETTINGS.items():
        assert setting.flag in shown or name == "model"
        assert setting.help.split(".")[0] in shown
    assert "--no-prefix-caching" in shown


@pytest.mark.parametrize(
    ("args", "modules"),
    [
        (["--help"], ["torch", "numpy", "httptools", "tonle.edge", "tokenizers"]),
        (["bench", "--help"], ["torch", "tonle.engine", "tonle.models"]),
        (["serve", "--help"], ["torch", "tonle.engine", "httptools"]),
        (["chat", "--help"], ["torch", "tonle.engine", "tonle.edge"]),
    ],
)
def test_nothing_heavy_is_imported_for_help(args: list[str], modules: list[str]) -> None:
    program = (
        "import sys, contextlib\n"
        "from tonle.cli import main\n"
        "with contextlib.suppress(SystemExit): main()\n"
        f"sys.exit(' '.join(name for name in {modules} if name in sys.modules) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *args], capture_output=True, text=True, timeout=60, env=environment()
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["fly"], "No such command 'fly'"),
        (["sevre"], "No such command 'sevre'. Did you mean 'serve'?"),
        (["bench", "--duration", "5s"], "'--duration': must be a number"),
        (["bench", "--requests", "few"], "'--requests': must be a whole number"),
        (["serve", "--port", "many"], "must be a whole number"),
        (["serve", "--kv-cache-memory", "lots"], "must be a size such as 2GiB"),
        (["serve", "--no-such-flag"], "No such option"),
        (["run"], "pipe it in"),
        (["run", "hi", "--temperature", "-1"], "--temperature"),
        (["run", "hi", "--raw", "--system", "x"], "it cannot be combined with --raw"),
        (["run", "-"], "the prompt is empty"),
        (["chat", "--url", "http://127.0.0.1:1", "--device", "cpu"], "--device cannot be used with it"),
    ],
)
def test_wrong_usage_ends_with_2(args: list[str], said: str) -> None:
    done = tonle(*args, COLUMNS="200")
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stdout == ""


def test_an_error_is_one_line_without_a_traceback() -> None:
    done = tonle("pull", "/no/such/model")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: no model at /no/such/model: ")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_an_error_is_red_on_a_terminal() -> None:
    with terminal("pull", "/no/such/model") as person:
        assert person.wait() == 1
        assert b"\x1b[31mError: no model at" in person.raw


@pytest.mark.parametrize(("args", "env"), [(["--debug"], {}), ([], {"TONLE_DEBUG": "1"})])
def test_debug_shows_where_an_error_came_from(args: list[str], env: dict[str, str]) -> None:
    done = tonle(*args, "pull", "/no/such/model", **env)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ModelError: no model at" in done.stderr


def test_settings_are_checked_before_anything_is_done() -> None:
    done = tonle("serve", TONLE_MAX_NUM_SEQ="3")
    assert done.returncode == 1
    assert done.stderr == ("Error: unknown environment variable TONLE_MAX_NUM_SEQ; did you mean TONLE_MAX_NUM_SEQS?\n")
