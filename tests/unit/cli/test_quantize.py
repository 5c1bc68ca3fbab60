"""`tonle quantize` from a shell."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from tests.fakes.checkpoints import save_folder
from tonle.cli.app import app


def test_a_copy_in_few_bits(tmp_path: Path) -> None:
    save_folder("llama", tmp_path / "m")
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["quantize", str(tmp_path / "m"), str(out), "--to", "int4", "--group-size", "32"])
    assert done.exit_code == 0, done.output
    said = done.output.replace("\n", "")
    assert "14 matrices in int4; 5" in said and f"tonle serve {out}" in said
    scheme = json.loads((out / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    assert scheme["weights"]["group_size"] == 32 and scheme["weights"]["num_bits"] == 4


def test_wrong_values_name_the_right_ones(tmp_path: Path) -> None:
    save_folder("llama", tmp_path / "m")
    done = CliRunner().invoke(app, ["quantize", str(tmp_path / "m"), str(tmp_path / "out"), "--to", "int2"])
    assert done.exit_code == 2 and "int4" in done.output
    done = CliRunner().invoke(
        app, ["quantize", str(tmp_path / "m"), str(tmp_path / "out"), "--to", "int4", "--group-size", "7"]
    )
    assert done.exit_code == 1 and "power of two" in done.output.replace("\n", " ")
    assert not (tmp_path / "out").exists()
