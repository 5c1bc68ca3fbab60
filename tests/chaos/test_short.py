"""The short form of the chaos run: the most telling faults against a tiny model. `-m "not chaos"` leaves it out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos.__main__ import SHORT_FAULTS, short_options
from tests.chaos.rows import markdown
from tests.chaos.stack import Stack
from tests.chaos.trial import Fault, run_fault

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(short_options(tmp_path_factory.mktemp("chaos"))) as running:
        yield running


@pytest.mark.parametrize("fault", SHORT_FAULTS, ids=lambda fault: fault.name)
def test_no_request_and_no_record_is_lost(stack: Stack, fault: Fault) -> None:
    row = run_fault(stack, fault)
    assert not row.skipped and row.count("answered") > 0
    assert not row.red, f"{row.line()}\n\n{markdown([row])}"
