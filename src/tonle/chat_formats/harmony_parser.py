"""`HarmonyParser`: reads gpt-oss's messages (see `gpt_oss.py`) out of an answer while it grows.

Does: headers to channels and recipients, bodies to thoughts, content and calls. Does not: check arguments; a grammar does that.

Text without a header is content. A message to anything but one of the tools is content, with its header. Messages of one kind
that follow each other have a new line between them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from tonle.chat_formats.part_parser import PartParser
from tonle.chat_formats.text_reader import Reading

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]+)")
_CHANNEL_NAME = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")
_PLAIN = re.compile(r"[^<]*")
_MAX_HEADER = 400  # characters


class HarmonyParser(PartParser):
    def __init__(self, names: Collection[str], *, tells_thoughts: bool, is_open: bool) -> None:
        self._names = names
        self._tells_thoughts = tells_thoughts
        self._has: set[Callable[[str], None]] = set()  # the kinds of messages that have come
        super().__init__(with_calls=bool(names), is_open=is_open)

    def _read(self, is_open: bool) -> Reading[None]:
        if is_open:
            yield from self._read_body(self._begin(self._parts.reasoning))
        while (yield from self._reader.peek()):
            emit = yield from self._read_header()
            if emit is not None:
                yield from self._read_body(emit)

    def _read_body(self, emit: Callable[[str], None]) -> Reading[None]:
        """Up to the tag that ends the message, or to the beginning of another one, which is left."""
        reader = self._reader
        while True:
            reader.take_run(_PLAIN)
            emit(reader.release())
            if not (yield from reader.peek()):
                return
            found = yield from reader.take_one_of([*ENDS, START, CHANNEL])
            if found in ENDS:
                reader.release()
                return
            if found is not None:
                reader.put_back()
                return
            emit(reader.take())
            reader.release()

    def _read_header(self) -> Reading[Callable[[str], None] | None]:
        """What is to be done with the body that follows; None: the answer breaks off in the header."""
        reader = self._reader
        if (yield from reader.take_one_of([START, CHANNEL, " to="])) is None:
            return self._begin(self._parts.content)
        for _ in range(_MAX_HEADER):
            if (yield from reader.take_one_of([MESSAGE])) is not None:
                return self._kind(reader.release())
            if reader.breaks_off():
                return None
            reader.take()
        emit = self._begin(self._parts.content)  # no header is so long
        emit(reader.release())
        return emit

    def _kind(self, header: str) -> Callable[[str], None]:
        recipient = _RECIPIENT.search(header)
        if recipient is not None:
            name = recipient[1].removeprefix("functions.")
            if name != recipient[1] and name in self._names:
                self._parts.begin_call(name)
                return self._parts.arguments
            self._begin(self._parts.content)(header)
            return self._parts.content
        channel = _CHANNEL_NAME.search(header)
        if channel is not None and channel[1] == "analysis" and self._tells_thoughts:
            return self._begin(self._parts.reasoning)
        return self._begin(self._parts.content)

    def _begin(self, emit: Callable[[str], None]) -> Callable[[str], None]:
        """A message of this kind."""
        if emit in self._has:
            emit("\n")
        self._has.add(emit)
        return emit
