"""One table for the gateway and the engine's server: what asks for which priority, exactly."""

from __future__ import annotations

from typing import Any

import pytest

from tonle.protocol.priority import PRIORITIES, read_priority


@pytest.mark.parametrize(
    ("asked", "number"),
    [(0, 0), (1, 1), (2, 2), (3, 3), ("critical", 0), ("high", 1), ("normal", 2), ("low", 3), ("HIGH", 1)],
)
def test_what_is_a_priority(asked: Any, number: int) -> None:
    assert read_priority(asked) == number


@pytest.mark.parametrize(
    "asked",
    [
        "crıtıcal",
        "crİtİcal",
        "ﬁrst",
        "High",
        " high",
        "high\x00",
        "0",
        "",
        -1,
        4,
        10**400,
        True,
        False,
        0.0,
        1.5,
        [],
        {},
        [0],
    ],
)
def test_what_is_none(asked: Any) -> None:
    assert read_priority(asked) is None


def test_every_word_is_ascii() -> None:
    assert all(word.isascii() for word in PRIORITIES)
