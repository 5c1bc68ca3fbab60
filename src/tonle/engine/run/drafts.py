"""Draft tokens against what is sampled at their places: which of them were right.

Does: sample place after place, as far as guesses hold, so that penalties and grammars see the tokens before each place. Does
not: guess, or know a grammar.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from tonle.engine.plan import AfterGuesses, Plan, num_equal
from tonle.engine.request import TokenLogprob
from tonle.engine.sample.sampler import Sampler
from tonle.engine.sample.token_logprobs import token_logprobs


def apply_mask(logits: torch.Tensor, allowed: np.ndarray) -> None:
    """In place on (V,): `allowed` (words,) int32 has one bit per token."""
    bits = np.unpackbits(allowed.view(np.uint8), count=logits.shape[0], bitorder="little")
    logits.masked_fill_(torch.from_numpy(bits == 0).to(logits.device), -torch.inf)


@dataclass(slots=True)
class DraftedRows:
    """The logits of a step's drafts: those of the place after each guess."""

    first: dict[int, int]  # plan index -> the row of its first guess
    logits: torch.Tensor  # (guesses, V); sampling may change them
    more: dict[int, list[int]] = field(default_factory=dict)  # as of `StepResult`
    more_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)

    def verify(self, plan: Plan, tokens: dict[int, int], sampler: Sampler, after: AfterGuesses | None = None) -> None:
        """`tokens`: by plan index, what was sampled at the place of the first guess. Fills `more`. `after`: of entries that are
        bound."""
        last = dict(tokens)
        drafts = {i: plan.draft(i) for i in self.first}
        self.more = {i: [] for i in self.first}
        bound = frozenset(plan.bound)
        alive = list(self.first)
        while alive := [
            i for i in alive if len(self.more[i]) < len(drafts[i]) and last[i] == drafts[i][len(self.more[i])]
        ]:
            if after is not None:
                alive = [
                    i for i in alive if i not in bound or self._follow(plan, i, last[i], drafts[i], sampler, after)
                ]
                if not alive:
                    return
            for i, token in zip(alive, self._sample(plan, alive, sampler, bound, after), strict=True):
                last[i] = token
                self.more[i].append(token)

    def _follow(
        self, plan: Plan, i: int, token: int, guesses: list[int], sampler: Sampler, after: AfterGuesses
    ) -> bool:
        """`token`, a guess that was right, may force those after it. Whether the logits of the place after them are there: if
        they were guessed, too."""
        forced = after.follow(i, token)
        if forced is None:
            return False
        num_right = num_equal(forced, guesses[len(self.more[i]) + 1 :])
        sampler.give(plan.rows[i], forced[:num_right])
        self.more[i] += forced[:num_right]
        return num_right == len(forced)

    def _sample(
        self, plan: Plan, entries: list[int], sampler: Sampler, bound: frozenset[int], after: AfterGuesses | None
    ) -> list[int]:
        """One token for each of these entries, all of whose guesses so far were right."""
        places = [len(self.more[i]) for i in entries]
        logits = self.logits[
            [self.first[i] + place for i, place in zip(entries, places, strict=True)]
        ]  # (n, V), a copy
        rows = [plan.rows[i] for i in entries]
        wanted = sampler.logprobs_wanted(rows)
        raw = logits[list(wanted)] if wanted else None  # before masks and penalties
        if after is not None:
            for n, i in enumerate(entries):
                if i in bound and (allowed := after.mask(i)) is not None:
                    apply_mask(logits[n], allowed)
        positions = [plan.place(i) + 1 + place for i, place in zip(entries, places, strict=True)]
        drawn: list[int] = sampler.sample(logits, rows, positions).tolist()
        if raw is not None:
            records = token_logprobs(raw, [drawn[n] for n in wanted], max(wanted.values()))
            for (n, num_top), record in zip(wanted.items(), records, strict=True):
                record.top = record.top[:num_top]
                self.more_logprobs.setdefault(entries[n], []).append(record)
        return drawn
