"""A device that cannot be there is refused before anything slow."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from tests.unit.cli.terminal import tonle
from tonle.cli import device
from tonle.errors import ConfigError

FOR_CPUS = "cuda: Optional[str] = None\nhip: Optional[str] = None\n"
FOR_NVIDIA = "cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n"
FOR_AMD = "cuda: Optional[str] = None\nhip: Optional[str] = '6.4'\n"


@pytest.mark.parametrize(
    ("note", "driver", "refused"),
    [
        (FOR_CPUS, True, "built for CPUs only"),
        (FOR_NVIDIA, False, "shows no GPU"),
        (FOR_NVIDIA, True, None),
        (FOR_AMD, True, None),
        (None, True, None),
    ],
)
def test_only_what_is_certainly_not_there_is_refused(
    note: str | None, driver: bool, refused: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if note is not None:
        (tmp_path / "version.py").write_text(note)
    torch = ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: torch)
    monkeypatch.setattr(device, "_machine_may_have_gpus", lambda: driver)
    device.check_device("cpu")
    device.check_device("auto")
    if refused is None:
        device.check_device("cuda:1")
        return
    with pytest.raises(ConfigError, match=f"there is no device cuda:1: .*{refused}.* --device cpu"):
        device.check_device("cuda:1")


@pytest.mark.parametrize("verb", [["serve", "/no/such/model", "--port", "0"], ["run", "hi"], ["chat"]])
def test_verbs_refuse_it_first(verb: list[str]) -> None:
    try:
        device.check_device("cuda")
    except ConfigError:
        done = tonle(*verb, "--device", "cuda")
        assert done.returncode == 1
        assert done.stderr.startswith("Error: there is no device cuda: ") and done.stderr.count("\n") == 1
    else:
        pytest.skip("there may be a GPU here")
