"""`render_page`: the whole report as one HTML document.

Does: put sections together, with a content policy that lets nothing run or load but the page's own style and script.
Does not: compute (`series.py`) or draw (`charts.py`); the sections are in `tables.py` and `figures.py`.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files

from tonle.bench.html.elements import Content, Html, element, joined, script_json
from tonle.bench.html.figures import chart_data, distributions, timelines, tradeoffs
from tonle.bench.html.tables import (
    changed_answers,
    conditions,
    failures,
    gpus,
    headlines,
    notes,
    slo_results,
    slowest_requests,
    summaries,
)
from tonle.bench.kinds.metrics import KindMetrics
from tonle.bench.report import Run, one_kind

GOODPUT = ("Goodput", "answered requests per second that each keep every bound of the SLO")


def render_page(runs: Sequence[Run], title: str | None = None) -> str:
    """An HTML document of these runs. Raises `ConfigError` if they are of different kinds of requests."""
    one_kind(runs, "put on one page; make a page of each kind")
    title = title or _title(runs)
    style, script = _packaged("style.css"), _packaged("script.js")
    sections = [
        _section("Summary", headlines(runs), summaries(runs)),
        _section("Service level objectives", slo_results(runs)),
        _section("Latency distributions", distributions(runs)),
        _section("Throughput against latency", tradeoffs(runs)),
        _section("Timeline and requests", timelines(runs)),
        _section("Slowest requests", slowest_requests(runs)),
        _section("Changed answers", changed_answers(runs)),
        _section("Failures", failures(runs)),
        _section("GPU", gpus(runs)),
        _section("Notes", notes(runs)),
        _section("Conditions", conditions(runs)),
        _section("Definitions", _definitions(runs[0].report.metrics)),
    ]
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_policy(style, script)),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Html(style)),
    )
    body = element(
        "body",
        element("header", element("h1", title), element("p", _subtitle(runs), class_="sub")),
        element("main", *sections),
        element("script", script_json(chart_data(runs)), type="application/json", id="data"),
        element("script", Html(script)),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _section(title: str, *content: Content) -> Html:
    """Nothing, if there is nothing in it."""
    inner = joined(content)
    return element("section", element("h2", title), inner) if inner else Html("")


def _policy(style: str, script: str) -> str:
    return f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'; form-action 'none'"


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _packaged(name: str) -> str:
    return files("tonle.bench.html").joinpath(name).read_text("utf-8")


def _title(runs: Sequence[Run]) -> str:
    models = list(dict.fromkeys(run.report.model or "unknown model" for run in runs))
    return f"Benchmark of {', '.join(models)}"


def _subtitle(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        report = runs[0].report
        where = "simulated" if report.kind == "simulated" else report.url
        return f"{where} · {_moment(report.started_at)} · {len(report.levels)} level{'s' * (len(report.levels) != 1)}"
    return f"{len(runs)} runs: {', '.join(run.name for run in runs)}"


def _moment(text: str) -> str:
    """`2025-01-31T09:30:00+00:00` as `2025-01-31 09:30:00 UTC`."""
    return text.replace("T", " ").replace("+00:00", " UTC")


def _definitions(metrics: KindMetrics) -> Html:
    named = [*((quantity.name, quantity.meaning) for quantity in metrics.quantities), GOODPUT]
    terms = [(element("dt", name), element("dd", text)) for name, text in named]
    return joined([
        element("dl", terms),
        element("p", "Percentiles interpolate linearly. Failed requests are in no latency and no throughput.", class_="quiet"),
    ])  # fmt: skip
