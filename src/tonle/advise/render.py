"""An `Advice` for people: in the terminal, and as Markdown.

Does: tables and text. Does not: compute anything.
"""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tonle.advise.advice import Advice, OptionReport
from tonle.advise.lines import Line
from tonle.advise.units import count_text
from tonle.bench.slo import duration_text

_COLUMNS = ("option", "KV tokens", "users · p95", "batch", "TPOT 1 user", "full", "TTFT p95", "GPU s/req", "engine")
_LEGEND = (
    "users: requests that fit, of average and of p95 size · batch: max_num_seqs · TPOT: floor of one user, and in a full batch "
    "with prompts · TTFT p95: of an idle replica · GPU s/req: GPU seconds per request in a full batch"
)


def headline(advice: Advice) -> str:
    """One sentence: what to run."""
    if advice.chosen is None:
        return f"Nothing fits: {advice.model['name']} on {advice.gpu.name} for {advice.workload['label']}."
    parts = []
    for group in advice.groups:
        kind = "" if group.length == "any" else f" for {group.length} prompts"
        parts.append(f"{group.replicas} replica{'s' if group.replicas > 1 else ''} of {group.option}{kind}")
    gpus = sum(group.gpus for group in advice.groups)
    price = advice.workload["price_per_gpu_hour"]
    parts[-1] += f": {gpus} GPU{'s' if gpus > 1 else ''}" + (f", {price * gpus:.4g} per hour" if price else "")
    held = ""
    if advice.check is not None and advice.check.holds is not None:
        held = "; the SLO holds in simulation" if advice.check.holds else "; the SLO does NOT hold in simulation"
    return f"{' and '.join(parts)}{held}."


def _question(advice: Advice) -> str:
    workload = advice.workload
    load = "no load given"
    if workload["users"] is not None:
        load = f"{workload['users']:,} users"
    elif workload["rate"] is not None:
        load = f"{workload['rate']:g} requests/s"
    slo = f"; SLO {', '.join(advice.slo)}" if advice.slo else ""
    return f"{advice.model['name']} on {advice.gpu.name}, {workload['label']}, {load}{slo}"


def _row(option: OptionReport) -> list[str]:
    if not option.fits:
        return [_short_name(option), option.why_not]
    assert option.decode_one_ms is not None
    assert option.tpot_ms is not None
    assert option.ttft_floor_p95_ms is not None
    return [
        _short_name(option),
        count_text(option.kv_tokens),
        f"{option.users_mean} · {option.users_p95}",
        str(option.max_num_seqs),
        duration_text(option.decode_one_ms),
        duration_text(option.tpot_ms),
        duration_text(option.ttft_floor_p95_ms),
        f"{option.gpu_s_per_request:.3g}",
        ("vLLM" if option.not_served_by_tonle else "Tonle") + (", misses the SLO" if option.misses else ""),
    ]


def _short_name(option: OptionReport) -> str:
    return f"{option.precision} × {option.gpus}" + (", fp8 KV" if option.kv == "fp8" else "")


def print_advice(advice: Advice, console: Console) -> None:
    console.print(Text(_question(advice), style="bold"))
    console.print(Text(headline(advice), style="bold green" if advice.ok else "bold red"))
    console.print()
    _print_options(advice, console)
    for section in advice.sections:
        console.print()
        console.print(Text(section.title, style="bold cyan"))
        for line in section.lines:
            _print_line(line, console)
    if advice.commands:
        console.print()
        console.print(Text("Commands", style="bold cyan"))
        for command in advice.commands:
            console.print(Text(f"  {command}", style="dim" if command.startswith("#") else ""), soft_wrap=True)
        for name, text in advice.settings_files.items():
            console.print()
            console.print(Text(f"  # {name}", style="dim"))
            for row in text.splitlines():
                console.print(Text(f"  {row}"), soft_wrap=True)


def _print_options(advice: Advice, console: Console) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for number, column in enumerate(_COLUMNS):
        table.add_column(column, justify="left" if number in (0, len(_COLUMNS) - 1) else "right", no_wrap=number == 0)
    out = []
    for option in advice.options:
        if option.fits:
            style = "bold" if option.name == advice.chosen else ""
            table.add_row(*_row(option), style=style)
        else:
            out.append(option)
    if table.row_count:
        console.print(table)
        console.print(Text(_LEGEND, style="dim"))
    for option in out:
        console.print(Text(f"{_short_name(option)}: does not fit: {option.why_not}", style="dim"))


def _print_line(line: Line, console: Console) -> None:
    text = Text(f"{line.topic}: ", style="dim") + Text(line.verdict, style="bold")
    console.print(Padding(text, (0, 0, 0, 2), expand=False))
    console.print(Padding(Text(line.reason), (0, 0, 0, 4), expand=False))
    if line.arithmetic:
        console.print(Padding(Text(line.arithmetic, style="dim"), (0, 0, 0, 4), expand=False))


def markdown(advice: Advice) -> str:
    lines = [f"# Sizing: {_question(advice)}", "", f"**{headline(advice)}**", "", "## Options", ""]
    lines += [f"| {' | '.join(_COLUMNS)} |", "|" + "---|" * len(_COLUMNS)]
    for option in advice.options:
        row = _row(option)
        if not option.fits:
            row = [_short_name(option), f"does not fit: {option.why_not}", *[""] * (len(_COLUMNS) - 2)]
        lines.append(f"| {' | '.join(row)} |")
    lines += ["", _LEGEND + "."]
    for section in advice.sections:
        lines += ["", f"## {section.title}", ""]
        for line in section.lines:
            arithmetic = f" *{line.arithmetic}*" if line.arithmetic else ""
            lines.append(f"- {line.topic}: **{line.verdict}**. {line.reason}{arithmetic}")
    if advice.commands:
        lines += ["", "## Commands", "", "```", *advice.commands, "```"]
        for name, text in advice.settings_files.items():
            lines += ["", f"`{name}`:", "", "```yaml", *text.splitlines(), "```"]
    return "\n".join(lines) + "\n"
