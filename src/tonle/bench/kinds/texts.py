"""Texts to be embedded, ranked, spoken or drawn: sentences of our own, the Khmer set, or a file's.

Does: draw texts of mixed lengths by a seed. Does not: build requests or count tokens.
"""

from __future__ import annotations

import random
from pathlib import Path

from tonle.bench.datasets.items import PromptItem
from tonle.bench.datasets.read_data import read_data
from tonle.bench.datasets.shipped import is_shipped
from tonle.bench.options import Span
from tonle.bench.questions import fill, sentence
from tonle.errors import ConfigError

PICTURES = (
    "A watercolour of a {plant} in {place}, early morning light.",
    "A photograph of {people} people {activity} near {place} in {month}, wide angle.",
    "A pencil drawing about {topic}, {few} figures in the foreground.",
    "A poster that explains {concept}, flat colours, no text.",
    "A still life with {dish} and a {appliance} on a wooden table.",
    "An old map of {place} with {topic} along its border.",
)


class Texts:
    """Owns the sentences, or a file's texts, that requests are made from."""

    def __init__(self, file: Path | None, sentences: Span, *, pictures: bool = False) -> None:
        """`pictures`: sentences that describe one, to be drawn."""
        self.name = "sentences" if file is None else str(file) if is_shipped(file) else "file"
        self.num_of_file: int | None = None
        self._sentences = sentences
        self._pictures = pictures
        self._drawn: list[str] = []  # those of a set that comes with Tonle are drawn, as sentences are
        self._in_order: list[str] = []  # a file's come as they are
        if file is not None:
            texts = _read(file)
            self.num_of_file = len(texts)
            if is_shipped(file):
                self._drawn = texts
            else:
                self._in_order = texts

    def text(self, rng: random.Random, place: int) -> str:
        """`place`: of the run's texts this is the so-manyth."""
        if self._in_order:
            return self._in_order[place % len(self._in_order)]
        return " ".join(self.sentence(rng) for _ in range(self._sentences.draw(rng)))

    def sentence(self, rng: random.Random) -> str:
        if self._drawn or self._in_order:
            return rng.choice(self._drawn or self._in_order)
        return fill(rng.choice(PICTURES), rng) if self._pictures else sentence(rng)


def _read(file: Path) -> list[str]:
    texts = []
    for item in read_data(file, "jsonl").items:
        content = item.content if isinstance(item, PromptItem) else None
        if isinstance(content, list) and content and isinstance(content[-1], dict):
            content = content[-1].get("content")
        if not isinstance(content, str) or not content.strip():
            raise ConfigError(
                f'{file}: this kind of requests is made from texts, {{"prompt": "…"}} on each line, not from token ids',
                param="data",
            )
        texts.append(content)
    return texts
