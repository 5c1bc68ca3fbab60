"""Changes to one row's logits before a token is chosen: penalties, bias, forbidden endings."""

from __future__ import annotations

import torch

from tonle.engine.request import ResolvedConfig


def needs_adjusting(config: ResolvedConfig) -> bool:
    return bool(
        config.repetition_penalty != 1.0
        or config.presence_penalty
        or config.frequency_penalty
        or config.logit_bias
        or config.min_tokens
    )


class Adjuster:
    """The history of one row, and the change it makes to the row's logits. Exists only for rows that ask for one."""

    def __init__(self, config: ResolvedConfig, prompt: list[int], output: list[int], stops: list[int],
                 vocab_size: int, device: torch.device) -> None:  # fmt: skip
        self.config = config
        self.num_output = len(output)
        self._num_prompt = len(prompt)
        self._stops = torch.tensor(sorted(stops), dtype=torch.int64, device=device)
        self._bias_ids = torch.tensor(list(config.logit_bias), dtype=torch.int64, device=device)
        self._bias = torch.tensor(list(config.logit_bias.values()), dtype=torch.float32, device=device)
        self._counts = torch.zeros(vocab_size, dtype=torch.float32, device=device)  # of output tokens
        self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)  # in prompt or output
        if prompt:
            self._seen[torch.tensor(prompt, device=device)] = True
        for token in output:
            self._remember(token)

    def push(self, token: int) -> None:
        self.num_output += 1
        self._remember(token)

    def catch_up(self, start: int, chunk: list[int]) -> None:
        """The row has these tokens from place `start` on: take in those that were not drawn, but forced."""
        unseen = self._num_prompt + self.num_output - start
        assert unseen >= 0, "tokens are missing between the last one seen and these"
        if unseen < len(chunk):
            self.push_forced(chunk[unseen:])

    def push_forced(self, tokens: list[int]) -> None:
        for token in tokens:
            self.push(token)

    def _remember(self, token: int) -> None:
        self._counts[token] += 1
        self._seen[token] = True

    def apply(self, logits: torch.Tensor) -> None:
        """In place on (vocab,). Order as elsewhere: repetition, frequency, presence, bias, then what is forbidden."""
        config = self.config
        if config.repetition_penalty != 1.0:
            penalized = torch.where(logits > 0, logits / config.repetition_penalty, logits * config.repetition_penalty)
            logits.copy_(torch.where(self._seen, penalized, logits))
        if config.frequency_penalty:
            logits.sub_(self._counts, alpha=config.frequency_penalty)
        if config.presence_penalty:
            logits.sub_((self._counts > 0).float(), alpha=config.presence_penalty)
        if config.logit_bias:
            logits.index_add_(0, self._bias_ids, self._bias)
        if self.num_output < config.min_tokens:
            logits.index_fill_(0, self._stops, -torch.inf)
