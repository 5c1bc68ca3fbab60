"""`PartParser`: what parsers of whole answers have in common: text goes in, parts come out."""

from __future__ import annotations

from abc import ABC, abstractmethod

from tonle.chat_formats.part_list import PartList
from tonle.chat_formats.parts import Part
from tonle.chat_formats.text_reader import Reading, TextReader


class PartParser(ABC):
    """A `MessageParser` around one reading of an answer."""

    def __init__(self, *, with_calls: bool, is_open: bool) -> None:
        """Last in the initializer of a parser: the reading begins here."""
        self._reader = TextReader()
        self._parts = PartList(with_calls=with_calls)
        self._reading = self._read(is_open)
        next(self._reading)

    def push(self, text: str) -> list[Part]:
        self._reader.push(text)
        next(self._reading)
        return self._parts.drain()

    def finish(self) -> list[Part]:
        self._reader.end()
        next(self._reading, None)
        return self._parts.drain(is_last=True)

    @abstractmethod
    def _read(self, is_open: bool) -> Reading[None]:
        """The whole answer. `is_open`: the prompt ends inside of a thought."""
