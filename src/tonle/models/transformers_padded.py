"""Steps through a `transformers` model that computes attention by itself: rows as a padded batch, our cache behind its `Cache`.

Does: hand each layer the keys and values of its rows out of the paged cache, shorter rows padded on the left; run rows with as
many tokens together, and after the rows whose keys they share. Does not: spare the padding (`transformers_flat.py` does).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from transformers import Cache

from tonle.errors import ModelError
from tonle.models.inputs import KVCache, StepInputs
from tonle.models.transformers_call import ModelCall

_MAX_KEYS = 65_536  # of one call, padding included: what a layer gathers of keys or values at a time


class PaddedForward:
    """Runs steps."""

    def __init__(self, call: ModelCall) -> None:
        self._call = call

    def run(self, inputs: StepInputs, kv: KVCache, states: torch.Tensor | None = None) -> torch.Tensor:
        """Logits (S, vocab) float32. `states` (P, hidden): filled with hidden states of `inputs.hidden_indices`."""
        wanted = _places(inputs.logit_indices)
        of_hidden = {} if states is None or inputs.hidden_indices is None else _places(inputs.hidden_indices)
        found: list[tuple[list[int], torch.Tensor]] = []  # places among the logits, and those
        for rows in _batches(inputs, kv.block_size):
            found += self._run_rows(rows, inputs, kv, wanted, of_hidden, states)
        first = found[0][1]
        logits = torch.empty((inputs.logit_indices.shape[0], first.shape[-1]), dtype=torch.float32, device=first.device)
        for places, own in found:
            logits[places] = own.float()
        return logits

    def _run_rows(
        self, rows: list[int], inputs: StepInputs, kv: KVCache, wanted: dict[int, list[int]],
        of_hidden: dict[int, list[int]], states: torch.Tensor | None,
    ) -> list[tuple[list[int], torch.Tensor]]:  # fmt: skip
        """One call. All rows have as many tokens."""
        device = inputs.tokens.device
        num_tokens = inputs.row_starts[rows[0] + 1] - inputs.row_starts[rows[0]]
        firsts = torch.tensor([inputs.row_starts[row] for row in rows], device=device)
        tokens = firsts[:, None] + torch.arange(num_tokens, device=device)  # (R, n) among the step's
        offsets = sorted({at - inputs.row_starts[row] for row in rows for at in _own(inputs, row) if at in wanted})
        keep = offsets or [num_tokens - 1]
        cache = PagedCache(kv, inputs.slots[tokens.flatten()], *_context(rows, inputs, kv.block_size), num_tokens)
        arguments = {
            "position_ids": inputs.positions[tokens], "attention_mask": cache.mask, "past_key_values": cache, "use_cache": True,
        }  # fmt: skip
        logits, hidden = self._call(
            inputs.tokens[tokens], torch.tensor(keep, device=device), bool(of_hidden), arguments
        )
        found = []
        for i, row in enumerate(rows):
            start = inputs.row_starts[row]
            for at in _own(inputs, row):
                if at in wanted:
                    found.append((wanted[at], logits[i, keep.index(at - start)]))
                if at in of_hidden:
                    assert hidden is not None and states is not None
                    states[of_hidden[at]] = hidden[i, at - start].float()
        return found or [([], logits[0, :0])]


def _own(inputs: StepInputs, row: int) -> range:
    return range(inputs.row_starts[row], inputs.row_starts[row + 1])


def _places(indices: torch.Tensor) -> dict[int, list[int]]:
    """By index, where it stands."""
    places: defaultdict[int, list[int]] = defaultdict(list)
    for place, index in enumerate(indices.tolist()):
        places[index].append(place)
    return places


def _batches(inputs: StepInputs, block_size: int) -> Iterator[list[int]]:
    """Rows that run in one call, in an order such that blocks are filled before another row reads them."""
    num_rows = len(inputs.context_lens)
    left = list(range(num_rows))
    sizes = [inputs.row_starts[row + 1] - inputs.row_starts[row] for row in left]
    if len(set(sizes)) == 1 and num_rows * max(inputs.context_lens) <= _MAX_KEYS:
        yield left  # in one call each layer keeps the keys of all rows before any of them is read
        return
    tables = inputs.block_tables.tolist()
    while left:
        ready = _ready(left, sizes, tables, inputs.context_lens, block_size)
        by_size: defaultdict[int, list[int]] = defaultdict(list)
        for row in ready:
            by_size[sizes[row]].append(row)
        for rows in by_size.values():
            yield from _cut(rows, inputs.context_lens)
        left = [row for row in left if row not in ready]


def _ready(
    left: list[int], sizes: list[int], tables: list[list[int]], context_lens: list[int], block_size: int
) -> list[int]:
    """Those of the rows that read no block which another one of them fills in this step."""
    filled_by: defaultdict[int, set[int]] = defaultdict(set)
    for row in left:
        for place in range((context_lens[row] - sizes[row]) // block_size, -(-context_lens[row] // block_size)):
            filled_by[tables[row][place]].add(row)
    ready = []
    for row in left:
        read = tables[row][: -(-(context_lens[row] - sizes[row]) // block_size)]
        if not any(filled_by[block] - {row} for block in read if block in filled_by):
            ready.append(row)
    assert ready, "rows wait for each other"
    return ready


def _cut(rows: list[int], context_lens: list[int]) -> Iterator[list[int]]:
    """So that no call gathers too many keys; rows of similar contexts together."""
    rows = sorted(rows, key=context_lens.__getitem__)
    batch: list[int] = []
    for row in rows:
        if batch and (len(batch) + 1) * context_lens[row] > _MAX_KEYS:
            yield batch
            batch = []
        batch.append(row)
    yield batch


def _context(rows: list[int], inputs: StepInputs, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots (R, keys) of each row's tokens, the last ones at the right, and a mask (R, keys): 0 where there is none."""
    device = inputs.tokens.device
    lens = torch.tensor([inputs.context_lens[row] for row in rows], device=device)
    num_keys = max(inputs.context_lens[row] for row in rows)
    places = torch.arange(num_keys, device=device) - (num_keys - lens)[:, None]  # (R, keys), below 0: padding
    mask = (places >= 0).long()
    places = places.clamp(min=0)
    blocks = inputs.block_tables[torch.tensor(rows, device=device)].long().gather(1, places // block_size)
    return blocks * block_size + places % block_size, mask


class PagedCache(Cache):
    """What a model takes for its cache during one call: rows with as many tokens each, contexts padded on the left."""

    def __init__(
        self, kv: KVCache, slots: torch.Tensor, context: torch.Tensor, mask: torch.Tensor, num_tokens: int
    ) -> None:
        """slots (R * n,): of the call's own tokens; context (R, keys): of all of each row's tokens."""
        super().__init__(layers=[])
        self.mask = mask
        self._kv = kv
        self._slots = slots
        self._context = context
        self._num_cached = context.shape[1] - num_tokens
        self._num_tokens = num_tokens
        self._updated: set[int] = set()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (R, kv heads, n, dim) into the cache -> those of all tokens, (R, kv heads, keys, dim)."""
        self._updated.add(layer_idx)
        return self._exchange(self._kv.k[layer_idx], key_states), self._exchange(self._kv.v[layer_idx], value_states)

    def _exchange(self, blocks: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        num_heads, dim = states.shape[1], states.shape[3]
        slots = blocks.flatten(0, 1)[:, :num_heads, :dim]  # the cache has one size for keys and values of all layers
        slots.index_copy_(0, self._slots, states.transpose(1, 2).flatten(0, 1).to(slots.dtype))
        gathered = slots.index_select(0, self._context.flatten()).view(*self._context.shape, num_heads, dim)
        return gathered.transpose(1, 2).to(states.dtype)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._num_cached + (self._num_tokens if layer_idx in self._updated else 0)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._num_cached + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1  # none


class _WatchingCache(Cache):
    """Notes the shapes of what layers keep."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.seen: dict[int, tuple[int, int]] = {}  # by layer: kv heads, numbers of the wider of key and value

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if key_states.dim() != 4 or value_states.dim() != 4 or key_states.shape[1] != value_states.shape[1]:
            raise ModelError(f"layer {layer_idx} keeps keys and values in a form of its own")
        self.seen[layer_idx] = key_states.shape[1], max(key_states.shape[3], value_states.shape[3])
        return key_states, value_states


def kept_shape(call: ModelCall) -> tuple[int, int, int]:
    """Layers, kv heads and numbers of a head that a cache needs for this model, from one call with one token. Raises `ModelError`
    if it cannot be run in this way."""
    if not call.takes("past_key_values"):
        raise ModelError("it takes no past_key_values")
    cache = _WatchingCache()
    device = call.device
    arguments = {
        "position_ids": torch.zeros((1, 1), dtype=torch.int64, device=device),
        "attention_mask": torch.ones((1, 1), dtype=torch.int64, device=device),
        "past_key_values": cache,
        "use_cache": True,
    }
    call(
        torch.zeros((1, 1), dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int64, device=device), False, arguments
    )  # fmt: skip
    if not cache.seen:
        raise ModelError("none of its layers keeps keys and values")
    return (
        max(cache.seen) + 1,
        max(heads for heads, _ in cache.seen.values()),
        max(dim for _, dim in cache.seen.values()),
    )
