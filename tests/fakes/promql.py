"""As much of PromQL as rules and dashboards use: `names` parses an expression and gives the metrics it reads.

Raises `ValueError` for what is not an expression. Functions, aggregations and label matchers are checked by name and form.
"""

from __future__ import annotations

import re
from typing import NoReturn

_TOKEN = re.compile(
    r"""\s*(?:
    (?P<number>\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w:]))
  | (?P<duration>\d+(?:ms|[smhdwy])(?![\w:]))
  | (?P<variable>\$__\w+)
  | (?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)
  | (?P<string>"(?:[^"\\]|\\.)*")
  | (?P<sign>=~|!~|!=|==|>=|<=|[-+*/%^<>=(){}\[\],])
)""",
    re.VERBOSE,
)
_FUNCTIONS = {  # name -> number of arguments
    "rate": 1, "increase": 1, "deriv": 1, "histogram_quantile": 2, "changes": 1, "max_over_time": 1, "label_values": 2,
}  # fmt: skip
_RANGES = {"rate", "increase", "deriv", "changes", "max_over_time"}
_AGGREGATIONS = {"sum", "min", "max", "avg", "count"}
_LEVELS = (("or",), ("and", "unless"), ("==", "!=", ">", "<", ">=", "<="), ("+", "-"), ("*", "/", "%"))
_MATCHERS = {"=", "!=", "=~", "!~"}


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(self._scan(text))
        self._place = 0
        self.names: list[tuple[str, set[str]]] = []  # metric, labels that it is matched or grouped by

    @staticmethod
    def _scan(text: str) -> list[tuple[str, str]]:
        found, place = [], 0
        text = text.rstrip()
        while place < len(text):
            match = _TOKEN.match(text, place)
            if match is None or match.lastgroup is None:
                raise ValueError(f"{text!r}: not understood from {text[place : place + 20]!r} on")
            found.append((match.lastgroup, match[match.lastgroup]))
            place = match.end()
        return [*found, ("end", "")]

    @property
    def _next(self) -> str:
        return self._tokens[self._place][1]

    def _take(self, wanted: str | None = None, *, kind: str | None = None) -> str:
        found_kind, found = self._tokens[self._place]
        if (wanted is not None and found != wanted) or (kind is not None and found_kind != kind):
            self._fail(f"{wanted or kind} expected, not {found!r}")
        self._place += 1
        return found

    def _fail(self, why: str) -> NoReturn:
        raise ValueError(f"{self._text!r}: {why}")

    def whole(self) -> None:
        self.expression()
        if self._tokens[self._place][0] != "end":
            self._fail(f"ends before {self._next!r}")

    def expression(self, level: int = 0) -> None:
        if level == len(_LEVELS):
            self._operand()
            return
        self.expression(level + 1)
        while self._next in _LEVELS[level]:
            self._take()
            if self._next in ("on", "ignoring"):
                self._take()
                self._labels()
                if self._next in ("group_left", "group_right"):
                    self._take()
            self.expression(level + 1)

    def _operand(self) -> None:
        kind, token = self._tokens[self._place]
        if token == "(":
            self._take()
            self.expression()
            self._take(")")
        elif kind == "number":
            self._take()
        elif token in _AGGREGATIONS:
            self._aggregation()
        elif token in _FUNCTIONS:
            self._call()
        elif kind == "name":
            if self._selector():
                self._fail("a range outside a function")
        else:
            self._fail(f"an operand expected, not {token!r}")

    def _aggregation(self) -> None:
        self._take()
        first, labels = len(self.names), set()
        if self._next in ("by", "without"):
            self._take()
            labels = self._labels()
        self._take("(")
        self.expression()
        self._take(")")
        for _, used in self.names[first:]:
            used |= labels

    def _call(self) -> None:
        name = self._take()
        self._take("(")
        for number in range(_FUNCTIONS[name]):
            if number:
                self._take(",")
            if name in _RANGES:
                if not self._selector():
                    self._fail(f"{name} needs a range")
            else:
                self.expression()
        self._take(")")

    def _labels(self) -> set[str]:
        self._take("(")
        found = set()
        while self._next != ")":
            found.add(self._take(kind="name"))
            if self._next != ")":
                self._take(",")
        self._take(")")
        return found

    def _selector(self) -> bool:
        """Whether it has a range."""
        metric, labels = self._take(kind="name"), set()
        if self._next == "{":
            self._take()
            while self._next != "}":
                labels.add(self._take(kind="name"))
                if self._take() not in _MATCHERS:
                    self._fail("a matcher expected")
                pattern = self._take(kind="string")
                re.compile(pattern.strip('"').replace("$", ""))
                if self._next != "}":
                    self._take(",")
            self._take("}")
        self.names.append((metric, labels))
        if self._next != "[":
            return False
        self._take()
        if self._tokens[self._place][0] not in ("duration", "variable"):
            self._fail("a duration expected")
        self._take()
        self._take("]")
        return True


def read(expression: str) -> list[tuple[str, set[str]]]:
    """The metrics it reads, each with the labels that it is matched or grouped by."""
    parser = _Parser(expression)
    parser.whole()
    return parser.names
