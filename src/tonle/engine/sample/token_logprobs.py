"""Log-probabilities of chosen tokens and their best alternatives."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tonle.engine.request import TokenLogprob


@dataclass(slots=True)
class RawLogprobs:
    """Of R tokens, still on the device: a few numbers each instead of a vocabulary of logits."""

    tokens: list[int]
    chosen: torch.Tensor  # (R,)
    top: torch.Tensor  # (R, num_top), best first
    top_ids: torch.Tensor  # (R, num_top)

    def records(self) -> list[TokenLogprob]:
        """Waits for the device."""
        columns = (self.tokens, self.chosen.tolist(), self.top_ids.tolist(), self.top.tolist())
        return [
            TokenLogprob(token, logprob, list(zip(ids, values, strict=True)))
            for token, logprob, ids, values in zip(*columns, strict=True)
        ]


def raw_logprobs(logits: torch.Tensor, tokens: list[int], num_top: int) -> RawLogprobs:
    """(R, V) raw logits and R chosen tokens."""
    table = torch.log_softmax(logits.float(), dim=-1)
    chosen = table.gather(1, torch.tensor(tokens, device=table.device)[:, None]).squeeze(1)
    top, top_ids = table.topk(num_top, dim=-1)
    return RawLogprobs(tokens, chosen, top, top_ids)


def token_logprobs(logits: torch.Tensor, tokens: list[int], num_top: int) -> list[TokenLogprob]:
    """(R, V) raw logits and R chosen tokens to one record each."""
    return raw_logprobs(logits, tokens, num_top).records()
