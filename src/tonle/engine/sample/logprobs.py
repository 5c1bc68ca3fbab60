"""Log-probabilities of chosen tokens and their best alternatives."""

from __future__ import annotations

import torch

from tonle.engine.request import TokenLogprob


def token_logprobs(logits: torch.Tensor, tokens: list[int], num_top: int) -> list[TokenLogprob]:
    """(R, V) raw logits and R chosen tokens to one record each."""
    table = torch.log_softmax(logits.float(), dim=-1)
    chosen = table.gather(1, torch.tensor(tokens, device=table.device)[:, None]).squeeze(1).tolist()
    if num_top == 0:
        return [TokenLogprob(token, logprob, []) for token, logprob in zip(tokens, chosen, strict=True)]
    values, ids = table.topk(num_top, dim=-1)
    return [
        TokenLogprob(token, logprob, list(zip(top_ids, top_values, strict=True)))
        for token, logprob, top_ids, top_values in zip(tokens, chosen, ids.tolist(), values.tolist(), strict=True)
    ]
