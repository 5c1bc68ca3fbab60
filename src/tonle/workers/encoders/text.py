"""`EncoderText`: texts and pairs of texts into token ids, in the process that serves HTTP.

Does: tokenize with the model's tokenizer.json, cut, put prompts before texts, refuse what is too long with its place. Lengths
are known before a job is queued, so batches are made of the right ones. Does not: need torch, or know HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from tokenizers import Encoding, Tokenizer

from tonle.errors import ContextOverflow, InvalidRequest, ModelError
from tonle.workers.encoders.packed import Ids, Types

CHARS_PER_TOKEN = 16  # of a text that is cut: as much of it is looked at for each token that is used
# Cohere's and Voyage's names, and the prompts that sentence-transformers' models have for them.
_INPUT_TYPES = {
    "query": ("query",), "search_query": ("query",),
    **dict.fromkeys(("document", "passage", "search_document"), ("document", "passage", "corpus")),
}  # fmt: skip


class TextFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker tells about its model."""

    tokenizer: str  # path of tokenizer.json
    max_tokens: int  # of one input, special ones included
    vocab_size: int
    dimensions: int  # of a vector; 0: it gives scores
    prompts: dict[str, str] = {}
    default_prompt: str | None = None
    lower_case: bool = False
    matryoshka: list[int] | None = None  # lengths a vector may be cut to; empty: any; None: none but its own


class Tokens(NamedTuple):
    ids: Ids
    types: Types | None = None  # 1 in the second text of a pair; None: 0 everywhere


class Cut(NamedTuple):
    """How inputs that are too long are cut."""

    num_tokens: int  # special ones included
    keeps_end: bool = False

    def text(self, text: str) -> str:
        """As much of a text as can matter: tokens of what is cut off need not be found."""
        most = self.num_tokens * CHARS_PER_TOKEN
        return text[-most:] if self.keeps_end else text[:most]


class EncoderText:
    def __init__(self, facts: TextFacts) -> None:
        """Raises `ModelError`."""
        self.facts = facts
        try:
            self._tokenizer = Tokenizer.from_file(facts.tokenizer)
        except Exception as error:  # tokenizers raises nothing narrower
            raise ModelError(f"{Path(facts.tokenizer).name} cannot be read: {error}") from error
        self._tokenizer.no_truncation()  # files come with that of their training
        self._tokenizer.no_padding()

    # -- prompts

    def prompt(self, prompt_name: str | None, input_type: str | None) -> str:
        """What is written before each text. Raises `InvalidRequest`."""
        prompts = self.facts.prompts
        if prompt_name is not None:
            if prompt_name not in prompts:
                known = f"it has {', '.join(prompts)}" if prompts else "it has none"
                raise InvalidRequest(f"the model has no prompt {prompt_name!r:.100}; {known}", param="prompt_name")
            return prompts[prompt_name]
        if input_type is not None:
            if input_type not in _INPUT_TYPES:
                raise InvalidRequest(f"input_type must be one of {', '.join(_INPUT_TYPES)}", param="input_type")
            return next((prompts[name] for name in _INPUT_TYPES[input_type] if name in prompts), "")
        return prompts.get(self.facts.default_prompt or "", "")

    # -- texts

    def encode(
        self, texts: Sequence[str], names: Sequence[str], *, prompt: str = "", cut: Cut | None = None,
        special: bool = True,
    ) -> list[Tokens]:  # fmt: skip
        """`names`: what the caller calls each. Raises `InvalidRequest`, `ContextOverflow`."""
        for text, name in zip(texts, names, strict=True):
            if not text.strip():
                raise InvalidRequest(f"{name} is empty", param=name)
        given = [prompt + (text if cut is None else cut.text(text)) for text in texts]
        found = self._encode(given, special=special and cut is None)
        if cut is not None:
            found = [self._cut(each, cut, special) for each in found]
        return [self.checked(np.array(each.ids, np.int32), name) for each, name in zip(found, names, strict=True)]

    def checked(self, ids: Ids, name: str) -> Tokens:
        """Raises `InvalidRequest`, `ContextOverflow`."""
        if not len(ids):
            raise InvalidRequest(f"{name} is empty; the model needs at least one token", param=name)
        if ids.min() < 0 or ids.max() >= self.facts.vocab_size:
            raise InvalidRequest(f"{name}: the model has tokens 0 to {self.facts.vocab_size - 1}", param=name)
        if len(ids) > self.facts.max_tokens:
            raise ContextOverflow(
                f"{name} has {len(ids)} tokens, but the model takes {self.facts.max_tokens}; shorten it, cut it into parts "
                "and embed each, or set truncate_prompt_tokens to -1 to use its beginning", param=name,
            )  # fmt: skip
        return Tokens(ids)

    @property
    def num_special(self) -> int:
        """Tokens that are put around a text."""
        return int(self._tokenizer.num_special_tokens_to_add(False))

    def num_before(self, prompt: str) -> int:
        """Tokens of a prompt."""
        return len(self._encode([prompt], special=False)[0].ids) if prompt else 0

    def _encode(self, texts: Sequence[str], *, special: bool) -> list[Encoding]:
        given = [text.lower() for text in texts] if self.facts.lower_case else list(texts)
        return list(self._tokenizer.encode_batch_fast(given, add_special_tokens=special))

    def _cut(self, encoding: Encoding, cut: Cut, special: bool) -> Encoding:
        num_special = self.num_special if special else 0
        if cut.num_tokens <= num_special:
            raise InvalidRequest(
                f"truncate_prompt_tokens must be at least {num_special + 1}: the model adds {num_special} tokens of its own",
                param="truncate_prompt_tokens",
            )
        encoding.truncate(cut.num_tokens - num_special, direction="left" if cut.keeps_end else "right")
        return self._tokenizer.post_process(encoding, None, True) if special else encoding

    # -- pairs

    def encode_pairs(
        self, query: str, documents: Sequence[str], names: Sequence[str], most: int | None
    ) -> list[Tokens]:
        """A query with each document; `most`: tokens of a document that are used. Raises `ContextOverflow`."""
        cut = None if most is None else Cut(most)
        asked = self._encode([query], special=False)[0]
        found = []
        for document, name in zip(
            self._encode([each if cut is None else cut.text(each) for each in documents], special=False),
            names,
            strict=True,
        ):
            if most is not None:
                document.truncate(most)
            pair = self._tokenizer.post_process(asked, document, True)
            if len(pair.ids) > self.facts.max_tokens:
                raise ContextOverflow(
                    f"{name} and the query have {len(pair.ids)} tokens together, but the model takes "
                    f"{self.facts.max_tokens}. Shorten the document, or set max_tokens_per_doc.", param=name,
                )  # fmt: skip
            types = np.array(pair.type_ids, np.uint8)
            found.append(Tokens(np.array(pair.ids, np.int32), types if types.any() else None))
        return found


def text_facts(fields: Mapping[str, Any]) -> TextFacts:
    return msgspec.convert(fields, TextFacts)
