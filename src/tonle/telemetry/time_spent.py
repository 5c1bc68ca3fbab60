"""`TimeSpent`: where one request's time in an engine went, as the engine recorded it.

Does: hold. The engine fills it when a request ends and sends it with the last tokens; `observe/explain.py` puts it into words.
Does not: know requests by more than their handles.
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

# Why a request was not in a step yet:
#   step     a step was under way when it came
#   prompts  the tokens of steps went to requests ahead of it
#   rows     as many sequences ran as may (max_num_seqs)
#   tuned    as many ran as adaptive tuning allows
#   blocks   too few KV blocks were free
#   adapter  no slot was free for its adapter, or its adapter was being read
#   grammar  the grammar of its answer was being compiled
#   batch    static batches: its batch had not begun
#   loading  keys and values of its prefix came from elsewhere: another engine, or memory other than the device's
WaitReason = Literal["step", "prompts", "rows", "tuned", "blocks", "adapter", "grammar", "batch", "loading"]
WAIT_REASONS: tuple[WaitReason, ...] = get_args(WaitReason)

# Why prompt tokens were not found in the prefix cache:
#   new      no request with this beginning has been computed (for this tenant and adapter)
#   evicted  it was there, and was dropped to make room
#   tail     it is the end of the prompt: less than a block, or the last token, which is always computed
#   off      the prefix cache is switched off
MissReason = Literal["new", "evicted", "tail", "off"]
MISS_REASONS: tuple[MissReason, ...] = get_args(MissReason)


class Wait(msgspec.Struct, array_like=True, frozen=True):
    why: WaitReason
    seconds: float


class OtherPrompt(msgspec.Struct, array_like=True, frozen=True):
    """A prompt of another request that was computed while this one waited or decoded, and took at least half of a step."""

    handle: int  # of that request; 0: of another front end
    prompt_tokens: int  # of that request, the whole prompt
    seconds: float  # of steps in which it was the largest prompt; in `stalled_by`, what prompts added to those steps


class TimeSpent(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Seconds. `queue_s + prefill_s + decode_s` is the time from arrival at the front to the last token in the engine."""

    queue_s: float = 0.0  # arrival to first scheduled
    waits: list[Wait] = []  # of `queue_s`, by reason: step, grammar, then the longest first; they add up to it
    behind: list[
        OtherPrompt
    ] = []  # prompts computed in steps without it, from its arrival to its first token; three at most
    prefill_s: float = 0.0  # first scheduled to first token
    cached_tokens: int = 0  # of the prompt
    computed_tokens: int = 0  # of the prompt; again after a preemption
    num_chunks: int = 0  # steps that computed them
    missed: dict[MissReason, int] = {}  # prompt tokens that were not found in the prefix cache, by reason
    prefill_waited_s: float = 0.0  # of `prefill_s`, steps that had no token of it, though it had a row
    decode_s: float = 0.0  # first token to last token
    num_steps: int = 0  # steps that brought its tokens
    stalled_s: float = 0.0  # of `decode_s`, what the prompts of others added to its steps
    num_stalled: int = 0  # those steps
    stalled_by: list[OtherPrompt] = []  # longest first; three at most
    preempted_s: float = 0.0  # of `prefill_s` and `decode_s`, without a row
    num_preemptions: int = 0
    device_s: float = 0.0  # its share of the device's time: a step's time is shared equally by the sequences in it
    draft_tokens: int = 0  # guesses that its steps computed besides (speculative decoding)
    accepted_tokens: int = 0  # and how many of them were right: tokens of its answer that took no step of their own

    @property
    def total_s(self) -> float:
        return self.queue_s + self.prefill_s + self.decode_s
