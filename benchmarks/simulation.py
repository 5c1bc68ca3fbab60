"""How far the simulator is from a server: profile it, write down what is predicted, then measure the same loads.

    python -m benchmarks.simulation                                   # the default model on this machine, 8 minutes
    python -m benchmarks.simulation --rounds 20 --repeats 3 --attempts 6   # on a machine that others share, 30 minutes and more
    python -m benchmarks.simulation --shape qwen2.5-1.5b --frontends 6 --users 10,100,256 --output-tokens 128-512 --clients 6

Does: start the server; in each repeat `tonle profile` it; simulate each level, save that, and only then drive the server with the
client of `tonle bench`; print predicted, measured and error. Does not: change a prediction by what was measured.

A prediction is the median of several simulations of the same requests, whose steps scatter otherwise. A second table has the same
levels simulated once more, afterwards, with all steps longer or shorter by the factor that the step log shows for the measured
ones. It tells the simulator's error from the machine's: processors that others use change their speed. A third one has how far
those simulations lie apart: so much does chance move a number of one run.

A profile predicts the machine as it was. On a CPU whose cores others use, too, `--attempts 6` measures a level again, with other
requests and a prediction of their own, while a process beside it says that the machine was slower for a tenth of the time or
more (`tonle.simulate.pace`, which knows nothing of the server). What was passed over is counted in the table, and kept in
`comparison.json`.

Simulated and real requests have the same lengths in the same order, and at the open loop the same moments. The open loop is a
Poisson process at 70 % of the requests per second that the simulator predicts for as many users as the server has rows. Tokens
are timed by their ids: letters that are held back until they are complete are a matter of the text.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tonle.bench.load import Load
from tonle.bench.measure import LevelReport
from tonle.bench.options import BenchOptions, Span
from tonle.bench.run import run_bench
from tonle.bench.server_process import ServerProcess
from tonle.engine.step_log import read_step_log
from tonle.simulate.fit_times import timed_steps
from tonle.simulate.pace import Pace
from tonle.simulate.profile import Profile, load_profile, save_profile
from tonle.simulate.run import fleet_of, simulate
from tonle.simulate.run_profile import profile_running
from tonle.simulate.traces import trace_of_workload
from tonle.tune.correction import Correction, corrected

SATURATION_SHARE = 0.7
MOST_SLOW = 0.1  # of an attempt's time, the machine may be slower than usual
SEED = 7000  # levels, repeats and attempts have seeds of their own: no prompt is sent twice
COLUMNS = ("tokens/s", "TTFT p50", "TTFT p95", "ITL p50", "ITL p95")
LIMITS = (0.05, 0.10, 0.10, 0.10, 0.10)


class PassedOver(msgspec.Struct, frozen=True):
    """An attempt while the machine was slow."""

    slow_share: float
    predicted: list[float]
    measured: list[float]


class Level(msgspec.Struct, frozen=True):
    """One load, as often as it is measured. Numbers are those of COLUMNS, by repeat."""

    label: str
    users: int | None
    rate: float | None
    requests: int
    predicted: list[list[float]] = []
    measured: list[list[float]] = []
    at_speed: list[list[float]] = []  # predicted afterwards, with steps as long as they were
    lowest: list[list[float]] = []  # of those simulations
    highest: list[list[float]] = []
    step_ratios: list[float] = []  # what its steps took, to what the profile says of them
    slow_shares: list[float] = []  # of the time: the machine was slower than usual
    passed_over: list[PassedOver] = []

    @property
    def load(self) -> Load:
        return Load("concurrency", self.users) if self.users else Load("rate", self.rate or 0.0)


class Comparison(msgspec.Struct, frozen=True):
    profiles: list[Profile]  # by repeat
    levels: list[Level]


def options_of(arguments: argparse.Namespace, load: Load, requests: int, seed: int, url: str = "") -> BenchOptions:
    spans = {"input_tokens": arguments.input_tokens, "output_tokens": arguments.output_tokens}
    users = {"concurrency": (load.users,)} if load.users is not None else {"rates": (load.value,)}
    common = {"requests": requests, "seed": seed, "prompt_kind": "ids", "processes": arguments.clients, "warmup": 4}
    # Tokens are timed when they come: whether a token's text waits for the next one is not simulated.
    ids = {"extra_body": {"return_token_ids": True}}
    return BenchOptions(**spans | users | common | ids | ({"url": url} if url else {}))


def numbers(level: LevelReport) -> list[float]:
    assert level.ttft_ms is not None and level.itl_ms is not None
    return [level.output_tokens_per_s, level.ttft_ms.p50, level.ttft_ms.p95, level.itl_ms.p50, level.itl_ms.p95]


class Predictor:
    def __init__(self, profile: Profile, arguments: argparse.Namespace) -> None:
        self._fleet = fleet_of(profile)
        self._arguments = arguments
        self._rows = profile.server.max_num_seqs

    def plan(self) -> list[Level]:
        """What is to be measured: with as many requests as take `--level-seconds`, but some of each user at least."""
        loads = [Load("concurrency", users) for users in self._arguments.users]
        saturation = self.report(Load("concurrency", self._rows), 6 * self._rows, SEED).requests_per_s
        loads.append(Load("rate", round(SATURATION_SHARE * saturation, 3)))
        levels = []
        for load in loads:
            some = max(40, self._arguments.rounds * (load.users or 0))
            rate = load.value if load.users is None else self.report(load, some, SEED).requests_per_s
            requests = max(some, round(rate * self._arguments.level_seconds))
            levels.append(Level(load.label, load.users, None if load.users else load.value, requests))
        return levels

    def ranges(self, level: Level, seed: int) -> list[list[float]]:
        """Of each column: all simulations, ascending."""
        trace = trace_of_workload(options_of(self._arguments, level.load, level.requests, seed))
        chances = range(self._arguments.simulations)
        found = [numbers(simulate(trace, self._fleet, seed=seed + 1000 * chance).level()) for chance in chances]
        return [sorted(column) for column in zip(*found, strict=True)]

    def numbers(self, level: Level, seed: int) -> list[float]:
        return [statistics.median(column) for column in self.ranges(level, seed)]

    def report(self, load: Load, requests: int, seed: int) -> LevelReport:
        options = options_of(self._arguments, load, requests, seed)
        return simulate(trace_of_workload(options), self._fleet, seed=seed).level()


def seed_of(number: int, repeat: int, attempt: int) -> int:
    return SEED + 1000 * (number + 1) + 20 * repeat + attempt


class StepClock:
    """How fast the machine was: what steps took since the last look, to what a profile says of them. 1 is as fast as then."""

    def __init__(self, step_log: Path, profile: Profile) -> None:
        self._path, self._times = step_log, profile.times
        self._seen = len(read_step_log(step_log).steps)

    def ratio(self) -> float:
        log = read_step_log(self._path)
        steps = [step for step in timed_steps(log.steps, log.engine.lag)[self._seen :] if step.device_s]
        self._seen = len(log.steps)
        expected_s = sum(self._times.mean_s(step.work) for step in steps)
        return sum(step.device_s or 0.0 for step in steps) / expected_s if expected_s else 1.0


def measure(level: Level, seed: int, arguments: argparse.Namespace, url: str) -> list[float]:
    report = run_bench(options_of(arguments, level.load, level.requests, seed, url))
    if report.interrupted or not report.ok:
        raise SystemExit(f"{level.label}: {report.levels[0].failures if report.levels else 'stopped'}")
    for note in report.notes:
        say(f"  {level.label}: {note}")
    return numbers(report.levels[0])


def at_speed(profile: Profile, ratio: float) -> Profile:
    """All steps take so many times what the profile says."""
    return msgspec.structs.replace(profile, times=corrected(profile.times, Correction(step=ratio)))


def table(levels: Sequence[Level], *, speed_known: bool) -> str:
    """Medians over repeats. "Steps" says how fast the machine was meanwhile: median, lowest and highest. "Passed over": attempts
    while it was slow."""
    lines = [
        "| load | requests | "
        + " | ".join(f"{name}: predicted / measured" for name in COLUMNS)
        + " | steps | passed over |",
        "|---|---|" + "---|" * (len(COLUMNS) + 2),
    ]
    for level in levels:
        cells = []
        for place, limit in enumerate(LIMITS):
            predicted = statistics.median(each[place] for each in (level.at_speed if speed_known else level.predicted))
            measured = statistics.median(each[place] for each in level.measured)
            error = predicted / measured - 1
            digits = ",.4g" if place else ",.0f"
            text = f"{predicted:{digits}} / {measured:{digits}} ({error:+.1%})"
            cells.append(text if abs(error) <= limit else f"**{text}**")
        low, middle, high = min(level.step_ratios), statistics.median(level.step_ratios), max(level.step_ratios)
        cells += [f"{middle:.2f} ({low:.2f}, {high:.2f})", str(len(level.passed_over))]
        lines.append(f"| {level.label} | {level.requests} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def server_flags(arguments: argparse.Namespace, root: Path) -> tuple[str | None, list[str]]:
    """The model, and the flags of `tonle serve`."""
    flags = ["--speculation", "off", *arguments.flags, "--log-level", "WARNING"]  # a simulation makes no guesses
    if arguments.frontends > 1:
        flags += ["--frontends", str(arguments.frontends)]
    if arguments.shape is None:
        return arguments.model, flags
    from benchmarks.gpu_http import write_model

    return str(write_model(arguments.shape, root)), [*flags, "--load-format", "random", "--max-model-len", "4096"]


def compare(arguments: argparse.Namespace, root: Path) -> None:
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    step_log = out / "steps.jsonl"
    model, flags = server_flags(arguments, root)
    profiles: list[Profile] = []
    levels: list[Level] = []
    server = ServerProcess.tonle(model, [*flags, "--step-log", str(step_log)], log=out / "server.log")
    with Pace() as pace, server:
        say(f"serving {read_step_log(step_log).engine.model} at {server.url}")
        for repeat in range(arguments.repeats):
            profiles.append(calm_profile(server.url, step_log, repeat, arguments, pace))
            predictor = Predictor(profiles[-1], arguments)
            levels = levels or predictor.plan()
            clock = StepClock(step_log, profiles[-1])
            for number, level in enumerate(levels):
                for attempt in range(arguments.attempts):
                    seed = seed_of(number, repeat, attempt)
                    predicted = predictor.numbers(level, seed)
                    (out / "predicted.json").write_bytes(msgspec.json.encode((level.label, seed, COLUMNS, predicted)))
                    began_s = time.monotonic()
                    found, ratio = measure(level, seed, arguments, server.url), clock.ratio()
                    slow = pace.slow_share(began_s)
                    say(
                        f"  repeat {repeat + 1}, {level.label}: {found[0]:,.0f} tokens/s, predicted {predicted[0]:,.0f}; "
                        f"steps {ratio:.2f} of the profile's; the machine was slow for {slow:.0%} of the time"
                    )
                    if slow < MOST_SLOW or attempt + 1 == arguments.attempts:
                        break
                    level = with_next(level, passed_over=PassedOver(slow, predicted, found))
                known = Predictor(at_speed(profiles[-1], ratio), arguments).ranges(level, seed)
                levels[number] = with_next(
                    level, predicted=predicted, measured=found, step_ratios=ratio, slow_shares=slow,
                    at_speed=[statistics.median(each) for each in known],
                    lowest=[each[0] for each in known], highest=[each[-1] for each in known],
                )  # fmt: skip
                (out / "comparison.json").write_bytes(
                    msgspec.json.format(msgspec.json.encode(Comparison(profiles, levels)), indent=1)
                )
    print(table(levels, speed_known=False))
    print('\nSimulated again afterwards, with steps longer by the factor in the column "steps":\n')
    print(table(levels, speed_known=True))
    if arguments.simulations > 1:
        print(f"\nLowest and highest of {arguments.simulations} simulations, to their median:\n")
        print(chance_table(levels))


def calm_profile(url: str, step_log: Path, repeat: int, arguments: argparse.Namespace, pace: Pace) -> Profile:
    """Made again if the machine was slow, with other prompts: the server has those of before in its prefix cache."""
    for attempt in range(arguments.attempts):
        began_s = time.monotonic()
        profile = profile_of(url, step_log, 100 * repeat + attempt, arguments)
        slow_share = pace.slow_share(began_s)
        say(f"  machine slow for {slow_share:.0%} of the profile's time")
        if slow_share < MOST_SLOW or arguments.profile is not None:
            break
    return profile


def chance_table(levels: Sequence[Level]) -> str:
    """Medians over repeats."""
    lines = ["| load | " + " | ".join(COLUMNS) + " |", "|---|" + "---|" * len(COLUMNS)]
    for level in levels:
        cells = []
        for place in range(len(COLUMNS)):
            low, high = (
                statistics.median(
                    each[place] / middle[place] - 1 for each, middle in zip(ends, level.at_speed, strict=True)
                )
                for ends in (level.lowest, level.highest)
            )
            cells.append(f"{low:+.0%} to {high:+.0%}")
        lines.append(f"| {level.label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def profile_of(url: str, step_log: Path, seed: int, arguments: argparse.Namespace) -> Profile:
    """Of the running server, made now, or the one that was given."""
    if arguments.profile is not None:
        return load_profile(arguments.profile)
    profile = profile_running(
        url,
        step_log,
        seconds=arguments.profile_seconds,
        seed=seed,  # other prompts each time: the server has those of before in its prefix cache
        clients=arguments.clients,
        tell=lambda label, _: say(f"  profile: {label}"),
    )
    save_profile(profile, arguments.out / "profile.json")
    for fit in profile.fits:
        errors = f"median error {fit.median_error:.1%}, p90 {fit.p90_error:.1%}, sum {fit.total_error:+.1%}"
        say(f"  {fit.kind}: {fit.steps} steps, {errors}")
    return profile


def with_next(level: Level, **values: Any) -> Level:
    """With the values of one more repeat."""
    return msgspec.structs.replace(level, **{name: [*getattr(level, name), value] for name, value in values.items()})


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="as `tonle serve` takes it; the default model unless given")
    parser.add_argument("--shape", help="a shape of benchmarks/workload.py with random weights, such as qwen2.5-1.5b")
    parser.add_argument("--users", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4, 16, 32])
    parser.add_argument("--input-tokens", type=lambda text: Span.parse(text, "input"), default=Span(32, 400))
    parser.add_argument("--output-tokens", type=lambda text: Span.parse(text, "output"), default=Span(32, 96))
    parser.add_argument(
        "--level-seconds",
        type=float,
        default=25.0,
        help="about so long does a level take; the burst that opens a closed loop should be well below 5 %% of it",
    )
    parser.add_argument(
        "--rounds", type=int, default=4, help="requests of each user at least; with 40 the first round is beyond p95"
    )
    parser.add_argument("--simulations", type=int, default=9, help="of each level; its prediction is their median")
    parser.add_argument("--repeats", type=int, default=1, help="each with a profile of its own")
    parser.add_argument("--attempts", type=int, default=1, help="of a profile or level, as long as the machine is slow")
    parser.add_argument(
        "--clients", type=int, default=1, help="client processes, also of the profile; with 256 users on a GPU about 6"
    )
    parser.add_argument("--frontends", type=int, default=1)
    parser.add_argument("--profile", help="use this profile instead of making one")
    parser.add_argument("--profile-seconds", type=float, default=60.0)
    parser.add_argument(
        "--out", type=Path, default=Path("simulation"), help="a folder for profile, predictions and comparison"
    )
    parser.add_argument("flags", nargs="*", help="flags of `tonle serve`, after two dashes")
    return parser.parse_args(words)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        compare(parse(), Path(folder))
