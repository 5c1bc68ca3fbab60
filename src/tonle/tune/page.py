"""`render_page`: the result as one HTML file that opens without a network.

Does: put text, picture and tables together. Does not: compute.
"""

from __future__ import annotations

from tonle.bench.html.elements import Content, Html, element, joined, table
from tonle.bench.numbers import bytes_text, change_text, clock_text, ms_text, rate_text, share_text
from tonle.tune.objective import Goal, Outcome
from tonle.tune.picture import front_picture, legend
from tonle.tune.results import TuneResult, gateway_yaml, headline, how_known, short_reason
from tonle.tune.space import describe, notes_of_answers

_STYLE = """
:root { color-scheme: light dark; --text: #1c2430; --faint: #69748a; --line: #dde2ea; --page: #fff;
  --good: #13804a; --bad: #c2352b; --best: #2458c5; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e8ef; --faint: #97a3b8; --line: #333c4a; --page: #14181f;
  --good: #46c283; --bad: #ff7a6e; --best: #7aa5ff; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page); max-width: 60rem; margin: 0 auto;
  padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.5rem; line-height: 1.25; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
.sub, .legend, caption { color: var(--faint); font-size: .9rem; } .lead { font-size: 1.1rem; }
svg.front { width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: var(--faint); }
.grid line { stroke: var(--line); } .limit line { stroke: var(--bad); stroke-dasharray: 5 4; } .limit text { fill: var(--bad); }
.best { fill: none; stroke: var(--best); stroke-width: 1.6; } circle { fill: var(--faint); }
circle.simulated { opacity: .45; } circle.holds { fill: var(--good); } circle.misses { fill: var(--bad); }
circle.measured { stroke: var(--page); stroke-width: 1.5; } .named text { fill: var(--text); font-weight: 600; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .92rem; min-width: 100%; }
caption { text-align: left; }
th, td { padding: .35rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child { text-align: left; font-weight: 500; white-space: normal; } thead th { color: var(--faint); font-weight: 500; }
pre { overflow-x: auto; padding: .8rem 1rem; border: 1px solid var(--line); border-radius: 6px; font-size: .88rem; }
tr.chosen th { font-weight: 700; }
"""


def render_page(result: TuneResult) -> str:
    """An HTML document."""
    model = result.inputs.model or "the default model"
    title = f"Settings for {model}"
    sections: list[Content] = [
        element("p", headline(result), class_="lead"),
        element("p", element("strong", result.verdict.sentence)) if result.verdict is not None else None,
        _section(
            "What settings give, against latency",
            front_picture(result),
            element("p", "; ".join(legend(result)), class_="legend"),
        ),
        _section("Confirmation", _confirmation(result)),
        _section("Measured in the search", _candidates(result)),
        _section("Safe load", _safe(result)),
        _section("How the simulation did", _correction(result)),
        _section("Notes", element("ul", *(element("li", note) for note in _notes(result)))) if _notes(result) else None,
    ]
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content="default-src 'none'; style-src 'unsafe-inline'"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", Html(_STYLE)),
    )
    sub = f"{result.goal} · {result.inputs.load} · {clock_text(result.spent_s)} spent · Tonle {result.tonle}"
    body = element("body", element("h1", title), element("p", sub, class_="sub"), joined(sections))
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _section(title: str, *content: Content) -> Html:
    """Nothing, if there is nothing in it."""
    inner = joined(content)
    return element("section", element("h2", title), inner) if inner else Html("")


def _confirmation(result: TuneResult) -> Html:
    verdict = result.verdict
    if verdict is None:
        return Html("")
    rows = []
    for change in verdict.changes:
        text = ms_text if change.unit == "ms" else rate_text
        between = "–" if change.low is None else f"{change_text(change.low)} to {change_text(change.high)}"
        name = change.metric + (", ms" if change.unit == "ms" else "")
        rows.append([name, text(change.a), text(change.b), change_text(change.change), between])
    tuned = "tuned" if verdict.is_better else "best other"
    return joined([
        table(["", "default", tuned, "change", "95 % interval"], rows, caption="interleaved, with new prompts"),
        element("p", verdict.method, class_="legend"),
    ])  # fmt: skip


def _candidates(result: TuneResult) -> Html:
    if not result.candidates:
        return Html("")
    goal = result.goal
    has_gpus = any(
        each.measured.gpu_use is not None or each.measured.gpu_memory is not None for each in result.candidates
    )
    heads = [
        "settings",
        "runs",
        "output tok/s",
        *(["good req/s"] if goal.slo else []),
        *_bound_names(goal),
        *(["GPU busy", "GPU memory"] if has_gpus else []),
        "simulated tok/s",
    ]
    rows: list[list[Content]] = []
    for each in result.candidates:
        simulated = "–" if each.simulated is None else rate_text(each.simulated.output_tokens_per_s)
        rows.append([
            describe(each.settings), str(each.measured.runs), rate_text(each.measured.output_tokens_per_s),
            *([rate_text(each.measured.goodput_per_s)] if goal.slo else []), *_bound_values(goal, each.measured),
            *([share_text(each.measured.gpu_use), bytes_text(each.measured.gpu_memory)] if has_gpus else []), simulated,
        ])  # fmt: skip
    for key, reason in result.failed.items():
        rows.append([f"{key or 'default'}: {short_reason(reason)}", "0", *["–"] * (len(heads) - 2)])
    return table(heads, rows)


def _bound_names(goal: Goal) -> list[str]:
    if goal.slo:
        return [f"{bound.metric.upper()} p{bound.percent:g}, ms" for bound in goal.slo.bounds]
    return ["TTFT p95, ms", "ITL p99, ms"]


def _bound_values(goal: Goal, outcome: Outcome) -> list[Content]:
    if not goal.slo:
        spreads = ((outcome.ttft_ms, "p95"), (outcome.itl_ms, "p99"))
        return [ms_text(None if spread is None else getattr(spread, name)) for spread, name in spreads]
    return [f"{ms_text(each.value_ms)} {'✓' if each.holds else '✗'}" for each in outcome.bounds]


def _safe(result: TuneResult) -> Html:
    safe = result.safe
    if safe is None:
        return Html("")
    if safe.value is None:
        return element(
            "p", "None: the SLO holds at no load that was tried, or requests come faster than they are answered."
        )
    parts: list[Content] = [element("p", f"{safe.text}{how_known(safe)}.")]
    if result.limits is not None:
        parts.append(element("pre", gateway_yaml(result)))
    return joined(parts)


def _correction(result: TuneResult) -> Html:
    correction = result.correction
    if correction is None or correction.error_after is None:
        return Html("")
    return element(
        "p",
        f"{len(result.trials)} settings were simulated. Measurements corrected the step times: {correction}. "
        f"Throughput, TTFT and TPOT then deviate by {correction.error_after:.0%} on average from what was measured, "
        f"{correction.error_before or 0:.0%} before.",
    )


def _notes(result: TuneResult) -> list[str]:
    return [*result.notes, *notes_of_answers(result.settings)]
