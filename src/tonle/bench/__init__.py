"""A load generator for any OpenAI-compatible server, and its report; and scenarios that ask questions with and without a cache.

Does: draw prompts, send them closed or open loop, time every streamed chunk, summarize, print, save.
Does not: import torch, the engine or the models; know what kind of server answers.
Runs: in the caller's thread, one event loop.

    report = run_bench(BenchOptions(url="http://127.0.0.1:8000", concurrency=(1, 16)))
    report.levels[1].output_tokens_per_s, report.levels[1].ttft_ms.p99

`Bench(options).run()` is the same for callers with an event loop. A `Watch` is told about progress. Printing
(`tables.print_report`) and `save_report` are separate, so that programs can use the data alone.

    report = run_scenarios("http://127.0.0.1:8000")     # or an engine: any object with async generate_async
    report.scenarios[0].latency_s.p95, report.ok

`scenario_blocks.print_scenarios` prints it.
"""

from __future__ import annotations

from tonle.bench.arrivals import arrival_times
from tonle.bench.load import Load
from tonle.bench.measure import FailureGroup, LevelReport, RequestRow, Sample, Spread
from tonle.bench.options import BenchOptions, Span
from tonle.bench.report import BenchReport, load_report, save_report
from tonle.bench.run import Bench, Watch, run_bench
from tonle.bench.scenario_report import ScenarioReport, ScenarioResult, load_scenario_report
from tonle.bench.scenarios import ScenarioOptions, Scenarios, ScenarioWatch, run_scenarios

__all__ = [
    "Bench",
    "BenchOptions",
    "BenchReport",
    "FailureGroup",
    "LevelReport",
    "Load",
    "RequestRow",
    "Sample",
    "ScenarioOptions",
    "ScenarioReport",
    "ScenarioResult",
    "ScenarioWatch",
    "Scenarios",
    "Span",
    "Spread",
    "Watch",
    "arrival_times",
    "load_report",
    "load_scenario_report",
    "run_bench",
    "run_scenarios",
    "save_report",
]
