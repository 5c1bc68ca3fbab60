"""What the controller is told about a step: the work in it, and for whom. Read from the plan when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tonle.engine.plan import Plan
from tonle.engine.schedule.step_cost import Work


class StepWork(NamedTuple):
    """What a step computes: all that its time depends on. A chunk of one token counts as decoding, whatever it is."""

    rows: int  # sequences with one token in it
    prompts: int  # chunks of several tokens
    tokens: int  # in those chunks
    decode_reads: int  # earlier tokens that attention reads for `rows`
    prompt_reads: int  # the same for the tokens of chunks, on average over each chunk
    samples: int  # tokens drawn


def work_of(plan: Plan) -> StepWork:
    prompts = tokens = prompt_reads = prompt_starts = 0
    for chunk, start in zip(plan.chunks, plan.starts, strict=True):
        if chunk is not None and (size := len(chunk)) > 1:
            prompts += 1
            tokens += size
            prompt_reads += size * (start + size // 2)
            prompt_starts += start
    return StepWork(
        len(plan.rows) - prompts,
        prompts,
        tokens,
        sum(plan.starts) - prompt_starts,
        prompt_reads,
        sum(plan.samples) + sum(plan.drafts.values()),
    )


@dataclass(frozen=True, slots=True)
class StepFacts:
    planned_s: float
    work: Work
    decode_reads: int  # of `work.reads`, those of sequences that decode
    depth: int  # tokens known of the longest prompt that is being computed, 0 if none is
    advances: bool  # it brings the next token of an answer that has begun
    arrivals: list[float]  # of requests whose first token it brings
    waiting_s: float  # how long the first of those that wait has waited
    demand: int  # sequences that run or wait


def facts_of(plan: Plan, now: float, *, waiting_s: float, demand: int) -> StepFacts:
    """`plan` has rows. A chunk of one token costs what decoding costs, whatever it is."""
    tokens = prefill_reads = prefill_starts = depth = num_prefilling = 0
    arrivals, advances = [], False
    for place, chunk in enumerate(plan.chunks):
        if chunk is None:
            advances = True
            continue
        sequence, start = plan.sequences[place], plan.starts[place]
        if plan.samples[place]:
            if sequence.num_output > sequence.num_unsent:
                advances = True
            else:
                arrivals.append(sequence.request.arrived_s)
        if len(chunk) == 1:
            continue
        if drafted := plan.drafts.get(place):  # it decodes; guesses cost what tokens of a prompt do
            tokens += drafted
            prefill_reads += drafted * (start + drafted // 2)
            continue
        num_prefilling += 1
        tokens += len(chunk)
        prefill_reads += len(chunk) * (start + len(chunk) // 2)
        prefill_starts += start
        depth = max(depth, sequence.num_known)
    decode_reads = sum(plan.starts) - prefill_starts
    return StepFacts(
        planned_s=now,
        work=Work(len(plan.rows) - num_prefilling, tokens, decode_reads + prefill_reads),
        decode_reads=decode_reads,
        depth=depth,
        advances=advances,
        arrivals=arrivals,
        waiting_s=waiting_s,
        demand=demand,
    )
