"""The persistent batch: what the device keeps of every row between steps."""

from __future__ import annotations

import numpy as np
import torch

from tonle.engine.plan import Join, Plan
from tonle.models.inputs import StepInputs


class Rows:
    """Block tables and last tokens by row. A step touches only what its plan names."""

    def __init__(self, max_rows: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self._tables = np.zeros((max_rows, max_blocks), dtype=np.int32)
        self._last = torch.zeros(max_rows, dtype=torch.int64, device=device)  # sampled last, not computed yet
        self._adapter_slots: dict[int, int] = {}  # of rows that have an adapter, or had one when they were last used

    def join(self, join: Join) -> None:
        if join.adapter_slot >= 0:
            self._adapter_slots[join.row] = join.adapter_slot
        elif self._adapter_slots:
            self._adapter_slots.pop(join.row, None)

    def update(self, plan: Plan) -> None:
        for row, first, blocks in plan.new_blocks:
            self._tables[row, first : first + len(blocks)] = blocks

    def remember(self, rows: list[int], tokens: torch.Tensor) -> None:
        """The next step of these rows starts from these tokens, without a round trip through the host."""
        self._last[rows] = tokens

    def build(self, plan: Plan, order: list[int], wanted: list[int]) -> StepInputs:
        """Tensors for the plan's entries in `order` (single tokens first). `wanted`: indices into tokens, for logits."""
        sizes = [1 if (chunk := plan.chunks[i]) is None else len(chunk) for i in order]
        row_starts = np.concatenate(([0], np.cumsum(sizes)))  # (R + 1,)
        rows = np.array([plan.rows[i] for i in order])  # (R,)
        starts = np.array([plan.starts[i] for i in order])  # (R,)
        row_of = np.repeat(np.arange(len(order)), sizes)  # (T,)
        positions = np.arange(row_starts[-1]) - row_starts[row_of] + starts[row_of]  # (T,)
        context = starts + sizes  # (R,)
        tables = self._tables[rows, : -(-int(context.max()) // self._block_size)]  # (R, blocks of the longest)
        slots = tables[row_of, positions // self._block_size].astype(np.int64) * self._block_size
        slots += positions % self._block_size
        return StepInputs(
            tokens=self._tokens(plan, order, rows, row_starts),
            positions=torch.from_numpy(positions).to(self._device),
            slots=torch.from_numpy(slots).to(self._device),
            row_starts=row_starts.tolist(),
            context_lens=context.tolist(),
            block_tables=torch.from_numpy(tables).to(self._device),
            num_decode=sum(size == 1 for size in sizes),
            logit_indices=torch.tensor(wanted, dtype=torch.int64, device=self._device),
            adapter_slots=self._slots_of(rows.tolist()) if self._adapter_slots else None,
        )

    def _slots_of(self, rows: list[int]) -> list[int] | None:
        slots = [self._adapter_slots.get(row, -1) for row in rows]
        return slots if max(slots) >= 0 else None

    def _tokens(self, plan: Plan, order: list[int], rows: np.ndarray, row_starts: np.ndarray) -> torch.Tensor:
        tokens = np.zeros(int(row_starts[-1]), dtype=np.int64)
        sampled = []  # entries whose token is on the device only
        for r, i in enumerate(order):
            chunk = plan.chunks[i]
            if chunk is None:
                sampled.append(r)
            else:
                tokens[row_starts[r] : row_starts[r + 1]] = chunk
        result = torch.from_numpy(tokens).to(self._device)
        if sampled:
            result[row_starts[sampled]] = self._last[rows[sampled]]
        return result
