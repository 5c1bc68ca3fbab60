"""What rows ask of sampling, kept on the device: the sampler's part that lives between steps of a CUDA runner.

Does: send a row's settings when they differ from what the device has, and hold the history of rows with penalties, on
the device, so that nothing waits for a token to be read. Does not: choose tokens (`models/cuda/sample.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tonle.engine.plan import Join, Plan
from tonle.engine.request import ResolvedConfig
from tonle.engine.sample.adjust import Adjuster, needs_adjusting
from tonle.models.cuda.model import CudaModel

_Settings = tuple[float, int, float, float, int]  # temperature, top_k, top_p, min_p, seed
_GREEDY: _Settings = (0.0, 0, 1.0, 0.0, 0)


@dataclass(slots=True)
class DrawNumbers:
    """What a draw for some of a step's samples needs, on the device."""

    places: torch.Tensor  # (n,) int64, among the samples
    count: torch.Tensor  # (1,) int32: n at least
    rows: torch.Tensor  # (n,) int32
    positions: torch.Tensor  # (n,) int32: the place that each token will take


def sent(values: list[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On the device, without a wait for what it does meanwhile."""
    pinned = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)


class DeviceAdjuster(Adjuster):
    """An adjuster that takes tokens where they were drawn."""

    def push_forced(self, tokens: list[int]) -> None:
        self.num_output += len(tokens)
        places = sent(tokens, torch.int64, self._counts.device)
        self._counts.index_add_(0, places, torch.ones_like(places, dtype=self._counts.dtype))
        self._seen.index_fill_(0, places, True)

    def push_drawn(self, token: torch.Tensor) -> None:
        """`token` (1,) int64 on the device."""
        self.num_output += 1
        self._counts.index_add_(0, token, torch.ones_like(token, dtype=self._counts.dtype))
        self._seen.index_fill_(0, token, True)


class RowSampling:
    """Owns every row's sampling settings. A row is forgotten when the next sequence joins it."""

    def __init__(self, model: CudaModel, eos_ids: list[int]) -> None:
        self._model = model
        self._eos_ids = eos_ids
        self._device = model.logits.device
        self._known: list[_Settings] = [_GREEDY] * model.sizes.max_rows
        self._adjusters: dict[int, DeviceAdjuster] = {}
        self._num_top: dict[int, int] = {}  # rows that want log-probabilities

    def join(self, joins: list[Join]) -> None:
        changed = []
        for join in joins:
            row, config = join.row, join.config
            self._adjusters.pop(row, None)
            self._num_top.pop(row, None)
            if needs_adjusting(config):
                stops = [*config.stop_token_ids, *self._eos_ids]
                vocab = self._model.spec.vocab_size
                self._adjusters[row] = DeviceAdjuster(config, join.prompt, join.output, stops, vocab, self._device)
            if config.logprobs is not None:
                self._num_top[row] = config.logprobs
            settings = _settings(config, join.seed, self._model.spec.vocab_size)
            if settings != self._known[row]:
                self._known[row] = settings
                changed.append(row)
        if changed:
            self._send(changed)

    def _send(self, rows: list[int]) -> None:
        columns = zip(*(self._known[row] for row in rows), strict=True)
        places = sent(rows, torch.int64, self._device)
        mine = self._model.settings
        targets = (mine.temperature, mine.top_k, mine.top_p, mine.min_p, mine.seed)
        for target, values in zip(targets, columns, strict=True):
            target.index_copy_(0, places, sent(list(values), target.dtype, self._device))

    @property
    def adjusting(self) -> bool:
        """Some row has penalties, biases or forbidden endings."""
        return bool(self._adjusters)

    def logprobs_wanted(self, rows: list[int]) -> dict[int, int]:
        """Place among `rows` -> number of alternatives, for those that want log-probabilities."""
        if not self._num_top:
            return {}
        return {i: self._num_top[row] for i, row in enumerate(rows) if row in self._num_top}

    def adjusts(self, row: int) -> bool:
        return row in self._adjusters

    def catch_up(self, plan: Plan) -> None:
        """Rows with penalties see tokens that they were given, too."""
        for row, start, chunk in zip(plan.rows, plan.starts, plan.chunks, strict=True):
            if chunk is not None and (adjuster := self._adjusters.get(row)) is not None:
                adjuster.catch_up(start, chunk)

    def resample(self, plan: Plan, order: list[int]) -> None:
        """Draw again for rows with penalties, biases or forbidden endings, from adjusted logits. `order`: the entries of the plan
        that sample, in the order of their logits. Those that are bound wait for their masks."""
        bound = set(plan.bound)
        places = [place for place, i in enumerate(order) if plan.rows[i] in self._adjusters and i not in bound]
        if not places:
            return
        rows, positions = zip(*((plan.rows[order[p]], plan.place(order[p])) for p in places), strict=True)
        where = sent(places, torch.int64, self._device)
        rest = [0] * (-len(places) % 4)  # to 16 bytes each: kernels are compiled for aligned addresses
        numbers = sent(
            [[len(places)] * len(places) + rest, [*rows, *rest], [*positions, *rest]], torch.int32, self._device
        )
        logits = self._model.logits.index_select(0, where).float()
        self.draw_from(logits, list(rows), DrawNumbers(where, numbers[0], numbers[1], numbers[2]))

    def draw_from(self, logits: torch.Tensor, rows: list[int], numbers: DrawNumbers) -> None:
        """Tokens of `rows` from these logits (n, vocab) float32, which may change, in place of what the step drew for them."""
        model = self._model
        adjusters = [(i, adjuster) for i, row in enumerate(rows) if (adjuster := self._adjusters.get(row)) is not None]
        for i, adjuster in adjusters:
            adjuster.apply(logits[i])
        drawn = torch.empty(len(rows), dtype=torch.int32, device=self._device)
        model.draw(numbers.count, numbers.rows, numbers.positions, logits, drawn)
        model.sampled.index_copy_(0, numbers.places, drawn)
        if adjusters:
            long = drawn.long()
            for i, adjuster in adjusters:
                adjuster.push_drawn(long[i : i + 1])


def _settings(config: ResolvedConfig, seed: int, vocab_size: int) -> _Settings:
    if config.greedy:
        return _GREEDY
    signed = (seed + 2**63) % 2**64 - 2**63  # the same 64 bits as a signed number
    return config.temperature, min(config.top_k, vocab_size), config.top_p, config.min_p, signed
