"""`advise`: from a `Question` to an `Advice`, checked by simulation.

Does: put options, sizing, sections, commands and the check together. Does not: print (`render.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from tonle import __version__
from tonle.advise.check import Check
from tonle.advise.choose import Question, Sizing, all_options, choose, size_by_length, size_together
from tonle.advise.commands import command_lines, settings_files
from tonle.advise.correct import check_and_correct
from tonle.advise.explain_limits import capacity_section, floor_section, load_section
from tonle.advise.explain_model import fit_section, model_section
from tonle.advise.gpus import DataSheet
from tonle.advise.lines import Line, Section
from tonle.advise.option import Option, Settings
from tonle.bench.slo import duration_text


class OptionReport(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table of options."""

    name: str
    precision: str
    kv: str
    gpus: int
    fits: bool
    why_not: str
    kv_tokens: int
    users_mean: int
    users_p95: int
    max_num_seqs: int | None
    decode_one_ms: float | None
    tpot_ms: float | None
    ttft_floor_p95_ms: float | None
    gpu_s_per_request: float | None
    not_served_by_tonle: str  # why; "" if it is
    misses: list[str]


class GroupReport(msgspec.Struct, frozen=True, kw_only=True):
    length: str
    replicas: int
    gpus: int
    option: str
    settings: Settings


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    schema: str = "tonle.advice/1"
    tonle: str
    model: dict[str, Any]
    gpu: DataSheet
    workload: dict[str, Any]
    slo: list[str]
    options: list[OptionReport]
    chosen: str | None  # None: nothing fits
    groups: list[GroupReport]
    sections: list[Section]
    check: Check | None  # None: not simulated
    tried: list[Check]
    commands: list[str]
    settings_files: dict[str, str]

    @property
    def ok(self) -> bool:
        """Something fits, and the SLO holds as far as was checked."""
        return self.chosen is not None and (self.check is None or self.check.holds is not False)


def advise(question: Question, *, simulated: bool = True, on_check: Callable[[str], None] = lambda _: None) -> Advice:
    """Raises `ConfigError`. `on_check` is told what is simulated next."""
    question.validate()
    options = all_options(question)
    chosen = choose(question, options)
    sections = [model_section(question), fit_section(question, options, chosen)]
    if chosen is None:
        sections.append(_nothing(question, options))
        return _advice(question, options, None, None, sections, [])
    check, tried = None, []
    if simulated:
        corrected = check_and_correct(question, chosen, on_check)
        sizing, check, tried = corrected.sizing, corrected.check, corrected.tried
    else:
        sizing = size_together(question, chosen)
        if sizing.replicas > 1:
            sizing = size_by_length(question, chosen) or sizing
    sections += [
        floor_section(question, chosen if sizing.split else sizing.option),
        capacity_section(question, sizing),
        load_section(question, sizing),
    ]
    if check is not None:
        sections.append(Section(title="Checked by simulation", lines=[_check_line(question, check), *corrected.lines]))
    return _advice(question, options, sizing, check, sections, tried)


def _nothing(question: Question, options: list[Option]) -> Section:
    fitting = [option for option in options if option.fits]
    if fitting:  # --engine tonle
        reason = f"{fitting[0].name} would fit, but {fitting[0].not_served}. Use --engine vllm or auto."
    else:
        reason = (
            f"The closest, {options[-1].name}: {options[-1].why_not}. Use a GPU with more memory, more GPUs per replica, a lower "
            "precision, shorter requests, or a smaller model."
        )
    return Section(title="Result", lines=[Line(topic="sizing", verdict="nothing fits", reason=reason)])


def _check_line(question: Question, check: Check) -> Line:
    parts = [
        f"{check.requests_per_s:.3g} requests/s, {check.output_tokens_per_s:,.0f} tokens/s out",
        *(
            f"{name} {duration_text(value)}"
            for name, value in (
                ("TTFT p50", check.ttft_p50_ms),
                ("p95", check.ttft_p95_ms),
                ("TPOT", check.tpot_mean_ms),
                ("ITL p99", check.itl_p99_ms),
                ("E2EL p95", check.e2el_p95_ms),
            )
            if value is not None
        ),
        f"devices busy {check.busy_share:.0%}",
    ]
    if check.cost_per_million_output_tokens is not None:
        parts.append(f"{check.cost_per_million_output_tokens:.3g} per million output tokens")
    if check.preemptions:
        parts.append(f"{check.preemptions} preemptions")
    if check.failed:
        parts.append(f"{check.failed} of {check.requests} requests refused or failed")
    if check.holds is None:
        verdict = "simulated; there is no SLO to hold"
    elif check.holds:
        verdict = f"the SLO holds with {check.replicas} replica{'s' if check.replicas > 1 else ''}"
    else:
        verdict = f"the SLO does not hold with {check.replicas} replica{'s' if check.replicas > 1 else ''}"
    share = "" if check.good_share is None else f" {check.good_share:.1%} of requests keep all of its limits."
    return Line(
        topic="simulation",
        verdict=verdict,
        reason=("; ".join(check.bounds) + "." if check.bounds else ", ".join(parts) + ".") + share,
        arithmetic=(", ".join(parts) + "; " if check.bounds else "")
        + f"{check.requests:,} requests in {check.virtual_s:,.0f} virtual seconds after {check.warmup:,} that warm it "
        f"up, the real scheduler "
        "and routing, step times from the roofline",
    )


def _advice(
    question: Question,
    options: list[Option],
    sizing: Sizing | None,
    check: Check | None,
    sections: list[Section],
    tried: list[Check],
) -> Advice:
    shape, workload = question.shape, question.workload
    groups = sizing.groups if sizing is not None else ()
    return Advice(
        tonle=__version__,
        model={
            **msgspec.to_builtins(shape),
            "parameters": shape.parameters,
            "active_parameters": shape.active_parameters,
        },
        gpu=question.gpu,
        workload={
            "label": workload.label,
            "users": workload.users,
            "rate": workload.rate,
            "shared_prefix_tokens": workload.shared_prefix,
            "mean_prompt": workload.mean_prompt,
            "p95_prompt": workload.prompt_at(95),
            "mean_answer": workload.mean_answer,
            "longest": workload.longest,
            "held_mean": workload.held_mean,
            "price_per_gpu_hour": question.price_per_hour,
        },
        slo=[str(bound) for bound in question.slo.bounds],
        options=[_option_report(option) for option in options],
        chosen=sizing.option.name if sizing is not None else None,
        groups=[
            GroupReport(
                length=group.length,
                replicas=group.replicas,
                gpus=group.gpus,
                option=group.option.name,
                settings=group.settings,
            )
            for group in groups
        ],
        sections=sections,
        check=check,
        tried=tried,
        commands=command_lines(question, sizing) if sizing is not None else [],
        settings_files=settings_files(question, sizing) if sizing is not None else {},
    )


def _option_report(option: Option) -> OptionReport:
    capacity, settings = option.capacity, option.settings
    return OptionReport(
        name=option.name,
        precision=option.times.precision.name,
        kv=option.times.kv.name,
        gpus=option.times.gpus,
        fits=option.fits,
        why_not=option.why_not,
        kv_tokens=capacity.kv_tokens,
        users_mean=capacity.users_mean,
        users_p95=capacity.users_p95,
        max_num_seqs=settings.max_num_seqs if settings else None,
        decode_one_ms=option.decode_one_ms if option.fits else None,
        tpot_ms=option.tpot_ms if option.fits else None,
        ttft_floor_p95_ms=option.ttft_floor_ms.get("p95"),
        gpu_s_per_request=option.gpu_s if option.fits else None,
        not_served_by_tonle=option.not_served,
        misses=option.misses,
    )
