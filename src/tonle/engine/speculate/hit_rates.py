"""How often guesses are right, by how much text was equal before them: of all requests, and of each one by itself."""

from __future__ import annotations

_CLASS_ENDS = (3, 5, 8, 15)  # equal tokens: up to so many are a class; more are the last one
NUM_CLASSES = len(_CLASS_ENDS) + 1
_FIRST = (0.35, 0.5, 0.65, 0.75, 0.85)  # by class, before anything was seen
_STEP = 1 / 64  # of the rate of all, with each guess
_KEEP = 0.9  # of what one request has shown, with each guess
_WEIGHT = 3.0  # of the rate of all against a request's own guesses


def class_of(length: int) -> int:
    for number, end in enumerate(_CLASS_ENDS):
        if length <= end:
            return number
    return len(_CLASS_ENDS)


class HitRates:
    """Of all requests together."""

    def __init__(self, first: tuple[float, ...] = _FIRST) -> None:
        self.rates = list(first)

    def learn(self, number: int, hit: bool) -> None:
        self.rates[number] += _STEP * (hit - self.rates[number])


class OwnRates:
    """Of one request: it begins with the rates of all, and goes its own way the more it has shown."""

    __slots__ = ("_all", "_hits", "_trials")

    def __init__(self, of_all: HitRates) -> None:
        self._all = of_all
        self._hits = [0.0] * NUM_CLASSES
        self._trials = [0.0] * NUM_CLASSES

    def rate(self, length: int) -> float:
        """The share of guesses that are right after `length` equal tokens."""
        number = class_of(length)
        return (self._hits[number] + _WEIGHT * self._all.rates[number]) / (self._trials[number] + _WEIGHT)

    def learn(self, length: int, hit: bool) -> None:
        number = class_of(length)
        self._hits[number] = _KEEP * self._hits[number] + hit
        self._trials[number] = _KEEP * self._trials[number] + 1
        self._all.learn(number, hit)
