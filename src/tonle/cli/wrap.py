"""`WordWrapper`: an answer that arrives in pieces, broken into lines at words, to the width of the terminal.

A word is shown as it arrives. If it turns out not to fit, it is taken off the line and written again on the next one.
Scripts that are written without spaces (Chinese, Japanese, Khmer, Thai, Lao, Burmese) break between grapheme clusters,
as does a word that is longer than a line.

Does: decide where lines end. Does not: remove control characters (`screen.harmless`), or know of consoles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import regex
from wcwidth import wcswidth, wcwidth

from tonle.engine.text.graphemes import clusters, safe_length

_TAB = 8  # columns
_NO_SPACES = regex.compile(
    r"[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Khmer}\p{Script=Thai}\p{Script=Lao}"
    r"\p{Script=Myanmar}\p{Script=Tai_Tham}\u200B]"
)
_CLOSING = regex.compile(r"[\p{Pe}\p{Pf}\p{Po}ーっゃゅょッャュョៗ]")  # never first on a line
_OPENING = regex.compile(r"[\p{Ps}\p{Pi}]")  # never last on a line


class WordWrapper:
    """Call `feed` with each piece and `finish` at the end. `columns` is asked again and again: windows are resized."""

    def __init__(self, write: Callable[[str], None], columns: Callable[[], int]) -> None:
        self._write = write
        self._columns = columns
        self._held = ""  # the last grapheme cluster, which the next piece may continue
        self._line = ""  # what is on this line before the word
        self._word = ""
        self._column = 0  # after line and word

    def feed(self, text: str) -> None:
        text = self._held + text
        # A mark after an ASCII letter can still be written later; within other clusters the terminal needs all at once.
        num_ready = len(text) if text[-1:].isascii() else safe_length(text)
        self._held = text[num_ready:]
        # The last column stays empty: a terminal that has filled it is between two lines, and not all agree on which.
        limit = max(1, self._columns() - 1)
        self._write("".join(self._placed(cluster, limit) for cluster in clusters(text[:num_ready])))

    def finish(self) -> None:
        """Write what was held back."""
        held, self._held = self._held, ""
        limit = max(1, self._columns() - 1)
        self._write("".join(self._placed(cluster, limit) for cluster in clusters(held)))

    def _placed(self, cluster: str, limit: int) -> str:
        """What to write so that `cluster` is shown in its place."""
        if cluster in ("\n", "\r\n"):
            self._line, self._word, self._column = "", "", 0
            return "\n"
        if cluster[0] in " \t":
            return self._placed_space(cluster, limit)
        if self._may_break_before(cluster):
            self._end_word()
        wide = _width(cluster)
        if self._column + wide <= limit or not wide:
            self._word += cluster
            self._column += wide
            return cluster
        return self._wrapped(cluster, wide, limit)

    def _placed_space(self, cluster: str, limit: int) -> str:
        self._end_word()
        wide = _TAB - self._column % _TAB if cluster == "\t" else 1
        if self._column + wide > limit:
            self._column = limit  # the line is full: the space is where the line breaks
            return ""
        self._line += cluster
        self._column += wide
        return cluster

    def _wrapped(self, cluster: str, wide: int, limit: int) -> str:
        before, word = self._line, self._word
        moves = bool(word) and bool(before.strip())  # else the word began this line, and is longer than it
        width = sum(map(_width, clusters(word))) + wide
        fits = moves and width <= limit
        self._line, self._word, self._column = "", (word if fits else "") + cluster, width if fits else wide
        if not moves:
            return f"\n{cluster}"
        return f"\r{before}\x1b[K\n{word}{'' if fits else chr(10)}{cluster}"

    def _may_break_before(self, cluster: str) -> bool:
        if not self._word or _CLOSING.match(cluster):
            return False
        last = clusters(self._word[-16:])[-1]
        if _OPENING.match(last):
            return False
        return last == "—" or bool(_NO_SPACES.search(cluster) or _NO_SPACES.search(last))

    def _end_word(self) -> None:
        self._line += self._word
        self._word = ""


@functools.lru_cache(maxsize=4096)
def _width(cluster: str) -> int:
    """Columns of a terminal."""
    wide = int(wcswidth(cluster))
    return wide if wide >= 0 else sum(max(0, int(wcwidth(each))) for each in cluster)
