"""The short form: the same cases every time. `make fuzz` runs the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.file_targets import FILE_TARGETS
from tests.fuzz.form_targets import FORM_TARGETS
from tests.fuzz.http_targets import HTTP_TARGETS
from tests.fuzz.stream_targets import STREAM_TARGETS
from tests.fuzz.target import Target, run_target

TARGETS: list[Target] = [*HTTP_TARGETS, *STREAM_TARGETS, *FILE_TARGETS, *FORM_TARGETS]
CASES_PER_WEIGHT = 5


@pytest.mark.parametrize("target", TARGETS, ids=[target.name for target in TARGETS])
def test_nothing_breaks(target: Target, tmp_path: Path) -> None:
    outcome = run_target(target, CASES_PER_WEIGHT * target.weight, chosen_seed=1, folder=tmp_path)
    if outcome.failure is not None:
        raise outcome.failure
    assert outcome.kinds.total() >= CASES_PER_WEIGHT
