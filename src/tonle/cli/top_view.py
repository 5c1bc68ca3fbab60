"""What `tonle top` draws: figures and how they went, to the width of the terminal.

Does: lay out. Does not: fetch, compute or wait.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tonle.cli import screen
from tonle.cli.top_figures import BackendFigures, Figures, Target

_BARS = "▁▂▃▄▅▆▇█"
_NONE = "–"
_LATENCY_COLUMNS = 40  # of the right half; the longest line is `Total 6.37 s of 2.00 s  recovering, 0.9×`
_LABEL_COLUMNS = 12
_VALUE_COLUMNS = 14
_TITLES = {"e2e": "Total", "ttft": "TTFT", "itl": "ITL"}


def draw(
    url: str, history: Sequence[Figures], *, columns: int, problem: str | None = None, hint: str = ""
) -> RenderableType:
    """`history` ends with what is true now. `problem`: why the last reading failed. `hint`: the last line."""
    now = history[-1]
    halves = Table.grid(expand=True, padding=(0, 0))
    halves.add_column(ratio=1)
    halves.add_column(width=_LATENCY_COLUMNS)
    spark = max(0, columns - _LATENCY_COLUMNS - _LABEL_COLUMNS - _VALUE_COLUMNS - 4)
    halves.add_row(_load(history, spark), _latencies(now))
    parts: list[RenderableType] = [_header(url, now, columns), Text(), halves]
    if now.backends:
        parts += [Text(), _backends(now.backends)]
    if problem is not None:
        parts += [Text(), Text(screen.one_line(problem), style="red")]
    if hint:
        parts += [Text(), Text(hint, style="dim")]
    return Group(*parts)


def _header(url: str, now: Figures, columns: int) -> RenderableType:
    line = Table.grid(expand=True)
    line.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    line.add_column(justify="right", no_wrap=True)
    models = f" · {screen.one_line(', '.join(now.models))}" if now.models else ""
    facts = [f"up {_span(now.uptime_s)}"] if now.uptime_s is not None else []
    if now.alerts_firing:
        facts.insert(0, f"[red]{screen.count(now.alerts_firing, 'alert')}[/red]")
    facts.append(time.strftime("%H:%M:%S"))
    title = f"[bold]{escape(now.kind)}[/bold] {escape(url)}[dim]{escape(models)}[/dim]"
    line.add_row(title, "  " + " · ".join(facts))
    return line


def _load(history: Sequence[Figures], spark: int) -> RenderableType:
    now = history[-1]
    table = Table.grid(padding=(0, 1))
    table.add_column(width=_LABEL_COLUMNS - 1, style="dim", no_wrap=True)
    table.add_column(width=_VALUE_COLUMNS, justify="right", no_wrap=True)
    table.add_column(no_wrap=True, style="cyan")

    def row(label: str, shown: str, values: list[float | None] | None = None, most: float | None = None) -> None:
        table.add_row(label, shown, sparkline(values, spark, most) if values is not None else "")

    row("Requests", _per_s(now.requests_per_s), [each.requests_per_s for each in history])
    row("Output", _per_s(now.output_tokens_per_s, "tok/s"), [each.output_tokens_per_s for each in history])
    row("Prompt", _per_s(now.prompt_tokens_per_s, "tok/s"), [each.prompt_tokens_per_s for each in history])
    row("Running", _count(now.running), [each.running for each in history])
    row("Waiting", _count(now.waiting), [each.waiting for each in history])
    row("Failed", _bad(now.failed_per_s), [each.failed_per_s for each in history])
    if now.refused_per_s is not None:
        row("Refused", _per_s(now.refused_per_s), [each.refused_per_s for each in history])
    if now.preemptions_per_s:
        row("Preempted", _bad(now.preemptions_per_s), [each.preemptions_per_s for each in history])
    if now.kv_usage is not None:
        row("KV cache", _percent(now.kv_usage), [each.kv_usage for each in history], 1.0)
    if now.prefix_hit_rate is not None:
        row("Prefix hits", _percent(now.prefix_hit_rate), [each.prefix_hit_rate for each in history], 1.0)
    if now.cache_hit_rate is not None:
        row("Cache hits", _percent(now.cache_hit_rate), [each.cache_hit_rate for each in history], 1.0)
    if now.gpu_utilization is not None:
        row("GPU", _percent(now.gpu_utilization), [each.gpu_utilization for each in history], 1.0)
    if now.gpu_memory_used is not None and now.gpu_memory_total:
        row("GPU memory", f"{now.gpu_memory_used / 1e9:.1f} / {now.gpu_memory_total / 1e9:.0f} GB")
    return table


def _latencies(now: Figures) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=10, style="dim", no_wrap=True)
    for _ in range(3):
        table.add_column(width=8, justify="right", no_wrap=True)
    table.add_row(f"last {now.latency_over_s:.0f} s", *(f"[dim]{name}[/dim]" for name in ("p50", "p95", "p99")))
    for each in now.latencies:
        table.add_row(each.name, *(_seconds(value) for value in (each.p50, each.p95, each.p99)))
    parts: list[RenderableType] = [table]
    if now.targets:
        parts += [Text(), Text("p95 targets and burn rate, last 5 min", style="dim"), *map(_target, now.targets)]
    return Group(*parts)


def _target(target: Target) -> Text:
    rate = f", {target.burn_rate:.1f}×"
    verdict, style = (f"met{rate}", "green") if target.meets else (f"missed{rate}", "red")
    if not target.meets and target.burn_rate <= 1:
        verdict, style = f"recovering{rate}", "yellow"  # it must hold for a minute
    if target.meets and target.p95_s is None:
        verdict, style = "no requests yet", "dim"
    elif target.meets and target.p95_s is not None and target.p95_s > target.target_s:
        verdict, style = "too few requests", "yellow"  # to judge
    value = f"{_seconds(target.p95_s)} of {_seconds(target.target_s)}"
    text = Text(f"{_TITLES.get(target.name, target.name):<6}{value:<18}", no_wrap=True)
    return text.append(verdict, style=style)


def _backends(backends: list[BackendFigures]) -> RenderableType:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    table.add_column("Backend", overflow="ellipsis", no_wrap=True, max_width=40)
    table.add_column("State", no_wrap=True)
    for name in ("Running", "Waiting", "Requests", "Failures"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in backends:
        style = {"up": "green", "draining": "yellow"}.get(each.state, "red")
        table.add_row(
            escape(screen.one_line(each.name)), f"[{style}]{each.state}[/{style}]", str(each.running),
            str(each.waiting), _per_s(each.requests_per_s), _bad(each.failures_per_s),
        )  # fmt: skip
    return table


def sparkline(values: Sequence[float | None], width: int, most: float | None = None) -> str:
    """The last `width` values; the highest bar is `most`, or the largest of them."""
    shown = values[-width:] if width > 0 else []
    top = most if most is not None else max((value for value in shown if value is not None), default=0.0)
    return "".join(
        " " if value is None else _BARS[min(len(_BARS) - 1, round(value / top * (len(_BARS) - 1)))] if top else _BARS[0]
        for value in shown
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def _per_s(value: float | None, unit: str = "/s") -> str:
    if value is None:
        return _NONE
    return f"{_number(value)}{'' if unit == '/s' else ' '}{unit}"


def _bad(value: float | None) -> str:
    shown = _per_s(value)
    return f"[red]{shown}[/red]" if value else shown


def _count(value: float | None) -> str:
    return _NONE if value is None else f"{value:,.0f}"


def _percent(value: float) -> str:
    return f"{value * 100:.0f} %"


def _seconds(value: float | None) -> str:
    if value is None:
        return _NONE
    if value < 0.01:
        return f"{value * 1e3:.1f} ms"
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.2f} s" if value < 10 else f"{value:.0f} s"


def _span(seconds: float) -> str:
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if days:
        return f"{days} d {hours % 24} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"
