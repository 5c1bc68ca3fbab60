"""What the advice says about the model, its precisions and its GPUs: does it fit, replicas or tensor parallel, which precision.

Does: sentences and arithmetic from options. Does not: decide anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from tonle.advise.capacity import MEMORY_SHARE, RESERVE_BYTES
from tonle.advise.choose import ACCURACY_PRICE, PARALLEL_PRICE, Question, cost, precision_names
from tonle.advise.lines import Line, Section
from tonle.advise.option import Option
from tonle.advise.precision import KV_PRECISIONS, PRECISIONS
from tonle.advise.units import bytes_text, count_text, flops_text
from tonle.bench.slo import duration_text


def model_section(question: Question) -> Section:
    shape, workload = question.shape, question.workload
    kinds = [PRECISIONS[name] for name in precision_names(question)]
    ends = shape.parameters - shape.block_parameters
    weights = ", ".join(f"{kind.name} {bytes_text(shape.weight_bytes(kind))}" for kind in kinds)
    lines = [
        Line(
            topic="weights",
            verdict=f"{count_text(shape.parameters)} parameters: {weights}",
            reason=f"Counted from {shape.origin}. Embeddings and the output matrix stay in 16 bits in quantized checkpoints.",
            arithmetic=f"{count_text(shape.block_parameters)} in {shape.layers} layers × "
            + ", ".join(f"{kind.bytes_per_weight:.3g} ({kind.name})" for kind in kinds)
            + f" bytes + {count_text(ends)} of embeddings and output × 2 bytes",
        )
    ]
    if shape.stored_as is not None:
        lines.append(_stored_line(shape.stored_as, shape.file_bytes))
    if shape.experts:
        lines.append(
            Line(
                topic="experts",
                verdict=f"{count_text(shape.active_parameters)} parameters are active per token",
                reason=f"{shape.experts_per_token} of {shape.experts} experts: memory must hold all of them, one "
                f"token is multiplied "
                "with few; in a large batch some token asks for each expert, and all weights are read.",
            )
        )
    plain = shape.kv_bytes_per_token(KV_PRECISIONS["bf16"])
    lines.append(
        Line(
            topic="KV cache",
            verdict=f"{bytes_text(plain)} per token; an average running request holds "
            f"{bytes_text(plain * workload.held_mean)}",
            reason="Keys and values of all layers; fp8 keeps them in half of it."
            + (" Sliding windows are not counted: with one, long requests take less." if _windows(question) else ""),
            arithmetic=f"2 × {shape.layers} layers × {shape.kv_heads} KV heads × {shape.head_size} × 2 bytes; "
            f"{workload.held_mean:,.0f} tokens held on average (prompt and half of the answer)",
        )
    )
    return Section(title="Model", lines=lines)


def _stored_line(stored_as: str, file_bytes: int | None) -> Line:
    if stored_as in PRECISIONS:
        return Line(
            topic="files",
            verdict=f"the checkpoint is stored in {stored_as}",
            reason="Only that precision is considered; --precision asks for others.",
        )
    size = "" if file_bytes is None else f", {bytes_text(file_bytes)}"
    return Line(
        topic="files",
        verdict=f"weights are stored as {stored_as}{size}",
        reason="On a CPU Tonle computes from the packed weights; on a GPU they are unpacked to 16 bits, so that a GPU "
        "must hold the "
        "bf16 size.",
    )


def _windows(question: Question) -> bool:
    return question.shape.architecture.startswith("Mistral")


def fit_section(question: Question, options: Sequence[Option], chosen: Option | None) -> Section:
    gpu = question.gpu
    lines = [
        Line(
            topic="does it fit",
            verdict="; ".join(_fewest(options, name) for name in precision_names(question)),
            reason=f"Weights, a reserve and KV for the longest request and at least 8 average ones must fit. {gpu.name}: "
            f"{bytes_text(gpu.memory_bytes)}, {bytes_text(gpu.bandwidth)}/s, {flops_text(gpu.bf16)}FLOP/s in bf16"
            + (f", {flops_text(gpu.fp8)}FLOP/s in fp8" if gpu.fp8 else ", no fp8 units")
            + f" ({gpu.origin}).",
            arithmetic=f"{bytes_text(gpu.memory_bytes)} × {MEMORY_SHARE:g} − {bytes_text(RESERVE_BYTES)} for graphs and "
            "activations = "
            f"{bytes_text(options[0].capacity.usable_bytes)} usable per GPU",
        )
    ]
    if chosen is not None:
        lines += [_precision_line(question, options, chosen), *_parallel_lines(question, options, chosen)]
        lines.append(_serving_line(question, options, chosen))
    return Section(title="Precision and GPUs", lines=lines)


def _fewest(options: Sequence[Option], name: str) -> str:
    own = [option for option in options if option.times.precision.name == name]
    fitting = [option for option in own if option.fits]
    if not fitting:
        return f"{name} does not fit: {own[-1].why_not}" if own else f"{name}: not considered"
    first = fitting[0]
    kv = " (with fp8 KV)" if first.times.kv.name == "fp8" else ""
    return f"{name} from {first.times.gpus} GPU{'s' if first.times.gpus > 1 else ''}{kv}"


def _precision_line(question: Question, options: Sequence[Option], chosen: Option) -> Line:
    name = chosen.times.precision.name
    others = []
    for other in precision_names(question):
        best = min(
            (option for option in options if option.fits and option.times.precision.name == other),
            key=lambda option: cost(option, question),
            default=None,
        )
        if other != name and best is not None:
            others.append(f"{best.name} {_cost_text(best, question)}")
    reason = f"Answers: {chosen.times.precision.accuracy}."
    if others:
        eight, four = ACCURACY_PRICE["fp8"], ACCURACY_PRICE["int4"]
        reason += (
            f" A lower precision must save at least {eight:.0%} (8 bits) or {four:.0%} (4 bits) to be worth its risk."
        )
    if name == "int4":
        reason += " Products run at bf16's rate, so that int4 helps decoding and memory, not prompts."
    if (
        chosen.not_served == ""
        and any(option.not_served and option.fits for option in options)
        and question.engine == "auto"
    ):
        reason = f"Tonle's engine serves it today, which comes first with --engine auto. {reason}"
    return Line(
        topic="precision",
        verdict=f"{name} ({chosen.times.precision.how})",
        reason=reason,
        arithmetic=f"{chosen.name} {_cost_text(chosen, question)}"
        + (f"; best of others: {', '.join(others)}" if others else ""),
    )


def _cost_text(option: Option, question: Question) -> str:
    if question.workload.users is None and question.workload.rate is None:
        return f"{option.gpu_s:.3g} GPU s per request"
    count = f"{cost(option, question):.3g}"
    return f"{count} GPU{'' if count == '1' else 's'} for the load"


def _parallel_lines(question: Question, options: Sequence[Option], chosen: Option) -> list[Line]:
    times = chosen.times
    same = [option for option in options if option.times.precision.name == times.precision.name]
    smaller = [option for option in same if option.times.gpus < times.gpus]
    larger = next((option for option in same if option.fits and option.times.gpus == 2 * times.gpus), None)
    if times.gpus == 1:
        verdict = "one GPU per replica, and more replicas for more load"
        reason = (
            "It fits one GPU: replicas share no step, no link and no failure, and throughput grows with their number."
        )
    else:
        verdict = f"tensor parallel over {times.gpus} GPUs per replica, and more replicas for more load"
        missed = next((option for option in smaller if option.fits and option.misses), None)
        why = next((option.why_not for option in reversed(smaller) if not option.fits), "")
        if missed is not None:
            reason = f"{missed.name} would fit but cannot hold the SLO ({missed.misses[0]})."
        elif why:
            reason = f"With {smaller[-1].times.gpus} GPU{'s' if smaller[-1].times.gpus > 1 else ''}: {why}."
        else:
            reason = f"More GPUs save over {PARALLEL_PRICE:.0%}: weights are held once, and the rest is KV cache."
    lines = [Line(topic="replicas or tensor parallel", verdict=verdict, reason=reason, arithmetic=_link_text(chosen))]
    return lines if larger is None else [*lines, _larger_line(chosen, larger)]


def _larger_line(chosen: Option, larger: Option) -> Line:
    gain, gpus = chosen.request_s / larger.request_s, larger.times.gpus
    reason = (
        f"One user's token comes after {duration_text(larger.decode_one_ms)} instead of "
        f"{duration_text(chosen.decode_one_ms)}: worth it where latency needs it."
    )
    if gain > 2:
        reason += (
            f" Above 2 because the weights are held once: {larger.capacity.kv_tokens:,} tokens of KV instead of "
            f"{2 * chosen.capacity.kv_tokens:,} in two replicas. {1 - larger.gpu_s / chosen.gpu_s:.0%} of GPU time would be "
            f"saved; {PARALLEL_PRICE:.0%} are asked for, as all-reduce times are assumed, not measured, and a failure takes "
            f"{gpus} GPUs at once."
        )
    return Line(
        topic=f"{gpus} GPUs per replica instead",
        verdict=f"{gain:.2f} times the throughput of one replica; two replicas give 2 times",
        reason=reason,
        arithmetic=_link_text(larger),
    )


def _link_text(option: Option) -> str:
    times = option.times
    if times.gpus == 1:
        return ""
    assert option.settings is not None
    rows = option.settings.max_num_seqs
    return (
        f"all-reduce: 2 × {times.shape.layers} layers, {duration_text(1e3 * times.all_reduce_s(1))} of a step of one token, "
        f"{duration_text(1e3 * times.all_reduce_s(rows))} of {rows}, over {times.gpu.link_name} ({bytes_text(times.gpu.link)}/s "
        f"each way); of {duration_text(option.decode_full_ms)} per full decode step"
    )


def _serving_line(question: Question, options: Sequence[Option], chosen: Option) -> Line:
    if not chosen.not_served:
        better = min(
            (option for option in options if option.fits and option.not_served),
            key=lambda option: option.gpu_s,
            default=None,
        )
        more = ""
        if better is not None and better.gpu_s < 0.9 * chosen.gpu_s:
            more = (
                f" {better.name} would take {1 - better.gpu_s / chosen.gpu_s:.0%} less GPU time ({better.not_served}); "
                f"plan with it by "
                "--engine vllm."
            )
        return Line(
            topic="who serves it",
            verdict="Tonle's own engine",
            reason="Family, precision and GPU are supported." + more,
        )
    tonle = next((option for option in options if option.fits and not option.not_served), None)
    return Line(
        topic="who serves it",
        verdict="vLLM, behind `tonle gateway` (keys, limits, audit, routing)",
        reason=f"{chosen.not_served}."
        + (
            f" Tonle's engine could serve {tonle.name}."
            if tonle is not None
            else " No option that fits is served by Tonle's engine today."
        ),
    )
