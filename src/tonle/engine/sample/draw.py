"""One token per row from logits: filters as thresholds, then the inverse of the cumulative distribution.

A filter becomes a threshold on probabilities and the draw walks the vocabulary in its own order. So two nearly equal
probabilities that swap ranks, as they may when the batch around the row changes, do not change the draw.
"""

from __future__ import annotations

import torch

TOP_CANDIDATES = 1024  # enough for nearly every top_p; more only when a row's distribution is flatter


def draw(logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor,
         uniform: torch.Tensor) -> torch.Tensor:  # fmt: skip
    """(R, V) float32 logits and (R,) parameters to (R,) tokens. top_k 0, top_p 1, min_p 0 mean off."""
    probs = torch.softmax(logits / temperature[:, None], dim=-1)
    if bool(((top_k > 0) | (top_p < 1) | (min_p > 0)).any()):
        floor = _threshold(probs, top_k, top_p, min_p)
        probs = torch.where(probs >= floor[:, None], probs, 0.0)
    cumulative = probs.double().cumsum(-1)  # float64: 150k float32 terms would drift
    target = uniform.double() * cumulative[:, -1]
    tokens = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(1)
    return tokens.clamp_(max=logits.shape[-1] - 1)


def _threshold(probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """(R,) the smallest probability each row keeps."""
    vocab = probs.shape[-1]
    most = min(vocab, max(TOP_CANDIDATES, int(top_k.max())))
    best = probs.topk(most, dim=-1).values  # (R, most), falling
    floor = _nucleus(best, top_k, top_p)
    flat = (top_k == 0) & (top_p < 1) & (best.double().sum(-1) < top_p)
    if most < vocab and bool(flat.any()):  # the candidates did not reach top_p: look at the whole row
        best = probs[flat].sort(dim=-1, descending=True).values
        floor[flat] = _nucleus(best, top_k[flat], top_p[flat])
    return torch.maximum(floor, min_p * best_of(probs))


def best_of(probs: torch.Tensor) -> torch.Tensor:
    return probs.amax(dim=-1)


def _nucleus(best: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """(R,) the last kept of falling probabilities: at most top_k, then as few as reach top_p of what those weigh."""
    rank = torch.arange(best.shape[-1], device=best.device)
    within_k = (rank < top_k[:, None]) | (top_k[:, None] == 0)
    kept = torch.where(within_k, best, 0.0)
    total = torch.where(top_k > 0, kept.sum(-1), 1.0)  # without top_k: of the whole row
    before = kept.cumsum(-1) - kept  # what stands ahead of each
    keep = within_k & (before < (top_p * total)[:, None])
    keep[:, 0] = True
    off = (top_k == 0) & (top_p >= 1)
    last = torch.where(keep, best, torch.inf).amin(-1)
    return torch.where(off, 0.0, last)
