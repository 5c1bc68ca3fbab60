"""The limits of a scheduler: those it was built with, and the tighter ones in force when it is tuned as it runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """What the scheduler must keep to."""

    max_num_seqs: int
    max_num_batched_tokens: int
    context_length: int
    block_size: int
    long_prefill_tokens: int  # most tokens of one prompt per step while others are present
    ageing_s: float = 5.0
    prefix_caching: bool = True
    continuous: bool = True  # False: static batches
    batch_timeout_s: float = 0.0  # static batches: longest wait for one to fill
    num_adapter_slots: int = 0  # adapters that one step can compute with
    min_forced: int = (
        1  # tokens that a grammar forces are computed as a chunk if they are so many; fewer are drawn one by one
    )


@dataclass(frozen=True, slots=True)
class TunedLimits:
    """What a `Controller` allows for now. They apply within `SchedulerLimits`, never beyond."""

    max_num_batched_tokens: int  # of a step in which sequences decode, their tokens included
    prefill_share: float  # of a step: most of it that one prompt may take while others are present
    max_num_seqs: int  # sequences that run; more wait

    def step(self, limits: SchedulerLimits, num_decoding: int) -> tuple[int, int]:
        """Tokens of the next step, and of one prompt in it. However tight, every decoding sequence and one block fit."""
        budget = limits.max_num_batched_tokens
        if num_decoding:
            budget = min(budget, max(self.max_num_batched_tokens, num_decoding + limits.block_size))
        share = max(limits.block_size, int(self.prefill_share * budget))
        return budget, min(limits.long_prefill_tokens, share)
