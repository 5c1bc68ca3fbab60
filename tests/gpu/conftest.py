"""What tests of the CUDA path share: the interpreter where there is no GPU, and a mutation where one is asked for."""

from __future__ import annotations

import os

import pytest

from tests.gpu.cases import INTERPRETED

if INTERPRETED:
    from tests.unit.models.cuda.conftest import eight_bits, whole_numbers  # noqa: F401
    from tests.unit.models.cuda.test_engine import small_tilings  # noqa: F401  # and the CUDA machine on a CPU


def pytest_configure(config: pytest.Config) -> None:
    """For `python -m tests.gpu.mutations`, which sets the variable for the process it starts."""
    if name := os.environ.get("TONLE_TEST_MUTATION"):
        from tests.gpu.patches import PATCHES

        PATCHES[name]()
