"""Lines below a level's throughput: the SLO and goodput, warm-up, the client, GPUs; and where a sweep ended.

Does: put these into words for a terminal. Does not: print (`tables.py`).
"""

from __future__ import annotations

from tonle.bench.measure import GpuReport, LevelReport
from tonle.bench.slo import MOST_FAILED, duration_text
from tonle.bench.sweep import Saturation

GIB = 2**30


def level_lines(level: LevelReport) -> list[str]:
    lines = [f"not counted: {level.warmup} warm-up requests"] if level.warmup else []
    if level.graphemes_per_s is not None:
        each = "" if level.ms_per_grapheme is None else f", {duration_text(level.ms_per_grapheme.p50)} each (p50)"
        lines.append(f"{level.graphemes_per_s:.1f} letters/s (grapheme clusters){each}")
    if level.clients:
        lines.append(_client_line(level))
    lines += [_gpu_line(gpu) for gpu in level.gpus]
    return lines


def slo_lines(level: LevelReport) -> list[str]:
    """What came of each bound, then goodput; none without an SLO."""
    if not level.slo:
        return []
    lines = []
    for result in level.slo:
        missed = "" if result.holds else ", missed"
        lines.append(f"{'✓' if result.holds else '✗'} {result.bound}: {result.value_text}{missed}")
    if not level.holds_slo and all(result.holds for result in level.slo):
        share = f"{MOST_FAILED:.0%}"
        lines.append(f"✗ {level.failed} of {level.requests} requests failed, more than {share}: missed")
    if level.goodput_per_s is not None and level.good_share is not None:
        lines.append(f"goodput {level.goodput_per_s:.2f} req/s: {level.good_share:.1%} of requests keep every limit")
    return lines


def saturation_line(saturation: Saturation) -> str:
    """The result of a sweep in one sentence."""
    unit = "requests per second" if saturation.by == "rate" else "users"
    if saturation.load is None:
        return f"saturation: not found. {saturation.why[0].upper()}{saturation.why[1:]}"
    speed = f"{saturation.output_tokens_per_s:.1f} output tok/s"
    if saturation.throughput is not None:
        speed = f"{saturation.throughput:.1f} {saturation.throughput_unit}"
    return f"saturation: {saturation.load:g} {unit} ({saturation.requests_per_s:.2f} req/s, {speed}); {saturation.why}"


def _client_line(level: LevelReport) -> str:
    shares = ", ".join(f"{client.cpu_share:.0%}" for client in level.clients)
    late_ms = max(client.late_p99_ms for client in level.clients)
    many = f" in {len(level.clients)} processes" if len(level.clients) > 1 else ""
    return f"client{many}: {shares} of a core, timers {duration_text(late_ms)} late (p99)"


def _gpu_line(gpu: GpuReport) -> str:
    parts = []
    if gpu.utilization is not None:
        parts.append(f"{gpu.utilization:.0%} busy")
    if gpu.memory_used is not None:
        of = "" if gpu.memory_total is None else f" of {gpu.memory_total / GIB:.1f}"
        parts.append(f"{gpu.memory_used / GIB:.1f}{of} GiB")
    if gpu.power_w is not None:
        parts.append(f"{gpu.power_w:.0f} W")
    return f"GPU {gpu.name}: {', '.join(parts) or 'no readings'}"
