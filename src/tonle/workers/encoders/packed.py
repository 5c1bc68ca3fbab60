"""`Packed`: several inputs as one run of tokens, so that no product is computed for padding.

Does: hold ids and lengths; lay inputs of similar length side by side for attention. Does not: compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Types = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Group:
    """Inputs that attention computes together: a rectangle, padded to the longest of them."""

    first: int  # token of the run that it begins with
    lengths: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def is_even(self) -> bool:
        return self.lengths[0] == self.lengths[-1]  # they are sorted


@dataclass(frozen=True, slots=True)
class Packed:
    """Inputs, the shortest first, one behind the other."""

    ids: Ids  # (tokens,)
    types: Types  # (tokens,): 1 in the second text of a pair
    lengths: tuple[int, ...]
    order: tuple[int, ...]  # which of the given inputs stands at each place

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def starts(self) -> NDArray[np.int64]:
        """The first token of each input."""
        starts: NDArray[np.int64] = np.cumsum(self.lengths) - np.asarray(self.lengths)
        return starts

    @property
    def positions(self) -> NDArray[np.int64]:
        """Of each token in its own input."""
        return np.arange(self.num_tokens) - np.repeat(self.starts, self.lengths)

    def groups(self, most_padding: float) -> list[Group]:
        """`most_padding`: of a group, padding / tokens."""
        found: list[Group] = []
        first, members = 0, list[int]()
        for length in self.lengths:
            total = sum(members) + length
            if members and (len(members) + 1) * length > total * (1 + most_padding):
                found.append(Group(first, tuple(members)))
                first += sum(members)
                members = []
            members.append(length)
        found.append(Group(first, tuple(members)))
        return found


def pack(inputs: Sequence[tuple[Ids, Types | None]]) -> Packed:
    """Ids and types of each; None: all 0."""
    order = sorted(range(len(inputs)), key=lambda place: len(inputs[place][0]))
    ids = [inputs[place][0] for place in order]
    types = [
        np.zeros(len(inputs[place][0]), np.uint8) if inputs[place][1] is None else inputs[place][1] for place in order
    ]
    return Packed(
        np.concatenate(ids), np.concatenate([each for each in types if each is not None]), tuple(map(len, ids)),
        tuple(order),
    )  # fmt: skip


def passes(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Places of the inputs that one forward pass takes, the shortest first, each pass within `max_tokens` or one input."""
    found: list[list[int]] = []
    room = 0
    for place in sorted(range(len(lengths)), key=lambda place: lengths[place]):
        if not found or lengths[place] > room:
            found.append([])
            room = max_tokens
        found[-1].append(place)
        room -= lengths[place]
    return found
