"""Steps of a runner, planned by hand, so that rows, chunks and adapters meet as a test wants them to.

Does: plan, launch and collect; keep every row's tokens and what the runner said about them. Does not: judge.
"""

from __future__ import annotations

import torch

from tonle.engine.plan import Join, Plan
from tonle.engine.request import GenerationConfig
from tonle.engine.run.runner import Runner

WISH = GenerationConfig(max_length=64, do_sample=False, early_stopping=False, logprobs=0, prompt_logprobs=0).resolved()


class PlannedRows:
    """Row r has the blocks from r * blocks_per_row on. All rows are greedy."""

    def __init__(self, runner: Runner, blocks_per_row: int) -> None:
        self.runner = runner
        self.tokens: dict[int, list[int]] = {}  # of each row, prompt and answer
        self.logprobs: dict[int, list[float]] = {}  # of each of them but the first
        self._blocks_per_row = blocks_per_row
        self._done: dict[int, int] = {}  # tokens in the cache
        self._joins: list[Join] = []

    def join(self, row: int, prompt: list[int], slot: int = -1) -> None:
        self.tokens[row], self.logprobs[row], self._done[row] = list(prompt), [], 0
        self._joins.append(Join(row, prompt, [], WISH, seed=row, adapter_slot=slot))

    def step(self, sizes: dict[int, int]) -> None:
        """Rows and their tokens in this step: so many of the prompt; 0: the row goes on from its last one."""
        plan = Plan(joins=self._joins)
        self._joins = []
        for row, size in sizes.items():
            start, known = self._done[row], self.tokens[row]
            self._done[row] = start + max(1, size)
            plan.rows.append(row)
            plan.starts.append(start)
            plan.chunks.append(known[start : start + size] if size else None)
            plan.samples.append(self._done[row] == len(known))
            if start == 0:
                first = row * self._blocks_per_row
                plan.new_blocks.append((row, 0, list(range(first, first + self._blocks_per_row))))
        result = self.runner.collect(self.runner.launch(plan))
        sampled = iter(result.tokens)
        for i, row in enumerate(plan.rows):
            self.logprobs[row] += [record.logprob for record in result.prompt_logprobs.get(i, [])]
            if plan.samples[i]:
                self.tokens[row].append(next(sampled))
                self.logprobs[row].append(result.logprobs[i].logprob)

    def said(self, row: int) -> torch.Tensor:
        """(tokens - 1,)"""
        return torch.tensor(self.logprobs[row])


def logprobs_of(logits: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """What logits (tokens, vocab) over a text say about its tokens, but for the first: (tokens - 1,)."""
    return logits[:-1].log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None]).squeeze(1)
