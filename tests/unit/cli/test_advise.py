"""`tonle advise` as a person calls it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tonle.cli.app import app

CHAT = ["--input-tokens", "32-400", "--output-tokens", "16-48"]


def run(*args: str) -> Result:
    return CliRunner().invoke(app, ["advise", *args], env={"COLUMNS": "150"})


def test_a_report_has_a_reason_for_every_line() -> None:
    result = run("qwen2.5-7b", "--gpu", "l40s", *CHAT, "--concurrency", "40", "--ttft-p95", "1s", "--price", "1.5")
    assert result.exit_code == 0, result.stderr
    assert "1 replica of bf16 × 1 L40S: 1 GPU, 1.5 per hour; the SLO holds in simulation." in result.stdout
    for words in ("Model", "Precision and GPUs", "Floors (roofline)", "Capacity and limits", "Checked by simulation",
                  "tonle serve MODEL", "per million output tokens", "long_prefill_token_threshold"):  # fmt: skip
        assert words in " ".join(result.stdout.split())
    assert "simulating: " in result.stderr
    assert not re.search(r"\bNone\b|nan|inf\b", result.stdout)


def test_without_a_price_there_are_no_costs() -> None:
    result = run("qwen2.5-7b", "--gpu", "L40S", *CHAT)
    assert result.exit_code == 0
    assert "per hour" not in result.stdout
    assert "per million" not in result.stdout


def test_json_and_markdown(tmp_path: Path) -> None:
    report, page = tmp_path / "advice.json", tmp_path / "advice.md"
    result = run("qwen2.5-7b", "--gpu", "L40S", *CHAT, "--json", str(report), "--markdown", str(page))
    assert result.exit_code == 0
    found = json.loads(report.read_text())
    assert found["schema"] == "tonle.advice/1"
    assert found["chosen"] == "bf16 × 1 L40S"
    assert found["check"]["failed"] == 0
    lines = [line for section in found["sections"] for line in section["lines"]]
    assert len(lines) > 12
    assert all(line["verdict"] and line["reason"] for line in lines)
    text = page.read_text()
    assert text.startswith("# Sizing: qwen2.5-7b on L40S")
    assert "| bf16 × 1 |" in text
    assert all(line["verdict"] in text for line in lines)
    alone = run("qwen2.5-7b", "--gpu", "L40S", *CHAT, "--no-simulate", "--json", "-")
    assert json.loads(alone.stdout)["check"] is None


def test_numbers_instead_of_names() -> None:
    result = run(
        "--params", "70B", "--layers", "80", "--kv-heads", "8", "--head-size", "128", "--memory", "141GB", "--bandwidth",
        "4.8TB/s", "--flops", "990T", "--fp8-flops", "1980T", "--no-simulate", *CHAT,
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert "your model on your GPU" in result.stdout
    assert "328 kB per token" in result.stdout


def test_nothing_fits_is_exit_status_1() -> None:
    result = run("llama-3.1-405b", "--gpu", "L4", *CHAT)
    assert result.exit_code == 1
    assert "Nothing fits" in result.stdout
    assert "Use a GPU with more memory" in result.stdout


def test_an_slo_that_does_not_hold_is_exit_status_1() -> None:
    result = run("qwen2.5-7b", "--gpu", "L4", *CHAT, "--rate", "1", "--itl-p99", "1ms")
    assert result.exit_code == 1
    assert "does NOT hold in simulation" in result.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["llama-9", "--gpu", "H100"], "are not known"),
        (["qwen2.5-7b", "--gpu", "H1000"], "did you mean H100?"),
        (["qwen2.5-7b"], "name a GPU"),
        (["qwen2.5-7b", "--memory", "80GB"], "--bandwidth, --flops are missing"),
        (["--gpu", "H100"], "name a model"),
        (["--gpu", "H100", "--params", "7B"], "also give --layers, --kv-heads, --head-size"),
        (["qwen2.5-7b", "--gpu", "H100", "--layers", "3"], "leave qwen2.5-7b out, or the numbers"),
        (["qwen2.5-7b", "--gpu", "H100", "--input-tokens", "lots"], "input_tokens is a number"),
        (["qwen2.5-7b", "--gpu", "H100", "--input-tokens", "0"], "at least 1 token"),
        (["qwen2.5-7b", "--gpu", "H100", "--input-tokens", "900000"], "do not fit the context"),
        (["qwen2.5-7b", "--gpu", "H100", "--rate", "1", "--concurrency", "2"], "not both"),
        (["qwen2.5-7b", "--gpu", "H100", "--rate", "-1"], "more than 0"),
        (["qwen2.5-7b", "--gpu", "H100", "--price", "-3"], "--price must be more than 0"),
        (["qwen2.5-7b", "--gpu", "H100", "--precision", "fp2"], "'fp2' is not known"),
        (["qwen2.5-7b", "--gpu", "H100", "--gpus-per-replica", "3"], "1, 2, 4 or 8"),
        (["qwen2.5-7b", "--gpu", "H100", "--gpus-per-replica", "two"], "1, 2, 4 or 8"),
        (["qwen2.5-7b", "--gpu", "H100", "--bandwidth", "fast"], "such as 4.8TB/s"),
        (["qwen2.5-7b", "--gpu", "H100", "--ttft-p95", "soon"], "takes a time"),
        (["qwen2.5-7b", "--gpu", "H100", "--json", "/no/such/folder/x.json"], "/no/such/folder"),
    ],
)
def test_wrong_input_is_exit_status_2_and_says_what_to_do(args: list[str], words: str) -> None:
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.stderr.replace("│", " ").split())
    assert result.stdout == ""


def test_lists() -> None:
    assert "llama-3.1-70b" in run("list").stdout
    assert "H200" in run("--gpu", "list").stdout


def test_it_needs_no_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from typer.testing import CliRunner; from tonle.cli.app import app; "
        "r = CliRunner().invoke(app, ['advise', 'qwen2.5-7b', '--gpu', 'H100', '--output-tokens', '8']); "
        "assert r.exit_code == 0, r.output; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
