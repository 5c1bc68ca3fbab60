"""`python -m tests.fuzz --cases 20000`: the long form, with a table. Exit status 1 if a target failed."""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import traceback
from pathlib import Path

from tests.fuzz.target import Outcome, Target, run_target
from tests.fuzz.test_fuzz import TARGETS


def main() -> int:
    options = _options()
    logging.disable(logging.CRITICAL)  # each refusal would be a line
    targets = [target for target in TARGETS if options.only in target.name]
    total = sum(target.weight for target in targets)
    print(f"{'target':32} {'cases':>6} {'slowest':>9}  {'verdict':8} outcomes", flush=True)
    failed = []
    for target in targets:
        num_cases = max(1, options.cases * target.weight // total)
        with tempfile.TemporaryDirectory() as folder:
            outcome = run_target(target, num_cases, chosen_seed=options.seed, folder=Path(folder))
        print(_line(target, outcome), flush=True)
        if outcome.failure is not None:
            failed.append((target, outcome.failure))
    for target, failure in failed:
        print(f"\n{target.name}:")
        traceback.print_exception(failure)
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=20_000, help="in all, shared out by weight")
    parser.add_argument("--seed", type=int, default=1, help="another seed, other cases")
    parser.add_argument("--only", default="", help="targets with this in their name")
    return parser.parse_args()


def _line(target: Target, outcome: Outcome) -> str:
    kinds = ", ".join(f"{kind}: {number}" for kind, number in outcome.kinds.items())
    verdict = "ok" if outcome.failure is None else "FAILED"
    slowest = f"{outcome.worst_s * 1000:.0f} ms"
    return f"{target.name:32} {outcome.kinds.total():6} {slowest:>9}  {verdict:8} {kinds}"


if __name__ == "__main__":
    sys.exit(main())
