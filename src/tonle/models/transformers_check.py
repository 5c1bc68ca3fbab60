"""`check`: a `transformers` model gives the same logits in our steps as in a call of its own.

Does: compute two short rows in a few steps (batched, cut into chunks, token by token) and compare. Does not: know how steps
are run. What it finds: layers that keep a state beyond keys and values, attention that is not causal, arguments that our
attention would have needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tonle.errors import ModelError
from tonle.models.inputs import KVCache, StepInputs
from tonle.models.transformers_call import ModelCall

if TYPE_CHECKING:
    from tonle.models.transformers_decoder import TransformersDecoder

_BLOCK = 8
_LENGTHS = (21, 13)
_CUTS = ((9, 19, 20, 21), (11, 12, 12, 13))  # by row: how many of its tokens are computed after each step
# Of the difference, beside the spread of the logits: rounding, and no more.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 8e-2, torch.float16: 2e-2}


@torch.inference_mode()
def check(decoder: TransformersDecoder, call: ModelCall) -> None:
    """Raises `ModelError` if the logits differ by more than rounding."""
    spec = decoder.spec
    longest = min(max(_LENGTHS), spec.max_positions)
    generator = torch.Generator().manual_seed(0)
    rows = [
        torch.randint(spec.vocab_size, (min(length, longest),), generator=generator).to(decoder.device)
        for length in _LENGTHS
    ]
    expected = [_whole(call, tokens) for tokens in rows]
    kv = KVCache(
        num_layers=spec.num_layers, num_blocks=2 * -(-max(_LENGTHS) // _BLOCK), block_size=_BLOCK,
        num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, dtype=decoder.dtype, device=decoder.device,
    )  # fmt: skip
    done = [0, 0]
    for step in range(len(_CUTS[0])):
        ends = [min(cuts[step], len(tokens)) for cuts, tokens in zip(_CUTS, rows, strict=True)]
        going = sorted((row for row in range(2) if ends[row] > done[row]), key=lambda row: ends[row] - done[row])
        if not going:
            continue
        inputs = _inputs([(row, rows[row], done[row], ends[row]) for row in going], kv)
        logits = decoder.forward(inputs, kv)
        for own, row in zip(logits, going, strict=True):
            _compare(own, expected[row][ends[row] - 1], decoder.dtype)
        done = ends


def _whole(call: ModelCall, tokens: torch.Tensor) -> torch.Tensor:
    """(n, vocab) float32, from the model as it is."""
    all_of_them = torch.arange(len(tokens), device=tokens.device)
    logits, _ = call(tokens[None], all_of_them, False, {"use_cache": False})
    return logits[0].float()


def _compare(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> None:
    error = ((ours - theirs).norm() / (theirs - theirs.mean()).norm().clamp(min=1e-30)).item()
    if not error <= _TOLERANCE.get(dtype, 1e-3):
        raise ModelError(
            f"its logits come out different when a text is computed in parts (by {error:.2g} of their spread): "
            "it is not causal, or its layers keep more than keys and values"
        )


def _inputs(going: list[tuple[int, torch.Tensor, int, int]], kv: KVCache) -> StepInputs:
    """One step: of each row its tokens, how many are computed already, and how many after the step."""
    device = going[0][1].device
    per_row = kv.num_blocks // 2
    tables = torch.stack([torch.arange(per_row, dtype=torch.int32, device=device) + row * per_row for row, *_ in going])
    positions = [torch.arange(start, end, device=device) for _, _, start, end in going]
    slots = [place + row * per_row * kv.block_size for (row, *_), place in zip(going, positions, strict=True)]
    sizes = [end - start for *_, start, end in going]
    starts = [0, *torch.tensor(sizes).cumsum(0).tolist()]
    return StepInputs(
        tokens=torch.cat([tokens[start:end] for _, tokens, start, end in going]),
        positions=torch.cat(positions),
        slots=torch.cat(slots),
        row_starts=starts,
        context_lens=[end for *_, end in going],
        block_tables=tables,
        num_decode=sum(size == 1 for size in sizes),
        logit_indices=torch.tensor(starts[1:], device=device) - 1,
    )
