"""Compare Tonle with the peers that are installed, on this machine's CPU: same model, same prompts, same client.

    python -m benchmarks.cpu --quick                  # a first look
    python -m benchmarks.cpu --json cpu.json          # three repeats, all levels
    python -m benchmarks.cpu --peers llama-q8_0 --only 1,16

Does: start one server at a time, in turns, drive each with `tonle.bench`, print medians and ratios to the best peer.
Does not: install peers. README.md beside this file says how, and what each number means.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from benchmarks.levels import LEVELS, Level
from benchmarks.peers.files import PreparationFailedError
from benchmarks.peers.process import RunningServer, ServerFailedError, end_cleanly_when_terminated, free_port
from benchmarks.peers.servers import Missing, Places, Server, num_threads, ours, peers
from benchmarks.scores import Judgement, LevelRun, Run, Score, judge, score
from benchmarks.tables import print_scores, print_verdicts
from tonle.bench import run_bench
from tonle.errors import ConfigError

SCHEMA = "tonle.cpu/1"


@dataclass(frozen=True, slots=True)
class Plan:
    """What one call of this script does."""

    servers: list[Server]
    levels: list[Level]
    repeats: int
    quick: bool
    seed: int


class Comparison(msgspec.Struct, kw_only=True):
    """The saved file."""

    schema: str = SCHEMA
    started_at: str  # ISO 8601, UTC
    machine: dict[str, Any]
    settings: dict[str, Any]
    missing: dict[str, str]  # peers that were not measured, and why
    runs: list[Run]
    scores: dict[str, dict[str, Score]]
    verdicts: list[Judgement]


def main() -> int:
    end_cleanly_when_terminated()
    arguments = _parse()
    console = Console()
    plan, missing = _plan(arguments)
    for name, reason in missing.items():
        console.print(f"skipped {name}: {reason}", style="yellow", highlight=False, soft_wrap=True)
    comparison = Comparison(
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=_machine(),
        settings={"repeats": plan.repeats, "quick": plan.quick, "seed": plan.seed, "threads": num_threads()},
        missing=missing,
        runs=[],
        scores={},
        verdicts=[],
    )
    interrupted = False
    try:
        _run_all(plan, comparison, arguments.json, console)
    except KeyboardInterrupt:
        interrupted = True
    print_scores(comparison.runs, comparison.scores, console)
    print_verdicts(comparison.verdicts, console)
    return 130 if interrupted else 0


def _run_all(plan: Plan, comparison: Comparison, save_to: Path | None, console: Console) -> None:
    """Take turns; the order is turned around in every second repeat, so that no server always follows the same one."""
    with tempfile.TemporaryDirectory(prefix="tonle-cpu-") as logs:
        for repeat in range(plan.repeats):
            servers = list(plan.servers)
            for server in servers if repeat % 2 == 0 else reversed(servers):
                if server.name in comparison.missing:
                    continue
                try:
                    comparison.runs.append(_run_server(server, repeat, plan, Path(logs), console))
                except (ServerFailedError, PreparationFailedError, ConfigError) as error:
                    comparison.missing[server.name] = str(error)
                    console.print(f"{server.name}: {error}", style="red", highlight=False, markup=False)
                comparison.scores = {name: dict(row) for name, row in score(comparison.runs).items()}
                comparison.verdicts = judge(comparison.scores)
                if save_to is not None:
                    _save(comparison, save_to)


def _run_server(server: Server, repeat: int, plan: Plan, logs: Path, console: Console) -> Run:
    port = free_port()
    command = server.command(port)
    log = logs / f"{server.name}.{repeat}.log"
    with RunningServer(command, env=server.env, port=port, health=server.health, log=log) as running:
        ready_s = running.wait_ready()
        answer, first_answer_s = running.ask()
        _say(
            console,
            server,
            repeat,
            f"ready after {ready_s:.1f} s, first answer after {first_answer_s:.1f} s: {answer!r}",
        )
        levels = {}
        for level in plan.levels:
            levels[level.name] = measured = _run_level(running, level, plan)
            _say(console, server, repeat, _describe(level, measured))
    return Run(
        server=server.name,
        repeat=repeat,
        command=command,
        ready_s=ready_s,
        first_answer_s=first_answer_s,
        answer=answer,
        levels=levels,
    )


def _run_level(running: RunningServer, level: Level, plan: Plan) -> LevelRun:
    running.memory.mark()
    report = run_bench(level.options(running.url, seed=plan.seed, quick=plan.quick))
    if report.interrupted:
        raise KeyboardInterrupt
    measured = report.levels[0]
    return LevelRun(report=measured, peak_rss_bytes=running.memory.peak_bytes(), doubts=level.check(measured))


def _describe(level: Level, run: LevelRun) -> str:
    report = run.report
    ttft = f"{report.ttft_ms.p50:.0f}" if report.ttft_ms else "–"
    tpot = f"{report.tpot_ms.p50:.1f}" if report.tpot_ms else "–"
    numbers = (
        f"TTFT {ttft} ms, TPOT {tpot} ms, {report.output_tokens_per_s:.1f} tok/s, {run.peak_rss_bytes / 1e9:.2f} GB"
    )
    return "; ".join([f"{level.title}: {numbers}", *run.doubts])


def _say(console: Console, server: Server, repeat: int, text: str) -> None:
    console.print(f"[{repeat + 1}] {server.name:14} {text}", highlight=False, markup=False, soft_wrap=True)


def _save(comparison: Comparison, path: Path) -> None:
    """Whole or not at all, after every server: a long run that is stopped leaves what it has."""
    draft = path.with_name(f".{path.name}.part")
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(comparison), indent=2) + b"\n")
    draft.replace(path)


def _machine() -> dict[str, Any]:
    return {"cpu": _cpu_name(), "cores": num_threads(), "platform": platform.platform(), "load": os.getloadavg()}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _plan(arguments: argparse.Namespace) -> tuple[Plan, dict[str, str]]:
    """What to run, and the peers that are wanted and not here."""
    places = Places.find(arguments.llama_server, arguments.openvino_python, arguments.vllm_python)
    known = {peer.name: peer for peer in peers(places)}
    wanted = _chosen(arguments.peers, list(known), "--peers")
    level_names = _chosen(arguments.only, [level.name for level in LEVELS], "--only")
    found = [known[name] for name in wanted]
    own = {server.name: server for server in ours()}
    plan = Plan(
        servers=[
            *(own[name] for name in _chosen(arguments.ours, list(own), "--ours")),
            *(peer for peer in found if isinstance(peer, Server)),
        ],
        levels=[level for level in LEVELS if level.name in level_names],
        repeats=1 if arguments.quick else arguments.repeats,
        quick=arguments.quick,
        seed=arguments.seed,
    )
    return plan, {peer.name: peer.reason for peer in found if isinstance(peer, Missing)}


def _chosen(text: str, names: Sequence[str], flag: str) -> list[str]:
    """Read `all`, `none` or a list of names."""
    if text in ("all", "none"):
        return list(names) if text == "all" else []
    chosen = text.split(",")
    if unknown := [name for name in chosen if name not in names]:
        sys.exit(f"{flag} does not know {', '.join(unknown)}; it takes all, none or some of {', '.join(names)}")
    return chosen


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", default="all", metavar="NAMES", help="all (default), none, or names with commas")
    parser.add_argument("--ours", default="all", metavar="NAMES", help="the same for our own rows")
    parser.add_argument("--only", default="all", metavar="LEVELS", help="levels to run: some of 1,4,16,32,shared")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="times every server is started (default 3)")
    parser.add_argument("--quick", action="store_true", help="one repeat, fewer requests")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="draws other prompts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save everything that was measured")
    parser.add_argument("--llama-server", type=Path, metavar="PATH", help="or PEER_LLAMA_SERVER")
    parser.add_argument("--openvino-python", type=Path, metavar="PATH", help="or PEER_OPENVINO_PYTHON")
    parser.add_argument("--vllm-python", type=Path, metavar="PATH", help="or PEER_VLLM_PYTHON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
