"""A load generator for any OpenAI-compatible server, and its report.

Does: draw prompts, send them closed or open loop, time every streamed chunk, summarize, print, save.
Does not: import torch, the engine or the models; know what kind of server answers.
Runs: in the caller's thread, one event loop.

    report = run_bench(BenchOptions(url="http://127.0.0.1:8000", concurrency=(1, 16)))
    report.levels[1].output_tokens_per_s, report.levels[1].ttft_ms.p99

`Bench(options).run()` is the same for callers with an event loop. A `Watch` is told about progress. Printing
(`tables.print_report`) and `save_report` are separate, so that programs can use the data alone.
"""

from __future__ import annotations

from tonle.bench.measure import FailureGroup, LevelReport, RequestRow, Sample, Spread
from tonle.bench.options import BenchOptions, Load, Span
from tonle.bench.report import BenchReport, load_report, save_report
from tonle.bench.run import Bench, Watch, run_bench

__all__ = [
    "Bench",
    "BenchOptions",
    "BenchReport",
    "FailureGroup",
    "LevelReport",
    "Load",
    "RequestRow",
    "Sample",
    "Span",
    "Spread",
    "Watch",
    "load_report",
    "run_bench",
    "save_report",
]
