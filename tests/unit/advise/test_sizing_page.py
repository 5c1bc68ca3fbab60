"""docs/sizing.md: its tables are what the code says, and its Python runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.advise.cases import question
from tests.unit.advise.test_roofline import MEASURED, predicted_ms
from tonle.advise.choose import all_options
from tonle.advise.units import count_text
from tonle.bench.slo import duration_text

PAGE = (Path(__file__).parents[3] / "docs" / "sizing.md").read_text()


def rows(begin: str) -> list[list[str]]:
    """Cells of the table that follows these words."""
    table = PAGE[PAGE.index(begin) :].split("\n\n")[1]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_predicted_steps() -> None:
    found = [
        (
            model,
            int(num.replace("–", "0")),
            400 if num != "–" else 0,
            int(prompt.replace("–", "0")),
            float(ms),
            float(said),
        )
        for model, num, prompt, ms, said in rows("Steps on an H200")
    ]
    assert [row[:5] for row in found] == MEASURED
    for *step, _, said in found:
        assert said == pytest.approx(predicted_ms(*step), rel=0.005)


def test_options_of_the_example() -> None:
    options = {f"{o.times.precision.name} × {o.times.gpus}": o for o in all_options(question())}
    for name, tokens, users, batch, one, full, ttft, gpu_s in rows(
        "`tonle advise llama-3.1-70b --gpu H100 --preset long`"
    ):
        option = options[name]
        assert option.settings is not None
        assert (tokens, users, batch) == (
            count_text(option.capacity.kv_tokens),
            f"{option.capacity.users_mean} · {option.capacity.users_p95}",
            str(option.settings.max_num_seqs),
        )
        shown = (
            duration_text(option.decode_one_ms),
            duration_text(option.tpot_ms),
            duration_text(option.ttft_floor_ms["p95"]),
        )
        assert (one, full, ttft, gpu_s) == (*shown, f"{option.gpu_s:.3g}")


def test_its_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code = re.search(r"From Python:\n\n((?:    .*\n|\n)+)", PAGE)
    assert code is not None
    exec(re.sub(r"(?m)^    ", "", code[1]), {})
    assert capsys.readouterr().out.startswith("bf16 × 1 L40S Settings(max_num_seqs=")
