"""`tonle ray` on a machine without Ray, and with settings that are wrong: what to do is said, and nothing is started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tonle.cli.app import app


@pytest.mark.parametrize("words", [["up"], ["status"], ["down"]], ids=" ".join)
def test_without_ray_it_says_how_to_install_it(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in [name for name in sys.modules if name.startswith(("tonle.scaleout.ray_", "ray."))]:
        monkeypatch.delitem(sys.modules, name)
    result = CliRunner().invoke(app, ["ray", *words])
    assert result.exit_code == 1
    assert "pip install 'tonle[ray]'" in result.output


def test_wrong_settings_are_refused_before_a_cluster_is_looked_for(tmp_path: Path) -> None:
    file = tmp_path / "tonle.yaml"
    file.write_text("ray: {min_replicas: 3, max_replicas: 2}\n")
    result = CliRunner().invoke(app, ["ray", "up", "--config", str(file)])
    assert result.exit_code == 1
    assert "raise max_replicas" in result.output
    wrong = CliRunner().invoke(app, ["ray", "up", "--max-use", "150%"])
    assert wrong.exit_code == 2
