"""`EngineFacts`: a `TimeSpent` as JSON, with fields by name and other requests by id instead of handle.

Does: write it for readers and for the gateway in front, which reads it back with bounds: a backend may say anything. Does not:
decide which ids a reader may see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from tonle.telemetry.time_spent import MissReason, OtherPrompt, TimeSpent, Wait, WaitReason

_MAX_LISTED = 64
Seconds = Annotated[float, Meta(ge=0, le=1e6)]
Count = Annotated[int, Meta(ge=0, le=1 << 40)]


class WaitFact(msgspec.Struct, frozen=True):
    why: WaitReason
    seconds: Seconds


class OtherFact(msgspec.Struct, frozen=True):
    prompt_tokens: Count
    seconds: Seconds
    request_id: Annotated[str, Meta(max_length=128)] | None = None  # None: not known, or not for this reader


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `TimeSpent`, under the same names."""

    queue_s: Seconds = 0.0
    waits: Annotated[list[WaitFact], Meta(max_length=_MAX_LISTED)] = []
    behind: Annotated[list[OtherFact], Meta(max_length=_MAX_LISTED)] = []
    prefill_s: Seconds = 0.0
    cached_tokens: Count = 0
    computed_tokens: Count = 0
    num_chunks: Count = 0
    missed: dict[MissReason, Count] = {}
    prefill_waited_s: Seconds = 0.0
    decode_s: Seconds = 0.0
    num_steps: Count = 0
    stalled_s: Seconds = 0.0
    num_stalled: Count = 0
    stalled_by: Annotated[list[OtherFact], Meta(max_length=_MAX_LISTED)] = []
    preempted_s: Seconds = 0.0
    num_preemptions: Count = 0
    device_s: Seconds = 0.0
    draft_tokens: Count = 0
    accepted_tokens: Count = 0


_LISTS = ("waits", "behind", "stalled_by")
_PLAIN = tuple(name for name in EngineFacts.__struct_fields__ if name not in _LISTS)


def facts_of(spent: TimeSpent, id_of: Callable[[int], str | None]) -> EngineFacts:
    """`id_of`: of the request with this handle; None where the reader may not know it."""

    def others(found: list[OtherPrompt]) -> list[OtherFact]:
        return [
            OtherFact(each.prompt_tokens, each.seconds, id_of(each.handle) if each.handle else None) for each in found
        ]

    return EngineFacts(
        **{name: getattr(spent, name) for name in _PLAIN},
        waits=[WaitFact(wait.why, wait.seconds) for wait in spent.waits],
        behind=others(spent.behind),
        stalled_by=others(spent.stalled_by),
    )


class Told(NamedTuple):
    """What another server told of its engine, in the form of this one's."""

    spent: TimeSpent
    ids: dict[int, str]  # of the requests it names, by handles that are made up here


def told_by(facts: EngineFacts) -> Told:
    handles: dict[str, int] = {}

    def others(found: list[OtherFact]) -> list[OtherPrompt]:
        return [OtherPrompt(_handle(handles, each.request_id), each.prompt_tokens, each.seconds) for each in found]

    spent = TimeSpent(
        **{name: getattr(facts, name) for name in _PLAIN},
        waits=[Wait(wait.why, wait.seconds) for wait in facts.waits],
        behind=others(facts.behind),
        stalled_by=others(facts.stalled_by),
    )
    return Told(spent, {handle: request_id for request_id, handle in handles.items()})


def _handle(handles: dict[str, int], request_id: str | None) -> int:
    return 0 if request_id is None else handles.setdefault(request_id, len(handles) + 1)
