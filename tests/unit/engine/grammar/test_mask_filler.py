"""Masks that come late: others get theirs, and the late one is there when it is asked for again."""

from __future__ import annotations

import threading
from collections.abc import Iterator

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
        assert self.gate.wait(120)
        if self._fails:
            raise ValueError("no mask")
        self.num_filled += 1
        mask[:] = self.value
        return self.value > 0


def fill(filler: MaskFiller, constraints: list[Slow], masks: np.ndarray, wait_s: float | None) -> list[bool | None]:
    return filler.take(filler.start([*constraints]), [*masks], wait_s)


@pytest.fixture
def filler() -> Iterator[MaskFiller]:
    filler = MaskFiller(WORDS, 3, lambda all, masks: [each.fill(mask) for each, mask in zip(all, masks, strict=True)])
    yield filler
    filler.close()


def test_a_slow_mask_is_late_and_others_are_not(filler: MaskFiller) -> None:
    slow, quick, free = Slow(7), Slow(5, is_open=False), Slow(0)
    masks = np.zeros((3, WORDS), np.int32)
    assert fill(filler, [slow, quick, free], masks, 0.0) == [None, None, None], "one job, which one of them holds up"
    quick.gate.set()
    assert fill(filler, [slow, quick, free], masks, None) == [True, True, False]
    slow.gate.clear()  # they are jobs of their own now
    found: list[bool | None] = [None, None, None]
    for _ in range(200):  # the quick ones are done soon
        found = fill(filler, [slow, quick, free], masks, 0.05)
        if found == [None, True, False]:
            break
    assert found == [None, True, False] and masks[1].tolist() == [5] * WORDS
    assert filler.is_late(slow) and filler.holds(slow)
    slow.gate.set()
    assert fill(filler, [slow], masks[:1], None) == [True]
    assert masks[0].tolist() == [7] * WORDS and slow.num_filled == 2, "it is not filled twice"
    assert not filler.is_late(slow) and not filler.holds(slow)


def test_a_mask_that_is_dropped_is_filled_anew(filler: MaskFiller) -> None:
    slow = Slow(7, is_open=False)
    assert fill(filler, [slow], np.zeros((1, WORDS), np.int32), 0.0) == [None]
    filler.drop(slow)
    assert not filler.is_late(slow) and not filler.holds(slow)
    slow.gate.set()


def test_a_failure_reaches_the_caller(filler: MaskFiller) -> None:
    with pytest.raises(ValueError, match="no mask"):
        fill(filler, [Slow(1, fails=True)], np.zeros((1, WORDS), np.int32), None)
    assert fill(filler, [Slow(3)], np.zeros((1, WORDS), np.int32), None) == [True]
