"""Attention over the paged KV cache: the seam `decoder.attention`, and its reference in torch operations.

Does: write a step's keys and values to their slots, attend every row to its own blocks. Runs on any device torch has.
Does not: choose blocks. What all layers share (gather indices, masks) is computed once per step, in `prepare`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from tonle.models.inputs import KVCache, StepInputs
from tonle.models.scaled_cache import ScaledSlots
from tonle.models.spec import AttentionSpec, ModelSpec

Windows = Set[int | None]  # of any layer

_SMALLEST_BUCKET = 8  # blocks; rows shorter than this are not worth telling apart


class StepAttention(Protocol):
    """Attention for one step, called once per layer, in order."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q (T, heads, dim), k and v (T, kv heads, dim), rotated -> (T, heads, dim).

        All of the step's keys and values are in the cache before any row attends, so that a row may read blocks
        another row fills in the same step.
        """


class Attention(Protocol):
    """Where kernels are swapped."""

    def prepare(self, inputs: StepInputs, kv: KVCache) -> StepAttention: ...


class TorchAttention:
    """The reference: gather blocks, then torch's scaled dot product."""

    def __init__(self, spec: ModelSpec, sinks: Sequence[torch.Tensor | None]) -> None:
        """sinks: by layer, (heads,) or None."""
        self._layers = [layer.attention for layer in spec.layers]
        self._sinks = sinks
        self._windows = set(spec.windows)

    def prepare(self, inputs: StepInputs, kv: KVCache) -> StepAttention:
        return _TorchStep(self._layers, self._sinks, self._windows, inputs, kv)


@dataclass(slots=True, eq=False)
class _Decoding:
    """Rows with one token each and contexts of similar length, attended in one call."""

    rows: torch.Tensor | slice  # which of the T tokens
    blocks: torch.Tensor  # (rows * blocks per row,) int32
    num_rows: int
    num_keys: int  # keys looked at per row; beyond a row's own context they are masked
    masks: dict[int | None, torch.Tensor | None]  # by window; additive, (rows, 1, 1, num_keys)


@dataclass(slots=True, eq=False)
class _Prefilling:
    """One row with several tokens."""

    tokens: slice
    blocks: torch.Tensor | None  # (blocks,) int32; None: this step's keys are all there is, and are exact in the cache
    num_keys: int
    masks: dict[int | None, torch.Tensor | None]  # by window; additive, (tokens, num_keys); None: plainly causal


class _TorchStep:
    def __init__(
        self, layers: list[AttentionSpec], sinks: Sequence[torch.Tensor | None], windows: Windows, inputs: StepInputs,
        kv: KVCache,
    ) -> None:  # fmt: skip
        self._layers = layers
        self._sinks = sinks
        self._slots = inputs.slots
        self._k_blocks, self._v_blocks = kv.k.unbind(0), kv.v.unbind(0)  # per layer (blocks, block, kv heads, dim)
        self._k_slots, self._v_slots = kv.k.flatten(1, 2).unbind(0), kv.v.flatten(1, 2).unbind(0)
        self._scaled: tuple[ScaledSlots, ScaledSlots] | None = None
        if kv.k_scales is not None and kv.v_scales is not None:
            self._scaled = (
                ScaledSlots(kv.k, kv.k_scales, inputs.slots),
                ScaledSlots(kv.v, kv.v_scales, inputs.slots),
            )
        self._decoding = _plan_decoding(windows, inputs, kv)
        self._prefilling = _plan_prefilling(windows, inputs, kv)

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self._scaled is None:
            self._k_slots[layer].index_copy_(0, self._slots, k)
            self._v_slots[layer].index_copy_(0, self._slots, v)
        else:
            for slots, rows in zip(self._scaled, (k, v), strict=True):
                slots.write(layer, rows)
        if len(self._decoding) == 1 and not self._prefilling:
            return self._decode(self._decoding[0], layer, q)
        out = torch.empty_like(q)
        for group in self._decoding:
            out[group.rows] = self._decode(group, layer, q[group.rows])
        for row in self._prefilling:
            out[row.tokens] = self._prefill(row, layer, q[row.tokens], k[row.tokens], v[row.tokens])
        return out

    def _decode(self, group: _Decoding, layer: int, q: torch.Tensor) -> torch.Tensor:
        # The queries that share a key-value head stand in for query positions: no key is copied per head.
        spec = self._layers[layer]
        q = q.reshape(group.num_rows, spec.num_kv_heads, -1, spec.head_dim)  # (rows, kv heads, heads per kv head, dim)
        k, v = self._gather(layer, group.blocks, group.num_rows, group.num_keys)
        mask = group.masks[spec.window]
        if spec.soft_cap is None and not spec.sinks:
            out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=spec.score_scale)
        else:
            sinks = self._sinks[layer]
            out = _attend(q, k, v, mask, spec, None if sinks is None else sinks.view(spec.num_kv_heads, -1))
        return out.reshape(group.num_rows, -1, spec.head_dim)

    def _prefill(self, row: _Prefilling, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if row.blocks is None:
            k, v = k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)  # (1, kv heads, keys, dim)
        else:
            k, v = self._gather(layer, row.blocks, 1, row.num_keys)
        spec = self._layers[layer]
        mask = row.masks[spec.window]
        q = q.transpose(0, 1).unsqueeze(0)  # (1, heads, tokens, dim)
        if spec.soft_cap is None and not spec.sinks:
            out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True,
                                               scale=spec.score_scale)  # fmt: skip
            return out.squeeze(0).transpose(0, 1)
        if mask is None:
            mask = _triangle(q.shape[2], row.num_keys, None, k)
        sinks = self._sinks[layer]
        per_key_head = spec.num_heads // spec.num_kv_heads
        k, v = k.repeat_interleave(per_key_head, dim=1), v.repeat_interleave(per_key_head, dim=1)
        return _attend(q, k, v, mask, spec, None if sinks is None else sinks[:, None]).squeeze(0).transpose(0, 1)

    def _gather(
        self, layer: int, blocks: torch.Tensor, num_rows: int, num_keys: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of rows, each (rows, kv heads, num_keys, dim)."""
        if self._scaled is None:
            k = self._k_blocks[layer].index_select(0, blocks)  # (rows * blocks, block, kv heads, dim)
            v = self._v_blocks[layer].index_select(0, blocks)
        else:
            k, v = (slots.read(layer, blocks) for slots in self._scaled)
        shape = (num_rows, -1, *k.shape[2:])
        return k.view(shape)[:, :num_keys].transpose(1, 2), v.view(shape)[:, :num_keys].transpose(1, 2)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, spec: AttentionSpec,
    sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """What torch's own lacks: soft caps and sinks. q (…, heads, queries, dim), k and v (…, heads, keys, dim); sinks
    (heads, queries) or (heads, 1)."""
    scores = (q @ k.transpose(-1, -2)).float() * spec.score_scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        column = sinks.float()[..., None].expand(*scores.shape[:-1], 1)
        return (torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1].to(v.dtype)) @ v
    return scores.softmax(dim=-1).to(v.dtype) @ v


def _plan_decoding(windows: Windows, inputs: StepInputs, kv: KVCache) -> list[_Decoding]:
    """Group rows so that padding at most doubles what is gathered, however uneven the contexts."""
    buckets: defaultdict[int, list[int]] = defaultdict(list)
    for row in range(inputs.num_decode):
        num_blocks = -(-inputs.context_lens[row] // kv.block_size)
        buckets[max(num_blocks - 1, _SMALLEST_BUCKET - 1).bit_length()].append(row)
    groups = []
    for rows in buckets.values():
        whole = len(rows) == inputs.num_decode
        chosen = slice(0, len(rows)) if whole else torch.tensor(rows, device=inputs.tokens.device)
        lens = [inputs.context_lens[row] for row in rows]
        num_keys = max(lens)
        blocks = inputs.block_tables[chosen, : -(-num_keys // kv.block_size)].flatten()
        masks = {window: _decoding_mask(lens, num_keys, window, _floats(kv)) for window in windows}
        groups.append(_Decoding(chosen, blocks, len(rows), num_keys, masks))
    return groups


def _decoding_mask(lens: list[int], num_keys: int, window: int | None, like: torch.Tensor) -> torch.Tensor | None:
    """(rows, 1, 1, num_keys), or None where every row sees every key."""
    if min(lens) == num_keys and (window is None or num_keys <= window):
        return None
    ends = torch.tensor(lens, device=like.device)[:, None]  # (rows, 1)
    keys = torch.arange(num_keys, device=like.device)
    hidden = keys >= ends
    if window is not None:
        hidden |= keys < ends - window
    return _additive(hidden, like)[:, None, None, :]


def _plan_prefilling(windows: Windows, inputs: StepInputs, kv: KVCache) -> list[_Prefilling]:
    rows = []
    for row in range(inputs.num_decode, len(inputs.context_lens)):
        start, end = inputs.row_starts[row], inputs.row_starts[row + 1]
        num_tokens, num_keys = end - start, inputs.context_lens[row]
        cached = num_tokens < num_keys or kv.k_scales is not None  # rounded ones count, however a prompt is divided
        blocks = inputs.block_tables[row, : -(-num_keys // kv.block_size)] if cached else None
        masks = {window: _prefilling_mask(num_tokens, num_keys, window, _floats(kv)) for window in windows}
        rows.append(_Prefilling(slice(start, end), blocks, num_keys, masks))
    return rows


def _prefilling_mask(num_tokens: int, num_keys: int, window: int | None, like: torch.Tensor) -> torch.Tensor | None:
    """(num_tokens, num_keys), or None where the plain causal triangle will do."""
    if num_tokens == num_keys and (window is None or num_keys <= window):
        return None
    return _triangle(num_tokens, num_keys, window, like)


def _triangle(num_tokens: int, num_keys: int, window: int | None, like: torch.Tensor) -> torch.Tensor:
    """(num_tokens, num_keys), additive: the last tokens see themselves and what was before, or `window` of it."""
    own = torch.arange(num_keys - num_tokens, num_keys, device=like.device)[:, None]  # each query's own place
    keys = torch.arange(num_keys, device=like.device)
    hidden = keys > own
    if window is not None:
        hidden |= keys <= own - window
    return _additive(hidden, like)


def _floats(kv: KVCache) -> torch.Tensor:
    """A tensor of the dtype and device that scores have."""
    return kv.k if kv.k_scales is None else kv.k_scales


def _additive(hidden: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, -torch.inf)
