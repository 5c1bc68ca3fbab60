"""Inputs without padding: the order, the passes and the rectangles of attention."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tonle.workers.encoders.packed import pack, passes

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=30)


@given(lengths)
def test_every_input_is_packed_once_behind_the_other(sizes: list[int]) -> None:
    inputs = [(np.full(size, place, np.int32), None) for place, size in enumerate(sizes)]
    packed = pack(inputs)
    assert packed.num_tokens == sum(sizes)
    assert sorted(packed.order) == list(range(len(sizes)))
    for start, length, place in zip(packed.starts, packed.lengths, packed.order, strict=True):
        assert length == sizes[place]
        assert (packed.ids[start : start + length] == place).all()
        assert (packed.positions[start : start + length] == np.arange(length)).all()


@given(lengths, st.floats(0, 2))
def test_groups_are_all_tokens_with_bounded_padding(sizes: list[int], most: float) -> None:
    packed = pack([(np.zeros(size, np.int32), None) for size in sizes])
    groups = packed.groups(most)
    assert [length for group in groups for length in group.lengths] == list(packed.lengths)
    at = 0
    for group in groups:
        assert group.first == at
        at += group.num_tokens
        assert len(group.lengths) * group.lengths[-1] <= group.num_tokens * (1 + most) * (1 + 1e-9)
        assert group.is_even == (len(set(group.lengths)) == 1)


@given(lengths, st.integers(1, 60))
def test_passes_are_bounded(sizes: list[int], most: int) -> None:
    found = passes(sizes, most)
    assert sorted(place for each in found for place in each) == list(range(len(sizes)))
    for each in found:
        assert len(each) == 1 or sum(sizes[place] for place in each) <= most
