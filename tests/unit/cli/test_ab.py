"""`tonle ab report` over records as the audit writes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.cli.terminal import tonle


def write(folder: Path, arm: str, total_ms: float, index: int, status: str = "ok") -> None:
    day = folder / "2026-01-01"
    day.mkdir(exist_ok=True)
    record = {
        "status": status,
        "experiment": {"name": "e", "arm": arm},
        "latency_ms": {"total": total_ms, "ttft": 5.0 + index % 3},
        "usage": {"completion_tokens": 8},
    }
    (day / f"chat_completions_{arm}{index}.json").write_text(json.dumps(record))


def test_a_report(tmp_path: Path) -> None:
    for index in range(40):
        write(tmp_path, "control", 100 + index % 7, index)
        write(tmp_path, "canary", 150 + index % 7, index)
    (tmp_path / "2026-01-01" / "torn.json").write_text("{")
    shown = tonle("ab", "report", str(tmp_path), "--control", "control", COLUMNS="160").stdout
    assert "Experiment e" in shown and "latency_ms" in shown and "different" in shown and "could be chance" in shown
    facts = json.loads(tonle("ab", "report", str(tmp_path), "--control", "control", "--json").stdout)
    latency = next(each for each in facts["comparisons"] if each["measure"] == "latency_ms")
    assert latency["significant"] and latency["difference"] == pytest.approx(50)
    assert latency["interval"][0] < 50 < latency["interval"][1]
    ttft = next(each for each in facts["comparisons"] if each["measure"] == "ttft_ms")
    assert not ttft["significant"]


def test_nothing_to_report(tmp_path: Path) -> None:
    assert "belongs to an experiment" in tonle("ab", "report", str(tmp_path)).stderr
    assert "there is no directory" in tonle("ab", "report", str(tmp_path / "none")).stderr
