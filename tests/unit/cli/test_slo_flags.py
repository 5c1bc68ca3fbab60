"""The flags of an SLO: what they make, and what they refuse."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from tonle.bench.slo import Bound, Slo
from tonle.cli.slo_flags import slo_of, with_slo_flags
from tonle.errors import ConfigError

runner = CliRunner()


def app() -> typer.Typer:
    made = typer.Typer(pretty_exceptions_enable=False)

    @made.command()
    @with_slo_flags
    def verb(name: str, slo: Slo) -> None:
        print(f"{name}: {slo or 'none'}")

    return made


def test_a_verb_gets_one_slo() -> None:
    args = ["x", "--ttft-p95", "200ms", "--e2el-p99", "8s", "--slo", "itl-p50=20ms", "--slo", "tpot-p99.9=1s"]
    result = runner.invoke(app(), args)
    assert result.exit_code == 0, result.output
    assert result.stdout == "x: TTFT p95 ≤ 200 ms, E2EL p99 ≤ 8 s, ITL p50 ≤ 20 ms, TPOT p99.9 ≤ 1 s\n"


def test_without_flags_it_is_false() -> None:
    assert runner.invoke(app(), ["x"]).stdout == "x: none\n"


def test_the_help_has_every_flag_and_the_verbs_own() -> None:
    text = runner.invoke(app(), ["--help"], env={"COLUMNS": "140"}).stdout
    for metric in ("ttft", "tpot", "itl", "e2el"):
        assert f"--{metric}-p95 " in text
        assert f"--{metric}-p99 " in text
    assert "--slo " in text
    assert "name" in text.lower()


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["--ttft-p95", "fast"], "--ttft-p95 takes a time such as 200ms"),
        (["--slo", "ttft=3ms"], "an SLO is written as"),
        (["--slo", "ttft-p95=3ms", "--ttft-p95", "4ms"], "TTFT p95 has two limits"),
    ],
)
def test_what_is_refused(args: list[str], why: str) -> None:
    result = runner.invoke(app(), ["x", *args], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert why in " ".join(result.stderr.split())


def test_from_a_mapping() -> None:
    assert slo_of({"ttft_p95": "200ms", "itl_p99": None}) == Slo((Bound("ttft", 95, 200.0),))
    with pytest.raises(ConfigError):
        slo_of({"ttft_p95": "-1"})
