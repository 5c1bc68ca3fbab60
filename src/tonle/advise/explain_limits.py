"""What the advice says about speed and limits: floors, batch, step size, long prompts, admission, replicas.

Does: sentences and arithmetic from a sizing. Does not: decide anything.
"""

from __future__ import annotations

import math

from tonle.advise.capacity import memory_text
from tonle.advise.choose import HEADROOM, Group, Question, Sizing
from tonle.advise.lines import Line, Section
from tonle.advise.option import MOST_ROWS, Option, prompt_cost_s
from tonle.advise.precision import KV_PRECISIONS
from tonle.advise.units import bytes_text, count_text, flops_text
from tonle.advise.workload import LONG_PROMPT, Workload
from tonle.bench.slo import Slo, duration_text


def floor_section(question: Question, option: Option) -> Section:
    times, workload, shape = option.times, question.workload, option.times.shape
    read = shape.read_bytes(times.precision)
    ridge = times.gpu.ridge(times.precision.rate, times.precision.bytes_per_weight)
    floors = option.ttft_floor_ms
    own = workload.mean_prompt - workload.shared_prefix
    operations = 2 * shape.active_block_parameters * own
    gpus = f" × {times.gpus} GPUs" if times.gpus > 1 else ""
    lines = [
        Line(
            topic="TTFT floor",
            verdict=f"p50 {duration_text(floors['p50'])}, p95 {duration_text(floors['p95'])}, p99 "
            f"{duration_text(floors['p99'])} on an idle "
            "replica",
            reason="Prompts are bound by arithmetic; queueing comes on top.",
            arithmetic=f"an average prompt: 2 × {count_text(shape.active_block_parameters)} × "
            f"{own:,.0f} tokens = "
            f"{flops_text(operations)}FLOP at {times.efficiency.products:.0%} of "
            f"{flops_text(times.gpu.rate(times.precision.rate))}"
            f"FLOP/s{gpus}, and attention",
        ),
        Line(
            topic="TPOT floor",
            verdict=f"{duration_text(option.decode_one_ms)} for one user, {duration_text(option.decode_full_ms)} in a "
            f"full batch, "
            f"{duration_text(option.tpot_ms)} with the prompts of others in between",
            reason="Every step reads the weights once, and the keys and values of every row.",
            arithmetic=f"{bytes_text(read)} of weights{f' / {times.gpus}' if times.gpus > 1 else ''} at "
            f"{times.efficiency.bandwidth:.0%} "
            f"of {bytes_text(times.gpu.bandwidth)}/s = {duration_text(1e3 * times.read_weights_s())}; KV of the full batch "
            f"{duration_text(1e3 * times.read_kv_s(round(_rows(option) * _context(workload))))}",
        ),
        Line(
            topic="when decoding is bound by arithmetic",
            verdict=f"from about {ridge:,.0f} rows; a full batch has {_rows(option)}",
            reason="Below that, more users in a batch cost little but their KV reads."
            if ridge > _rows(option)
            else "The batch is beyond it: more users in it no longer raise throughput much.",
            arithmetic=f"{flops_text(times.gpu.rate(times.precision.rate))}FLOP/s × "
            f"{times.precision.bytes_per_weight:.3g} bytes per weight / "
            f"(2 × {bytes_text(times.gpu.bandwidth)}/s)",
        ),
    ]
    if option.misses:
        lines.append(
            Line(
                topic="SLO",
                verdict="cannot hold",
                reason="; ".join(option.misses) + ". More GPUs per replica or a faster GPU would help.",
            )
        )
    return Section(title="Floors (roofline)", lines=lines)


def _rows(option: Option) -> int:
    assert option.settings is not None
    return option.settings.max_num_seqs


def _context(workload: Workload) -> float:
    return workload.held_mean + workload.shared_prefix


def capacity_section(question: Question, sizing: Sizing) -> Section:
    lines = []
    for group in sizing.groups:
        lines += _group_lines(question, group, named=sizing.split)
    lines += [_kv_line(question, sizing.option), _prefix_line(question.workload)]
    return Section(title="Capacity and limits of a replica", lines=lines)


def _group_lines(question: Question, group: Group, *, named: bool) -> list[Line]:
    option, workload = group.option, group.workload
    capacity, settings = option.capacity, group.settings
    where = f", {group.length} prompts" if named else ""
    return [
        Line(
            topic=f"KV capacity{where}",
            verdict=f"{capacity.kv_tokens:,} tokens: {capacity.users_mean} requests of average size, "
            f"{capacity.users_p95} of p95 size",
            reason=f"{capacity.users_safe} of this mix fit in 95 of 100 moments; beyond that requests are preempted "
            f"and computed again.",
            arithmetic=memory_text(capacity, option.times)
            + f"; the rest / {bytes_text(capacity.kv_bytes_per_token)} per token",
        ),
        Line(
            topic=f"admission{where}",
            verdict=f"at most {settings.max_num_seqs} requests at a time per replica (max_num_seqs, and "
            f"max_concurrent of the gateway)",
            reason=f"{_what_ends_the_batch(group)} The gateway's queue does what a semaphore in a client would, for all "
            "clients together, and refuses with 429 when it is full.",
            arithmetic=f"n × {workload.held_mean:,.0f} + 1.645 × √n × {workload.held_spread:,.0f} ≤ "
            f"{capacity.kv_tokens:,} tokens",
        ),
        _step_line(question.slo, group, where),
        _threshold_line(group, where),
    ]


def _what_ends_the_batch(group: Group) -> str:
    rows = group.settings.max_num_seqs
    if rows >= group.option.capacity.users_safe:
        return "Memory sets it."
    if rows >= MOST_ROWS:
        return f"It is the usual largest batch; memory would hold {group.option.capacity.users_safe:,}."
    return "The SLO sets it: in a larger batch tokens would come later than allowed."


def _step_line(slo: Slo, group: Group, where: str) -> Line:
    option, settings = group.option, group.settings
    limit = min((bound.limit_ms for bound in slo.bounds if bound.metric == "itl"), default=math.inf)
    if math.isinf(limit):
        reason = "No ITL bound was given, so this is the default. Smaller steps make gaps between tokens shorter."
    elif option.mixed_ms <= limit:
        reason = f"What a step can compute within {duration_text(limit)}, the ITL bound, less a tenth for scatter."
    else:
        reason = f"Even the smallest sensible step exceeds the ITL bound of {duration_text(limit)}."
    prompt_s = prompt_cost_s(option.times, group.workload, settings.max_num_seqs, settings.max_num_batched_tokens)
    return Line(
        topic=f"tokens per step{where}",
        verdict=f"max_num_batched_tokens {settings.max_num_batched_tokens:,}: a step with prompts takes "
        f"{duration_text(option.mixed_ms)}",
        reason=reason,
        arithmetic=f"{settings.max_num_seqs} rows decode in {duration_text(option.decode_full_ms)}; an average prompt adds "
        f"{duration_text(1e3 * prompt_s)} in all",
    )


def _threshold_line(group: Group, where: str) -> Line:
    settings, longest = group.settings, group.workload.prompt_at(95)
    share, step = settings.long_prefill_token_threshold, settings.max_num_batched_tokens
    if share >= step:
        reason = "A prompt may take the whole step: in simulation more requests keep the SLO so."
    else:
        reason = "Half of a step: a long prompt leaves the other half to those that came after it."
    if step <= LONG_PROMPT and longest > step:
        reason += f" The threshold caps its share of each step: {LONG_PROMPT:,} would be more than a step has."
    steps = math.ceil(longest / share)
    return Line(
        topic=f"long prompts beside short ones{where}",
        verdict=f"long_prefill_token_threshold {share:,}",
        reason=reason,
        arithmetic=f"a p95 prompt of {longest:,} tokens takes {steps} step{'s' if steps > 1 else ''} while others run",
    )


def _kv_line(question: Question, option: Option) -> Line:
    plain = option.times.shape.kv_bytes_per_token(KV_PRECISIONS["bf16"])
    if option.times.kv.name == "fp8":
        return Line(
            topic="fp8 KV",
            verdict="on: kv_cache_dtype fp8",
            reason="In 16 bits too few requests would fit. Measured on an H200 it costs prompts about 14 % and long mixes more; "
            "check answers of long contexts.",
        )
    if not question.gpu.has_fp8:
        return Line(
            topic="fp8 KV",
            verdict=f"off; it would hold {2 * option.capacity.kv_tokens:,} tokens",
            reason="GPUs before compute capability 8.9 unpack it by arithmetic, at a cost not measured yet (--kv-dtype fp8 plans "
            "with it).",
        )
    return Line(
        topic="fp8 KV",
        verdict=f"off; it would hold {2 * option.capacity.kv_tokens:,} tokens",
        reason="Twice the requests where memory is the limit. Measured on an H200: decode steps −4 to −9 %, prompts "
        "+14 %; so only where "
        "memory ends the batch and prompts are short (--kv-dtype fp8 plans with it).",
        arithmetic=f"{bytes_text(plain)} → {bytes_text(plain / 2)} per token",
    )


def _prefix_line(workload: Workload) -> Line:
    if workload.shared_prefix:
        share = workload.shared_prefix / workload.mean_prompt
        return Line(
            topic="prefix caching",
            verdict=f"leave it on: {share:.0%} of an average prompt is computed once",
            reason="The shared prefix is held once in memory and skipped in every later prompt; the gateway's "
            "prefix_affinity keeps "
            "equal beginnings on one replica.",
        )
    return Line(
        topic="prefix caching",
        verdict="leave it on; none is planned for",
        reason="It costs nothing without hits. System prompts, documents and earlier turns at the beginning of "
        "prompts raise every number "
        "here: state them with --shared-prefix-tokens.",
    )


def load_section(question: Question, sizing: Sizing) -> Section:
    lines = [_replica_line(group, named=sizing.split) for group in sizing.groups]
    if sizing.split:
        short, long = sizing.groups
        lines.append(
            Line(
                topic="length classes",
                verdict=f"separate prompts below and from {question.length_threshold:,} tokens: {short.replicas} and "
                f"{long.replicas} "
                "replicas",
                reason="A long prompt holds up the short ones that share its steps; the gateway routes by length "
                "(length_threshold).",
                arithmetic=f"{len(short.workload.lengths) / len(question.workload.lengths):.0%} of requests are short, "
                f"with {short.workload.mean_prompt:,.0f} tokens on average instead of {long.workload.mean_prompt:,.0f}",
            )
        )
    return Section(title="Replicas for the load", lines=lines)


def _replica_line(group: Group, *, named: bool) -> Line:
    option, workload = group.option, group.workload
    settings = group.settings
    where = f", {group.length} prompts" if named else ""
    tokens_per_s = option.requests_per_s * workload.mean_answer
    each = f"a full replica answers {option.requests_per_s:.3g} requests/s, {tokens_per_s:,.0f} tokens/s"
    count = (
        f"{group.replicas} replica{'s' if group.replicas > 1 else ''} ({group.gpus} GPU{'s' if group.gpus > 1 else ''})"
    )
    if workload.rate is not None:
        reason = f"{workload.rate:.3g} requests/s at {HEADROOM:.0%} of what a replica can do: arrivals come in bunches."
        arithmetic = f"{workload.rate:.3g} × {option.request_s:.3g} s / {HEADROOM:g}; {each}"
    elif workload.users is not None:
        reason = f"{workload.users:,} users at a time, at most {settings.max_num_seqs} per replica."
        arithmetic = f"{workload.users:,} / {settings.max_num_seqs}; {each}"
    else:
        count, reason, arithmetic = each, "No load was given (--rate or --concurrency): this is one replica's.", ""
    return Line(topic=f"replicas{where}", verdict=count, reason=reason, arithmetic=arithmetic)
