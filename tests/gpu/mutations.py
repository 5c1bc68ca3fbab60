"""Prove the tests of the CUDA path: break it in one way after another, and see that tests fail.

    python -m tests.gpu.mutations            # on a GPU: all, in bfloat16; elsewhere under Triton's interpreter, smaller
    python -m tests.gpu.mutations --list
    python -m tests.gpu.mutations --only "window ignored"
    python -m tests.gpu.mutations --reference   # on any machine: how far mutants and rounding are from the truth, in numbers

Each mutation is a patch of the code (`patches.py`), made by `conftest.py` in a pytest process of its own, which runs the tests of
the models that have the feature. A mutation is seen if a comparison fails for each of these models; an error of another
kind is not a comparison. Exits 1 if a mutation survives, or if tests fail without one.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

CUDA = torch.cuda.is_available()
_TIMEOUT_S = 600
_FEATURES, _ADAPTERS = "tests/gpu/test_features.py", "tests/gpu/test_adapters.py"

# Which models must see it: names of `tests/fakes/features.py`, or the file of the adapters' tests.
MUTATIONS: dict[str, tuple[str, ...]] = {
    "no attention": ("llama3", "window", "biases", "head-norms"),
    "no attention in prompts": ("llama3",),
    "no attention in decode steps": ("llama3",),
    "window ignored": ("window", "windows"),
    "q/k norm ignored": ("head-norms",),
    "rope scaling ignored": ("llama3", "yarn", "linear"),
    "qkv biases ignored": ("biases", "windows"),
    "norm gains ignored": ("window", "biases"),
    "last mixer skipped": ("biases", "head-norms"),
    "keys and values to wrong slots": ("llama3",),
    "adapter ignored": (_ADAPTERS,),
    "adapter of the next slot": (_ADAPTERS,),
}


@dataclass(frozen=True)
class Outcome:
    """Of one pytest process."""

    tests: int
    failed: dict[str, int]  # by model, or by file: tests in which a comparison failed
    broken: list[str]  # tests that failed in another way, and what pytest says where it ran none
    seconds: float

    @property
    def num_failed(self) -> int:
        return sum(self.failed.values())

    def sees(self, where: tuple[str, ...]) -> bool:
        return not self.broken and all(self.failed.get(name) for name in where)


def run(mutation: str | None, where: tuple[str, ...], python: str = sys.executable) -> Outcome:
    """The tests of `where`, with a mutation or without."""
    models = [name for name in where if not name.endswith(".py")]
    files = [name for name in where if name.endswith(".py")] + ([_FEATURES] if models else [])
    dtype = "bfloat16" if CUDA else "float32"
    chosen = [f"{name}-{dtype}" for name in models] + (["test_adapters"] if _ADAPTERS in files else [])
    variables = dict(os.environ)
    variables.pop("TONLE_TEST_MUTATION", None)
    if mutation is not None:
        variables["TONLE_TEST_MUTATION"] = mutation
    if not CUDA:
        variables["TRITON_INTERPRET"] = "1"
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            python,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
            "-k",
            " or ".join(chosen),
        ]
        done = subprocess.run(
            [*command, *files], env=variables, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        took = time.monotonic() - began
        if not report.exists():
            return Outcome(0, {}, [_last_line(done.stdout + done.stderr)], took)
        return read_report(report.read_text(), where, took)


def read_report(text: str, where: tuple[str, ...], seconds: float) -> Outcome:
    """Of pytest, in JUnit's form."""
    failed: dict[str, int] = {}
    broken: list[str] = []
    tests = 0
    for case in ElementTree.fromstring(text).iter("testcase"):
        if case.find("skipped") is not None:
            continue
        tests += 1
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        if (error := case.find("error")) is not None:
            broken.append(f"{name}: {_last_line(error.get('message') or '')}")
        elif (failure := case.find("failure")) is not None:
            message = failure.get("message") or ""
            if not message.startswith("AssertionError"):
                broken.append(f"{name}: {_last_line(message)}")
                continue
            of = next((model for model in where if f"[{model}-" in name or model == _file_of(name)), "elsewhere")
            failed[of] = failed.get(of, 0) + 1
    return Outcome(tests, failed, broken or ([] if tests else ["no test ran"]), seconds)


def _file_of(name: str) -> str:
    return name.partition("::")[0].replace(".", "/") + ".py"


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1][:200]


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def prove(names: list[str]) -> bool:
    """Print the table; whether all is as it should be."""
    began = time.monotonic()
    _say(f"{'mutation':32}{'tests failed':>14}  {'seconds':>7}  verdict")
    everything = tuple(dict.fromkeys(place for name in names for place in MUTATIONS[name]))
    jobs = max(1, (os.cpu_count() or 1) // 3)  # a test keeps three cores busy: ours, the reference's, the compiler's
    with ThreadPoolExecutor(jobs) as pool:
        unchanged = pool.submit(run, None, everything)
        changed = {name: pool.submit(run, name, MUTATIONS[name]) for name in names}
        good = _say_all(unchanged, changed)
    where = torch.cuda.get_device_name() if CUDA else "Triton's interpreter"
    _say(f"{'all mutations were seen' if good else 'NOT PROVEN'}, in {time.monotonic() - began:.0f} s on {where}")
    return good


def _say_all(unchanged: Future[Outcome], changed: dict[str, Future[Outcome]]) -> bool:
    """A line for each as soon as it is known, in order; whether all is as it should be."""
    found = unchanged.result()
    good = not found.num_failed and not found.broken
    _say(
        f"{'none':32}{found.num_failed:>7} of {found.tests:<4}{found.seconds:>8.0f}  {'green' if good else 'NOT GREEN'}"
    )
    for line in found.broken:
        _say(f"    {line}")
    for name, future in changed.items():
        found = future.result()
        seen = found.sees(MUTATIONS[name])
        good &= seen
        verdict = "seen" if seen else "the run broke" if found.broken else "SURVIVED"
        _say(f"{name:32}{found.num_failed:>7} of {found.tests:<4}{found.seconds:>8.0f}  {verdict}")
        for line in found.broken:
            _say(f"    {line}")
        if not seen and not found.broken:
            _say(f"    not seen by: {', '.join(place for place in MUTATIONS[name] if not found.failed.get(place))}")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.mutations", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--list", action="store_true", help="the mutations, and the models whose tests must see each")
    parser.add_argument("--only", action="append", choices=MUTATIONS, metavar="NAME", help="this one; may be repeated")
    parser.add_argument("--reference", action="store_true", help="the distances that the tests' bounds rest on")
    options = parser.parse_args()
    if options.list:
        for name, where in MUTATIONS.items():
            _say(f"{name:32}{', '.join(where)}")
        return 0
    if options.reference:
        from tests.gpu.reference_distances import show

        show(_say)
        return 0
    if importlib.util.find_spec("triton") is None:
        _say("triton is not installed: neither a GPU's kernels nor the interpreter can run. pip install triton")
        return 2
    return 0 if prove(options.only or list(MUTATIONS)) else 1


if __name__ == "__main__":
    sys.exit(main())
