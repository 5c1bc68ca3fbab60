"""A trace: which requests come, when, and how long their prompts and answers are.

Prompts are token ids, so that equal beginnings are found by the prefix cache as they would be. A simulated answer's tokens are
`answer_ids` of its place in the trace: a later turn of a conversation that holds the answer finds its blocks. Blocks are named
by all tokens up to their end, so that one id per answer is enough to tell answers apart.
"""

from __future__ import annotations

import msgspec

ANSWER_IDS = 1 << 30  # above the ids of every prompt's own tokens; ids have 32 bits


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True):
    index: int  # its place in the trace
    arrival_s: float | None  # after the trace's begin; None: sent when a user is free (closed loop)
    prompt: list[int]
    output_tokens: int
    follows: int | None = None  # the place of the turn before: it is sent `pause_s` after that one's answer
    pause_s: float = 0.0
    priority: int = 2  # as `RequestPriority`
    owner: str = ""  # requests of different owners share no prefixes


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    label: str
    requests: list[TraceRequest]
    users: int | None = None  # closed loop: so many are under way at once
    rate: float | None = None  # open loop: requests per second, as asked for; None: as they come
    until_s: float | None = None  # no request is sent from then on; None: all of them are


def answer_id(index: int) -> int:
    """What every token of the answer to request `index` is."""
    return ANSWER_IDS + index


def answer_ids(index: int, count: int) -> list[int]:
    """The tokens of the answer to request `index`."""
    return [answer_id(index)] * count
