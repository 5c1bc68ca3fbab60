"""Data sheets by name, with a user's numbers, or of those alone."""

from __future__ import annotations

import pytest

from tonle.advise.gpus import GPUS, find_data_sheet, own_data_sheet
from tonle.deploy.gpus import find_gpu
from tonle.errors import ConfigError

NONE = {"memory": None, "bandwidth": None, "flops": None, "fp8_flops": None, "link": None}


@pytest.mark.parametrize(
    ("name", "found"),
    [("h200", "H200"), ("NVIDIA H100", "H100"), ("A100", "A100-80GB"), ("rtx 4090", "RTX-4090"), ("AMD MI300X", "MI300X"),
     ("H100-pcie", "H100-PCIe")],
)  # fmt: skip
def test_names_as_people_write_them(name: str, found: str) -> None:
    assert find_data_sheet(name).name == found


def test_an_unknown_gpu_is_refused_with_a_hint() -> None:
    with pytest.raises(ConfigError, match=r"did you mean H200\?.*--memory"):
        find_data_sheet("H20O")


def test_gpus_that_can_be_deployed_are_the_same_ones_there() -> None:
    for sheet in GPUS.values():
        if sheet.deploy_name is not None:
            other = find_gpu(sheet.deploy_name)
            assert sheet.memory_bytes == other.memory_bytes, sheet.name


def test_own_numbers_replace_those_of_a_data_sheet() -> None:
    base = find_data_sheet("H200")
    assert own_data_sheet(base, **NONE) is base
    mine = own_data_sheet(base, **{**NONE, "bandwidth": 4e12, "flops": 494.5e12})
    assert (mine.bandwidth, mine.memory_bytes) == (4e12, base.memory_bytes)
    assert mine.fp8 == pytest.approx(1979e12 / 2)  # keeps its ratio to bf16
    assert "your numbers" in mine.origin


def test_a_gpu_of_own_numbers_needs_three_of_them() -> None:
    mine = own_data_sheet(None, **{**NONE, "memory": 10**11, "bandwidth": 2e12, "flops": 4e14})
    assert (mine.name, mine.has_fp8, mine.rate("fp8")) == ("your GPU", False, 4e14)
    with pytest.raises(ConfigError, match="--bandwidth, --flops are missing"):
        own_data_sheet(None, **{**NONE, "memory": 10**11})
    with pytest.raises(ConfigError, match="--gpu H200"):
        own_data_sheet(None, **NONE)


def test_the_ridge_by_hand() -> None:
    # 989e12 operations at 2 per weight against 3.35e12 bytes at 2 per weight
    assert find_data_sheet("H100").ridge("bf16", 2.0) == pytest.approx(989 / 3.35)
