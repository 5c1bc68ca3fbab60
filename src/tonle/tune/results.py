"""`TuneResult`: what a tuning found, and the files that it leaves: best.yaml, gateway.yaml, result.json, summary.md.

Does: hold and write. Does not: find anything, or draw (`picture.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from tonle.bench.report import save_report
from tonle.bench.slo import duration_text
from tonle.tune.correction import Correction
from tonle.tune.objective import Goal, Outcome, one_line
from tonle.tune.safe_load import GatewayLimits, SafeLoad
from tonle.tune.space import describe, notes_of_answers
from tonle.tune.state import Inputs, Trial
from tonle.tune.verdict import Verdict

SCHEMA = "tonle.tune.result/1"


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that were measured in the search."""

    settings: dict[str, Any]
    measured: Outcome
    simulated: Outcome | None  # with corrected times, if they were corrected


class TuneResult(msgspec.Struct, frozen=True, kw_only=True):
    schema: str = SCHEMA
    tonle: str
    inputs: Inputs
    goal: Goal
    settings: dict[str, Any]  # the best; {}: the default
    compared: dict[str, Any] | None  # what the default was confirmed against: the best other settings of the search
    evidence: str  # in words: confirmed, measured in the search only, simulated only, or none
    verdict: Verdict | None  # None: no confirmation
    candidates: list[Candidate]
    trials: list[Trial]  # simulated
    correction: Correction | None
    safe: SafeLoad | None
    limits: GatewayLimits | None
    failed: dict[str, str]
    notes: list[str]
    command: list[str] | None  # vLLM and others: the command line that starts the best
    spent_s: float
    interrupted: bool


def headline(result: TuneResult) -> str:
    """The first sentence for people."""
    if result.verdict is not None and result.verdict.is_better:
        return f"The best settings found are {describe(result.settings)}: {result.verdict.reason}."
    if result.verdict is not None:
        others = describe(result.compared or {})
        return (
            f"Keep the default settings. The best others found, {others}, are no improvement: {result.verdict.reason}."
        )
    if result.settings:
        return f"The best settings so far are {describe(result.settings)} ({result.evidence})."
    return f"Nothing better than the default settings was found so far ({result.evidence})."


def write_results(result: TuneResult, folder: Path, config: dict[str, Any]) -> list[Path]:
    """All files but the picture. `config`: what the user's settings file says; the best settings come on top."""
    written = []
    if result.inputs.server == "tonle":
        written.append(_write(folder / "best.yaml", _best_yaml(result, config), mode=0o600))  # it may hold keys
    elif result.command is not None:
        import shlex

        written.append(
            _write(folder / "best.sh", f"#!/bin/sh\n# {headline(result)}\nexec {shlex.join(result.command)}\n")
        )
    if result.limits is not None:
        written.append(_write(folder / "gateway.yaml", gateway_yaml(result)))
    else:
        (folder / "gateway.yaml").unlink(missing_ok=True)  # of an earlier run of the command, for other settings
    save_report(result, folder / "result.json")
    written.append(folder / "result.json")
    written.append(_write(folder / "summary.md", summary(result)))
    return written


def _write(path: Path, text: str, *, mode: int = 0o644) -> Path:
    draft = path.with_name(f".{path.name}.part")
    draft.touch(mode)
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
    return path


def _best_yaml(result: TuneResult, config: dict[str, Any]) -> str:
    import yaml

    model = {"model": result.inputs.model} if result.inputs.model else {}
    settings = {**model, **config, **model, **result.settings}  # the model first, and the one that was measured
    lines = [f"# {headline(result)}", "# Start the server with: tonle serve --config best.yaml"]
    if result.verdict is not None:
        lines.append(f"# {result.verdict.sentence}")
    lines += [f"# {note}." for note in notes_of_answers(result.settings)]
    body = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True) if settings else ""
    return "\n".join(lines) + "\n" + body


def gateway_yaml(result: TuneResult) -> str:
    """Limits for a gateway in front of one such server."""
    limits, safe = result.limits, result.safe
    assert limits is not None and safe is not None
    best = "with the settings of best.yaml" if result.inputs.server == "tonle" else "started by best.sh"
    return f"""\
# For `tonle gateway --config gateway.yaml` in front of a server {best}.
# The safe load is {safe.text}{how_known(safe)}.
backends:
  - url: http://127.0.0.1:8000

max_concurrent: {limits.max_concurrent}  # per backend
# A request that waits in the queue has {duration_text(limits.wait_s * 1e3)} until its first token would be too late.
max_queued: {limits.max_queued}
max_queued_tokens: {limits.max_queued_tokens}

# One such server answers {limits.requests_per_minute} requests, {limits.tokens_per_minute} tokens with prompts, per minute.
# Limits of single keys come out of that, for example a tenth each:
# requests_per_minute: {max(1, limits.requests_per_minute // 10)}
# tokens_per_minute: {max(1, limits.tokens_per_minute // 10)}
"""


def how_known(safe: SafeLoad) -> str:
    """After the load's text."""
    if safe.confirmed or safe.source == "measured":
        return ", measured"
    if safe.stepped_down:
        return ", simulated, after a measurement at a higher load was too much"
    return ", simulated, and not confirmed by a measurement"


def short_reason(reason: str) -> str:
    """Why settings could not be measured, in one line. Of a server that did not start: how it ended, and its last words."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    if len(lines) < 3:  # else: the command, what happened, the log's last lines, where the log is
        return " ".join(lines) or "for no known reason"
    what = lines[1].partition(";")[0]
    return what if len(lines) == 3 else f"{what}: {lines[-2]}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def summary(result: TuneResult) -> str:
    """Markdown."""
    goal = result.goal
    lines = [
        f"# Settings for {result.inputs.model or 'the default model'}",
        "",
        headline(result),
        "",
        *([f"**{result.verdict.sentence}**", ""] if result.verdict is not None else []),
        f"- Goal: {goal}",
        f"- Load: {result.inputs.load}",
        f"- Safe load: {result.safe.text}{how_known(result.safe)}"
        if result.safe is not None
        else "- Safe load: not searched",
        f"- Simulated: {len(result.trials)} settings; measured: {len(result.candidates)}",
    ]
    if result.correction is not None and result.correction.error_after is not None:
        lines.append(
            f"- Step times corrected by measurements: {result.correction}; throughput, TTFT and TPOT deviate by "
            f"{result.correction.error_after:.0%} on average, {result.correction.error_before or 0:.0%} before"
        )
    lines += [f"- {note}" for note in (*result.notes, *notes_of_answers(result.settings))]
    lines += ["", "| settings | runs | measured | simulated |", "|---|---|---|---|"]
    for each in result.candidates:
        simulated = "–" if each.simulated is None else one_line(each.simulated, goal)
        lines.append(
            f"| {describe(each.settings)} | {each.measured.runs} | {one_line(each.measured, goal)} | {simulated} |"
        )
    for key, reason in result.failed.items():
        lines.append(f"| {key or 'default'} | 0 | could not be measured: {_cell(short_reason(reason))} | – |")
    if result.verdict is not None:
        lines += ["", f"Confirmation: {result.verdict.method}"]
    return "\n".join(lines) + "\n"
