"""`python -m tests.chaos`: run the faults, print the table. Exit status 1 if a row is red."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos import faults_of_attackers, faults_of_callers, faults_of_machines, faults_of_processes
from tests.chaos.disks import own_mounts
from tests.chaos.rows import Row, markdown, write_table
from tests.chaos.stack import Options, Stack
from tests.chaos.trial import Fault, run_fault
from tonle.config.cache_dir import cache_dir
from tonle.models import default_model as pinned

FAULTS: list[Fault] = [
    *faults_of_processes.FAULTS, *faults_of_attackers.FAULTS, *faults_of_callers.FAULTS, *faults_of_machines.FAULTS,
]  # fmt: skip
SHORT_FAULTS = [*(fault for fault in FAULTS if fault.short), faults_of_attackers.SHORT_FLOOD]
CROWD = "1000-streams"


def main() -> int:
    words = argparse.ArgumentParser(
        prog="python -m tests.chaos", description="Faults under load, and what becomes of it."
    )
    names = [*(fault.name for fault in FAULTS), CROWD]
    words.add_argument(
        "--fault", action="append", choices=names, metavar="NAME", help=f"only this one: {', '.join(names)}"
    )
    words.add_argument("--seconds", type=float, default=3.0, metavar="N", help="load before and after each fault (3)")
    words.add_argument("--short", action="store_true", help="a tiny model and the most telling faults")
    words.add_argument("--table", type=Path, metavar="FILE", help="write the table into this page or file, too")
    words.add_argument("--logs", type=Path, metavar="DIR", help="keep the logs and trails of all processes there")
    flags = words.parse_args()
    own_mounts()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is stopped
    wanted = [
        fault for fault in (SHORT_FAULTS if flags.short else FAULTS) if not flags.fault or fault.name in flags.fault
    ]
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tonle-chaos-", ignore_cleanup_errors=True) as temporary:
        folder = temporary if flags.logs is None else flags.logs
        rows = _run(Path(folder), wanted, flags.seconds, short=flags.short, crowd=_wants_crowd(flags))
    num_red = sum(bool(row.red) for row in rows)
    summary = f"{len(rows)} rows, {num_red} red, {time.monotonic() - began_s:.0f} s on {os.cpu_count()} cores."
    table = f"{markdown(rows)}\n\n{summary}"
    print(f"\n{table}")
    if flags.table is not None:
        write_table(flags.table, table)
    return int(any(row.red for row in rows))


def _wants_crowd(flags: argparse.Namespace) -> bool:
    return CROWD in flags.fault if flags.fault else not flags.short


def _run(folder: Path, faults: list[Fault], seconds: float, *, short: bool, crowd: bool) -> list[Row]:
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    if faults:
        options = short_options(folder) if short else Options(folder, model=_default_model(folder), seconds=seconds)
        print("starting two servers and a gateway, and warming them up", flush=True)
        with Stack(options) as stack:
            for number, fault in enumerate(faults, 1):
                print(f"{number}/{len(faults) + 2 * crowd} {fault.name}", flush=True)
                rows.append(run_fault(stack, fault))
                print(rows[-1].line(), flush=True)
    if crowd:
        from tests.chaos.crowd import crowd_rows

        print("a thousand streams at the same time, to a server and through a gateway", flush=True)
        for row in crowd_rows(folder, tiny_model(folder)):
            rows.append(row)
            print(row.fault + "\n" + row.line(), flush=True)
    return rows


def _default_model(folder: Path) -> Path:
    """Its file; where it could not be fetched, a tiny random model, for which all rules hold as well."""
    path = pinned.path(cache_dir())
    if pinned.is_present(path):
        return path
    print(
        f"the default model is not at {path} (`tonle pull` fetches it): a tiny random model takes its place", flush=True
    )
    return tiny_model(folder)


def short_options(folder: Path) -> Options:
    """Too short for memory to be judged: it grows with the first requests of a process."""
    return Options(folder, model=tiny_model(folder), frontends=1, seconds=0.5, warm_up=0, judges_memory=False)


def tiny_model(folder: Path) -> Path:
    from tests.fakes.checkpoints import save_folder

    path = folder / "tiny"
    if not path.exists():
        save_folder("llama", path)
    return path


if __name__ == "__main__":
    sys.exit(main())
