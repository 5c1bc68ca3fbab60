"""The sampler: every row's parameters in arrays, so that a step of plain rows costs one argmax and one draw."""

from __future__ import annotations

import numpy as np
import torch

from tonle.engine.plan import Join, Plan
from tonle.engine.sample.adjust import Adjuster, needs_adjusting
from tonle.engine.sample.draw import draw
from tonle.engine.sample.noise import uniform


class Sampler:
    """Owns what rows ask of sampling. Rows are set by `join` and forgotten when the next sequence joins the row."""

    def __init__(self, max_rows: int, vocab_size: int, eos_ids: list[int], device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._device = device
        self._temperature = np.ones(max_rows, dtype=np.float32)  # 0 = greedy
        self._top_k = np.zeros(max_rows, dtype=np.int64)
        self._top_p = np.ones(max_rows, dtype=np.float32)
        self._min_p = np.zeros(max_rows, dtype=np.float32)
        self._seed = [0] * max_rows
        self._adjusters: dict[int, Adjuster] = {}
        self._num_top: dict[int, int] = {}  # rows that want log-probabilities

    def join(self, join: Join) -> None:
        row, config = join.row, join.config
        self._temperature[row] = 0.0 if config.greedy else config.temperature
        self._top_k[row] = min(config.top_k, self._vocab_size)
        self._top_p[row] = config.top_p
        self._min_p[row] = config.min_p
        self._seed[row] = join.seed
        self._adjusters.pop(row, None)
        self._num_top.pop(row, None)
        if needs_adjusting(config):
            stops = [*config.stop_token_ids, *self._eos_ids]
            self._adjusters[row] = Adjuster(config, join.prompt, join.output, stops, self._vocab_size, self._device)
        if config.logprobs is not None:
            self._num_top[row] = config.logprobs

    def catch_up(self, plan: Plan) -> None:
        """Rows with penalties see tokens that they were given, too."""
        if self._adjusters:
            for i, (row, start) in enumerate(zip(plan.rows, plan.starts, strict=True)):
                adjuster = self._adjusters.get(row)
                if adjuster is not None and (chunk := plan.known_chunk(i)) is not None:
                    adjuster.catch_up(start, chunk)

    def give(self, row: int, tokens: list[int]) -> None:
        """The row has got these, and they were not drawn."""
        if (adjuster := self._adjusters.get(row)) is not None:
            adjuster.push_forced(tokens)

    def sample(self, logits: torch.Tensor, rows: list[int], positions: list[int]) -> torch.Tensor:
        """(S, V) float32 logits, the rows they belong to and the positions the new tokens will take; (S,) tokens.

        May change `logits`: copy what you need of them first.
        """
        for i, row in enumerate(rows):
            if row in self._adjusters:
                self._adjusters[row].apply(logits[i])
        tokens = _best(logits)
        random = [i for i, row in enumerate(rows) if self._temperature[row] > 0]
        if random:
            picked = [rows[i] for i in random]
            noise = [uniform(self._seed[rows[i]], positions[i]) for i in random]
            tokens[random] = draw(
                logits[random],
                self._tensor(self._temperature[picked]),
                self._tensor(self._top_k[picked]),
                self._tensor(self._top_p[picked]),
                self._tensor(self._min_p[picked]),
                torch.tensor(noise, dtype=torch.float64, device=self._device),
            )
        for i, row in enumerate(rows):
            if row in self._adjusters:
                self._adjusters[row].push(int(tokens[i]))
        return tokens

    def logprobs_wanted(self, rows: list[int]) -> dict[int, int]:
        """Place among `rows` -> number of alternatives, for those that want log-probabilities."""
        return {i: self._num_top[row] for i, row in enumerate(rows) if row in self._num_top}

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


def _best(logits: torch.Tensor) -> torch.Tensor:
    """(S,) the place of each row's largest. On a CPU numpy finds it ten times as fast as torch."""
    if logits.device.type != "cpu" or logits.dtype != torch.float32:
        return logits.argmax(dim=-1)
    return torch.tensor([int(row.argmax()) for row in logits.numpy()], dtype=torch.int64)
