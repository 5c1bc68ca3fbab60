"""The eager reference: a decoder in plain torch operations over one whole text, and how far given tokens lie below its best.

Does: judge tokens that another path chose. Does not: generate.
"""

from __future__ import annotations

import torch

from tonle.models.decoder import Decoder
from tonle.models.inputs import KVCache, StepInputs

_BLOCK = 16

# Logits this close may be ordered either way, as a share of the best one: two orders of summing round differently.
TIES = {torch.float32: 1e-4, torch.bfloat16: 4 * 2.0**-8, torch.float16: 4 * 2.0**-11}


@torch.inference_mode()
def reference_logits(decoder: Decoder, tokens: list[int]) -> torch.Tensor:
    """(tokens, vocab) float32, in one eager step of plain torch operations."""
    spec, device, n = decoder.spec, decoder.device, len(tokens)
    blocks = -(-n // _BLOCK)
    kv = KVCache(num_layers=spec.num_layers, num_blocks=blocks, block_size=_BLOCK, num_kv_heads=spec.num_kv_heads,
                 head_dim=spec.head_dim, dtype=decoder.dtype, device=device)  # fmt: skip
    places = torch.arange(n, device=device)
    inputs = StepInputs(
        tokens=torch.tensor(tokens, device=device), positions=places, slots=places, row_starts=[0, n],
        context_lens=[n], block_tables=torch.arange(blocks, dtype=torch.int32, device=device)[None],
        num_decode=int(n == 1), logit_indices=places,
    )  # fmt: skip
    return decoder.forward(inputs, kv)


def gaps(decoder: Decoder, prompt: list[int], output: list[int]) -> torch.Tensor:
    """(output,): how far below the reference's best each token is, as a share of the best; 0 = it is the best."""
    logits = reference_logits(decoder, prompt + output[:-1])[len(prompt) - 1 :].float()
    ours = logits.gather(1, torch.tensor(output, device=logits.device)[:, None]).squeeze(1)
    best = logits.amax(1)
    return (best - ours) / best.abs()
