"""Of which tokens of a step logits or hidden states are wanted, as the compiled step takes it.

Does: put tokens in rising order and say which row each gets. Does not: compute.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tonle.models.cpu.memory import Array
from tonle.models.inputs import StepInputs


class Wanted(NamedTuple):
    """The compiled step gathers `tokens` at the beginning of its buffer, finishes the last layer for them alone, and multiplies
    the first `num_logits` of `places` with the head. Tokens whose hidden states alone are wanted have the places after those."""

    tokens: Array  # (n,) rising
    places: Array  # (n,) of each
    num_logits: int  # 1 at least, if any token is wanted
    logit_rows: Array | None = None  # (S,) the row of logits for each that was asked for; None: as they come
    hidden_rows: Array | None = None  # (P,) the row of the buffer with each hidden state that was asked for

    @classmethod
    def of(cls, inputs: StepInputs) -> Wanted:
        asked = inputs.logit_indices.numpy()
        if inputs.hidden_indices is not None:
            return cls._with_hidden(asked, inputs.hidden_indices.numpy())
        tokens, again = np.unique(asked, return_inverse=True)
        if len(tokens) < len(asked):  # a token may be wanted twice: to sample, and to describe
            return cls(tokens, np.arange(len(tokens)), len(tokens), again)
        return cls(tokens, np.argsort(asked), len(tokens))

    @classmethod
    def _with_hidden(cls, asked: Array, hidden: Array) -> Wanted:
        with_logits, logit_rows = np.unique(asked, return_inverse=True)
        tokens = np.union1d(asked, hidden)
        has_logits = np.isin(tokens, with_logits)
        places = np.empty(len(tokens), dtype=np.int64)
        places[has_logits] = np.arange(len(with_logits))
        places[~has_logits] = np.arange(len(with_logits), len(tokens))
        return cls(tokens, places, max(1, len(with_logits)), logit_rows, np.searchsorted(tokens, hidden))
