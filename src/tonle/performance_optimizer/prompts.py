"""Token ids as callers of transformers have them, to plain prompts, and continuations back to one tensor.

Does: tensors, arrays and lists, of one prompt or several; padding that an attention mask marks. Does not: know the
model's vocabulary or context (the engine checks those).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tonle.errors import InvalidRequest

_SHAPES = "a tensor [batch, prompt], a list of token ids, or a list of such lists"


@dataclass(frozen=True, slots=True)
class Prompts:
    """A batch of prompts."""

    given: list[list[int]]  # rows as the caller had them, padding included
    stripped: list[list[int]]  # the same without padding: what the model sees
    device: torch.device  # the caller's

    @property
    def longest(self) -> int:
        """Tokens of the longest row, padding included: `max_length` counts from here, as in transformers."""
        return max(len(row) for row in self.given)

    def output(self, continuations: Sequence[Sequence[int]], pad_id: int) -> torch.Tensor:
        """(batch, longest) int64: each row as given, then its continuation, then padding."""
        rows = [[*row, *new] for row, new in zip(self.given, continuations, strict=True)]
        width = max(len(row) for row in rows)
        return torch.tensor([row + [pad_id] * (width - len(row)) for row in rows], device=self.device)


def read_prompts(input_ids: Any, attention_mask: Any = None, *, pad_id: int | None = None) -> Prompts:
    """Raises `InvalidRequest`. `pad_id`: at the ends of a tensor's rows it is padding, where there is no mask."""
    given = _rows(input_ids, "input_ids")
    if attention_mask is not None:
        stripped = _masked(given, _rows(attention_mask, "attention_mask"))
    elif pad_id is not None and hasattr(input_ids, "tolist"):
        stripped = [_without_padding(row, pad_id) for row in given]
    else:
        stripped = given
    for place, row in enumerate(stripped):
        if not row:
            raise InvalidRequest(f"row {place} of input_ids has no token to continue", param="input_ids")
    device = input_ids.device if isinstance(input_ids, torch.Tensor) else torch.device("cpu")
    return Prompts(given, stripped, device)


def _rows(value: Any, name: str) -> list[list[int]]:
    """Of a tensor or array (whatever has `tolist`), or lists."""
    shown = f"a {value.dtype} of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"{value!r:.80}"
    if hasattr(value, "keys"):  # what a tokenizer returns
        raise InvalidRequest(f"{name} must be {_SHAPES}; of a tokenizer's output pass **inputs", param=name)
    plain = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(plain, list | tuple):
        raise InvalidRequest(f"{name} must be {_SHAPES}, not {shown}", param=name)
    if not plain:
        raise InvalidRequest(f"{name} is empty: give at least one prompt", param=name)
    one_prompt = not hasattr(plain[0], "__len__") and not hasattr(plain[0], "tolist")
    rows = [plain] if one_prompt else [row.tolist() if hasattr(row, "tolist") else row for row in plain]
    for row in rows:
        if not isinstance(row, list | tuple) or not all(_whole(token, name) for token in row):
            raise InvalidRequest(f"{name} must be {_SHAPES}, not {shown}", param=name)
    return [[int(token) for token in row] for row in rows]


def _whole(value: Any, name: str) -> bool:
    """A mask may hold booleans; a token id may not."""
    return isinstance(value, int) and (name == "attention_mask" or not isinstance(value, bool))


def _masked(given: list[list[int]], mask: list[list[int]]) -> list[list[int]]:
    if [len(row) for row in mask] != [len(row) for row in given]:
        raise InvalidRequest("attention_mask must have the shape of input_ids", param="attention_mask")
    stripped = []
    for place, (row, flags) in enumerate(zip(given, mask, strict=True)):
        kept = [token for token, flag in zip(row, flags, strict=True) if flag]
        first = next((i for i, flag in enumerate(flags) if flag), 0)
        if not all(flags[first : first + len(kept)]):
            raise InvalidRequest(
                f"row {place} of attention_mask leaves out tokens in the middle of a prompt; it may leave out padding "
                "at either end",
                param="attention_mask",
            )
        stripped.append(kept)
    return stripped


def _without_padding(row: list[int], pad_id: int) -> list[int]:
    real = [i for i, token in enumerate(row) if token != pad_id]
    return row[real[0] : real[-1] + 1] if real else []
