"""`TextIndex`: where the end of a text has been seen before, and how it went on there.

A dictionary from each run of `RUN` tokens to the latest place after it, and for each place the one before with the same run. The
longest suffix that was seen before is found by comparing backwards at the latest of these places: what a suffix automaton would
find, for a fraction of the memory, and text can be added at a microsecond per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

RUN = 3  # tokens that must be equal
MAX_MATCH = 24  # more equal tokens say no more
_MAX_PLACES = 8  # the latest with the same run that are compared
_BITS = 21  # of a token in a key: vocabularies of up to two million
_MASK = (1 << (RUN * _BITS)) - 1
_BREAK = -1  # between two texts


class Match(NamedTuple):
    """The end of a text, seen before."""

    length: int  # tokens that are equal, RUN to MAX_MATCH
    tokens: list[int]  # of the text it was seen in
    places: list[int]  # where it went on there, the latest first

    def continuation(self) -> Iterator[tuple[int, float]]:
        """The tokens that followed, each with the share of places that go on with it. Places that went on otherwise drop out."""
        tokens, places, size = self.tokens, self.places, len(self.tokens)
        while places:
            if len(places) == 1:
                for at in range(places[0], size):
                    if (token := tokens[at]) == _BREAK:
                        return
                    yield token, 1.0
                return
            counts: dict[int, int] = {}
            for at in places:
                counts[tokens[at]] = counts.get(tokens[at], 0) + 1
            token = max(counts, key=counts.__getitem__)  # of two, the latest
            if token == _BREAK:
                return
            yield token, counts[token] / len(places)
            places = [at + 1 for at in places if tokens[at] == token and at + 1 < size]


class TextIndex:
    """Of texts that grow at their end."""

    __slots__ = ("_earlier", "_key", "_latest", "_num_run", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._latest: dict[int, int] = {}  # run -> the latest place after it
        self._earlier: list[int] = []  # by place: the one before it with the same run; -1: none
        self._key = 0  # of the last RUN tokens
        self._num_run = 0  # tokens since the last break

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, new: list[int]) -> None:
        tokens, earlier, latest = self.tokens, self._earlier, self._latest
        key, num_run = self._key, self._num_run
        for place, token in enumerate(new, len(tokens)):
            if num_run >= RUN:
                earlier.append(latest.get(key, -1))
                latest[key] = place
            else:
                earlier.append(-1)
            key = ((key << _BITS) | token) & _MASK
            num_run += 1
        tokens += new
        self._key, self._num_run = key, num_run

    def end_text(self) -> None:
        """What comes next is another text: no run goes across."""
        self.tokens.append(_BREAK)
        self._earlier.append(-1)
        self._num_run = 0

    def find(self, text: list[int]) -> Match | None:
        """The longest end of `text` that is in here, and followed by something."""
        if len(text) < RUN:
            return None
        key = (((text[-3] << _BITS) | text[-2]) << _BITS) | text[-1]
        place = self._latest.get(key, -1)
        if place < 0:
            return None
        return self._longest(text, place)

    def _longest(self, text: list[int], place: int) -> Match:
        tokens, earlier = self.tokens, self._earlier
        best, places = 0, [place]
        for _ in range(_MAX_PLACES):
            length = _num_equal(tokens, place, text)
            if length > best:
                best, places = length, [place]
            elif length == best:
                places.append(place)
            if (place := earlier[place]) < 0:
                break
        return Match(best, tokens, places)


def _num_equal(tokens: list[int], place: int, text: list[int]) -> int:
    """Tokens before `place` that equal the end of `text`; RUN of them are known to."""
    most = min(MAX_MATCH, place, len(text))
    length = RUN
    while length < most and tokens[place - 1 - length] == text[-1 - length]:
        length += 1
    return length
