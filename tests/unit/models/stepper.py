"""Drive a decoder by hand: sequences in scattered blocks, any number of tokens of each per step."""

from __future__ import annotations

import random

import torch

from tonle.models.decoder import Decoder
from tonle.models.inputs import KVCache, StepInputs


def random_tokens(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed * 1000 + length)
    return [rng.randrange(vocab_size) for _ in range(length)]


class Stepper:
    """Known sequences, computed as far as the caller says; collects the logits of every token."""

    def __init__(
        self,
        decoder: Decoder,
        sequences: list[list[int]],
        *,
        block_size: int = 16,
        table: list[list[int]] | None = None,
        adapter_slots: list[int] | None = None,  # of each sequence
        cache_dtype: torch.dtype | None = None,  # the decoder's, unless given
    ) -> None:
        self._decoder = decoder
        self._sequences = sequences
        self._block_size = block_size
        self._adapter_slots = adapter_slots
        self._computed = [0] * len(sequences)
        self.logits: list[list[torch.Tensor]] = [[] for _ in sequences]  # per sequence, per token: (vocab,)
        needed = [-(-len(sequence) // block_size) for sequence in sequences]
        spec = decoder.spec
        self._kv = KVCache(
            num_layers=spec.num_layers, num_blocks=sum(needed) + 1, block_size=block_size, head_dim=spec.head_dim,
            num_kv_heads=spec.num_kv_heads, dtype=cache_dtype or decoder.dtype, device=decoder.device,
        )  # fmt: skip
        blocks = list(range(1, sum(needed) + 1))
        random.Random(7).shuffle(blocks)
        self._table = table or [[blocks.pop() for _ in range(count)] for count in needed]

    def step(self, counts: dict[int, int]) -> None:
        """Compute so many more tokens of each named sequence."""
        rows = sorted(counts, key=lambda row: counts[row] != 1)  # one-token rows first
        inputs = self._inputs(rows, counts)
        with torch.inference_mode():
            logits = self._decoder.forward(inputs, self._kv)
        assert logits.dtype == torch.float32 and logits.shape == (len(inputs.tokens), self._decoder.spec.vocab_size)
        for index, row in enumerate(rows):
            self.logits[row] += logits[inputs.row_starts[index] : inputs.row_starts[index + 1]].cpu().clone().unbind(0)
            self._computed[row] += counts[row]

    def run(self, chunk: int) -> None:
        """All sequences to their ends, `chunk` tokens of each per step."""
        for _ in range(max(map(len, self._sequences))):
            left = {row: len(seq) - self._computed[row] for row, seq in enumerate(self._sequences)}
            counts = {row: min(chunk, rest) for row, rest in left.items() if rest}
            if not counts:
                return
            self.step(counts)

    def of(self, row: int) -> torch.Tensor:
        """(tokens, vocab)"""
        return torch.stack(self.logits[row])

    def _inputs(self, rows: list[int], counts: dict[int, int]) -> StepInputs:
        tokens, positions, slots, starts = [], [], [], [0]
        for row in rows:
            for position in range(self._computed[row], self._computed[row] + counts[row]):
                tokens.append(self._sequences[row][position])
                positions.append(position)
                block = self._table[row][position // self._block_size]
                slots.append(block * self._block_size + position % self._block_size)
            starts.append(len(tokens))
        width = max(len(self._table[row]) for row in rows) + 1  # wider than needed, as the runner's are
        tables = [self._table[row] + [0] * (width - len(self._table[row])) for row in rows]
        device = self._decoder.device
        return StepInputs(
            tokens=torch.tensor(tokens, device=device),
            positions=torch.tensor(positions, device=device),
            slots=torch.tensor(slots, device=device),
            row_starts=starts,
            context_lens=[self._computed[row] + counts[row] for row in rows],
            block_tables=torch.tensor(tables, dtype=torch.int32, device=device),
            num_decode=sum(counts[row] == 1 for row in rows),
            logit_indices=torch.arange(len(tokens), device=device),
            adapter_slots=None if self._adapter_slots is None else [self._adapter_slots[row] for row in rows],
        )
