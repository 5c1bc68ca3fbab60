"""`tonle rollout`: options that exclude or need each other. What it does is in tests/gateway/test_rollout.py."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from tonle.cli.app import app


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 1, "give --restart COMMAND, or --replace OLD=URL"),
        (["--restart", "x", "--replace", "a=b"], 1, "give --restart COMMAND, or --replace OLD=URL"),
        (["--replace", "a=b", "--rollback", "x"], 1, "--rollback belong to --restart"),
        (["--replace", "a"], 1, "must be OLD=URL"),
        (["--restart", "x", "--canary", "0%"], 2, "a fraction such as"),
        (["--restart", "x", "--watch", "soon"], 2, "a duration such as"),
        (["--restart", "x", "--gateway", "http://127.0.0.1:1"], 1, "no gateway answers at http://127.0.0.1:1"),
    ],
)
def test_options(words: list[str], code: int, said: str) -> None:
    result = CliRunner().invoke(app, ["rollout", *words], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    assert said in " ".join(result.output.split())
