"""Draft tokens against what is sampled at their places: which of them were right.

Does: sample place after place, as far as guesses hold, so that penalties see the tokens before each place. Does not: guess.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tonle.engine.plan import Plan
from tonle.engine.request import TokenLogprob
from tonle.engine.sample.sampler import Sampler
from tonle.engine.sample.token_logprobs import token_logprobs


@dataclass(slots=True)
class DraftedRows:
    """The logits of a step's drafts: those of the place after each guess."""

    first: dict[int, int]  # plan index -> the row of its first guess
    logits: torch.Tensor  # (guesses, V); sampling may change them
    more: dict[int, list[int]] = field(default_factory=dict)  # as of `StepResult`
    more_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)

    def verify(self, plan: Plan, tokens: dict[int, int], sampler: Sampler) -> None:
        """`tokens`: by plan index, what was sampled at the place of the first guess. Fills `more`."""
        last, place = dict(tokens), 0
        drafts = {i: plan.draft(i) for i in self.first}
        self.more = {i: [] for i in self.first}
        alive = list(self.first)
        while alive := [i for i in alive if place < len(drafts[i]) and last[i] == drafts[i][place]]:
            logits = self.logits[[self.first[i] + place for i in alive]]
            drawn = self._sample(plan, alive, place, logits, sampler)
            for i, token in zip(alive, drawn, strict=True):
                last[i] = token
                self.more[i].append(token)
            place += 1

    def _sample(self, plan: Plan, entries: list[int], place: int, logits: torch.Tensor, sampler: Sampler) -> list[int]:
        """One token for each of these entries, whose guess at `place` was right. `logits` (n, V) may change."""
        rows = [plan.rows[i] for i in entries]
        wanted = sampler.logprobs_wanted(rows)
        raw = logits[list(wanted)] if wanted else None  # a copy, before penalties
        positions = [plan.place(i) + 1 + place for i in entries]
        drawn: list[int] = sampler.sample(logits, rows, positions).tolist()
        if raw is not None:
            records = token_logprobs(raw, [drawn[n] for n in wanted], max(wanted.values()))
            for (n, num_top), record in zip(wanted.items(), records, strict=True):
                record.top = record.top[:num_top]
                self.more_logprobs.setdefault(entries[n], []).append(record)
        return drawn
