"""What tests of the CUDA path share: the interpreter where there is no GPU, and a mutation where one is asked for."""

from __future__ import annotations

import os

import pytest

from tests.gpu.cases import INTERPRETED

if INTERPRETED:
    from tests.unit.models.cuda.conftest import eight_bits, whole_numbers  # noqa: F401
    from tests.unit.models.cuda.test_engine import small_tilings  # noqa: F401  # and the CUDA machine on a CPU
    from tonle.models.cuda import gemv

    @pytest.fixture(autouse=True)
    def tiles_of_one_module(small_tilings: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
        """With an adapter no tile may reach from queries into keys: 32 rows of those in the smallest models."""
        monkeypatch.setattr(gemv, "gemv_tiling", lambda outputs, inputs, norm: gemv.GemvTiling(32, 32, warps=1))


def pytest_configure(config: pytest.Config) -> None:
    """For `python -m tests.gpu.mutations`, which sets the variable for the process it starts."""
    if name := os.environ.get("TONLE_TEST_MUTATION"):
        from tests.gpu.patches import PATCHES

        PATCHES[name]()
