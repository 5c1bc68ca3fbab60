"""Masks that come late: others get theirs, and the late one is there when it is asked for again."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tonle.engine.grammar.mask_filler import MaskFiller

WORDS = 3


class Slow:
    """Fills when it is let."""

    is_complete = False
    error = None

    def __init__(self, value: int, *, is_open: bool = True, fails: bool = False) -> None:
        self.value = value
        self.gate = threading.Event()
        self.num_filled = 0
        self._fails = fails
        if is_open:
            self.gate.set()

    def push(self, token: int) -> None: ...

    def forced(self, most: int, least: int = 1) -> list[int]:
        return []

    def fill(self, mask: np.ndarray) -> bool:
        assert self.gate.wait(20)
        if self._fails:
            raise ValueError("no mask")
        self.num_filled += 1
        mask[:] = self.value
        return self.value > 0


@pytest.fixture
def filler():
    filler = MaskFiller(WORDS, 2)
    yield filler
    filler.close()


def test_a_slow_mask_is_late_and_others_are_not(filler: MaskFiller) -> None:
    slow, quick, free = Slow(7, is_open=False), Slow(5), Slow(0)
    masks = np.zeros((3, WORDS), np.int32)
    found: list[bool | None] = [None, None, None]
    for _ in range(200):  # the quick ones are done soon
        found = filler.fill([slow, quick, free], masks, 0.05)
        if found == [None, True, False]:
            break
    assert found == [None, True, False] and masks[1].tolist() == [5] * WORDS
    assert filler.is_late(slow) and filler.holds(slow)
    slow.gate.set()
    assert filler.fill([slow], masks[:1], None) == [True]
    assert masks[0].tolist() == [7] * WORDS and slow.num_filled == 1, "it is not filled twice"
    assert not filler.is_late(slow) and not filler.holds(slow)


def test_a_mask_that_is_dropped_is_filled_anew(filler: MaskFiller) -> None:
    slow = Slow(7, is_open=False)
    assert filler.fill([slow], np.zeros((1, WORDS), np.int32), 0.0) == [None]
    filler.drop(slow)
    assert not filler.is_late(slow) and not filler.holds(slow)
    slow.gate.set()


def test_a_failure_reaches_the_caller(filler: MaskFiller) -> None:
    with pytest.raises(ValueError, match="no mask"):
        filler.fill([Slow(1, fails=True)], np.zeros((1, WORDS), np.int32), None)
    assert filler.fill([Slow(3)], np.zeros((1, WORDS), np.int32), None) == [True]
