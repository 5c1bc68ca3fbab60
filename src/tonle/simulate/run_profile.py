"""`run_profile`: serve a model for a minute, and fit how long its steps take.

Does: start the server (or use one that runs), drive it, read its step log, fit, and say how good the fit is. Does not: print.

The server, its HTTP process and the client run as they do in a benchmark, so what they take from each other is in the steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
from bisect import bisect_right
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import tonle
from tonle.bench.run import fastest_loop
from tonle.bench.server_process import ServerProcess
from tonle.engine.step_log import LoggedEngine, StepLogFile, read_step_log
from tonle.errors import ConfigError
from tonle.simulate.around import Around, time_around
from tonle.simulate.fit_times import LEAST_NEAR, LEAST_STEPS, TimedStep, fit_times, timed_steps
from tonle.simulate.fitted_times import FittedTimes
from tonle.simulate.pace import Pace, Span
from tonle.simulate.profile import Fit, Profile, ServerFacts
from tonle.simulate.profile_loads import ProfileDriver, ProfileLoad, Told
from tonle.simulate.spells import LEAST_OF_KIND, kind_of, outside, undisturbed

_SLICE_S = 0.5  # steps are held out by slices of time: neighbours are alike
_HELD_OUT = 5  # one slice of so many
_LOG_S = 10.0  # for the log to tell of the last step

_OF_MEASURING = ("step_log", "speculation")  # settings that a profiled server has for that alone


def run_profile(
    model: str | None,
    flags: Sequence[str] = (),
    *,
    seconds: float = 60.0,
    seed: int = 0,
    clients: int | None = None,
    keep: Path | None = None,
    tell: Told | None = None,
) -> Profile:
    """Start `tonle serve MODEL FLAGS`, and profile it. `clients`: processes that send; None: as many as suit the device. `keep`:
    a folder for its log and the step log; None: the log is kept only if the server does not start. Raises `ConfigError`."""
    with contextlib.ExitStack() as cleanup:
        folder = _temporary_folder(cleanup) if keep is None else keep
        folder.mkdir(parents=True, exist_ok=True)
        step_log = folder / "steps.jsonl"
        server = ServerProcess.tonle(
            model,
            ["--speculation", "off", *flags, "--step-log", str(step_log)],  # a simulation makes no guesses
            log=folder / "server.log",
            on_progress=None if tell is None else lambda s, line: tell(f"starting the server, {s:.0f} s", 0.0),
        )
        with contextlib.ExitStack() as running:
            try:
                running.enter_context(server)
            except ConfigError:
                cleanup.pop_all()  # the error names the log, which is to be read then
                raise
            engine = read_step_log(step_log).engine
            _check_makes_no_guesses(engine, "a server with these flags")  # the last one counts
            loads, slow = _drive_and_watch(server.url, engine, seconds=seconds, seed=seed, clients=clients, tell=tell)
        return make_profile(read_step_log(step_log), loads, slow)


def _temporary_folder(cleanup: contextlib.ExitStack) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="tonle-profile-"))
    cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder


def profile_running(
    url: str,
    step_log: Path,
    *,
    seconds: float = 60.0,
    seed: int = 0,
    clients: int | None = None,
    tell: Told | None = None,
) -> Profile:
    """The same with a server on this machine that writes `step_log` already. Raises `ConfigError`."""
    before = read_step_log(step_log)
    _check_makes_no_guesses(before.engine, f"the server at {url}")
    loads, slow = _drive_and_watch(url, before.engine, seconds=seconds, seed=seed, clients=clients, tell=tell)
    until_s = time.monotonic() + _LOG_S
    while True:  # the engine writes a few hundred lines at a time, and all of them when it is idle
        log = read_step_log(step_log)
        if len(log.steps) > len(before.steps) and not log.steps[-1].running:
            break
        if time.monotonic() > until_s:
            raise ConfigError(
                f"{step_log} does not tell of the steps that the server at {url} has computed: is it its log?"
            )
        time.sleep(0.05)
    new = StepLogFile(log.engine, log.steps[len(before.steps) :], log.requests[len(before.requests) :])
    return make_profile(new, loads, slow)


def _check_makes_no_guesses(engine: LoggedEngine, server: str) -> None:
    """Steps that check guesses look like steps with prompts. Raises `ConfigError`."""
    settings = engine.settings
    is_off = settings.get("speculation") == "off" or settings.get("enable_speculative_decoding") is False
    if not is_off:
        raise ConfigError(
            f"{server} may speculate, which a simulation does not: start it with --speculation off to profile it"
        )


def _drive_and_watch(url: str, engine: LoggedEngine, **options: Any) -> tuple[list[ProfileLoad], list[Span]]:
    """What was sent, and when this machine was slow. Its processors say nothing of a GPU."""
    if engine.device != "cpu":
        return drive(url, engine, **options), []
    with Pace() as pace:
        loads = drive(url, engine, **options)
        return loads, [span for span in pace.spans() if span.is_slow]


def drive(
    url: str,
    engine: LoggedEngine,
    *,
    seconds: float,
    seed: int = 0,
    clients: int | None = None,
    tell: Told | None = None,
) -> list[ProfileLoad]:
    driver = ProfileDriver(url, engine, seconds=seconds, seed=seed, clients=clients, tell=tell)
    factory, _ = fastest_loop()
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(driver.run())


def make_profile(log: StepLogFile, loads: Sequence[ProfileLoad], slow: Sequence[Span] = ()) -> Profile:
    """Fit what was measured. `slow`: when the machine was, by moment. Raises `ConfigError` if it was too little."""
    engine = log.engine
    begin_s = min((sample.start_s for load in loads for sample in load.samples), default=0.0)
    steps = [step for step in timed_steps(log.steps, engine.lag) if step.begin_s >= begin_s]
    around = time_around(log, loads)
    fast = outside(steps, slow)
    calm = undisturbed(fast, _fitted(fast, engine, around), _stages_of(fast, loads))
    times = _fitted(calm, engine, around)
    notes = _notes_of_kinds(calm)
    facts = {name: getattr(engine, name) for name in ServerFacts.__struct_fields__}
    # None: what suits the device, as a server has it unless it is told otherwise.
    given = {name: value for name, value in engine.settings.items() if name not in _OF_MEASURING and value is not None}
    facts["settings"] = given
    return Profile(
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        tonle=tonle.__version__,
        server=ServerFacts(**facts),
        times=times,
        fits=_held_out_fits(calm, engine, around),
        notes=notes,
        left_out=1.0 - sum(step.device_s or 0.0 for step in calm) / sum(step.device_s or 0.0 for step in steps),
    )


def _notes_of_kinds(steps: Sequence[TimedStep]) -> list[str]:
    """Of steps with prompts or without that are few. Raises `ConfigError` if they are too few to fit anything to."""
    notes = []
    for kind, with_prompts in (("with prompts", True), ("without prompts", False)):
        own = [step for step in steps if bool(step.work.prompts) is with_prompts]
        count = sum(step.device_s is not None or bool(step.run) for step in own)
        said = f"only {count} steps {kind} could be timed"
        if count < LEAST_NEAR:
            raise ConfigError(f"{said}, which say nothing of their times: measure for longer")
        if count < LEAST_OF_KIND:
            notes.append(f"{said}: what is simulated of them may be far off; measure for longer (--seconds)")
    return notes


def _stages_of(steps: Sequence[TimedStep], loads: Sequence[ProfileLoad]) -> list[int]:
    """Of each step, the stage of the load that was being sent."""
    sent = [load for load in loads if load.samples]
    begins_s = [min(sample.start_s for sample in load.samples) for load in sent]
    return [sent[max(0, bisect_right(begins_s, step.begin_s) - 1)].stage for step in steps]


def _fitted(steps: Sequence[TimedStep], engine: LoggedEngine, around: Around) -> FittedTimes:
    return fit_times(steps, lag=engine.lag, sizes=engine.sizes, around=around)


# -- how good the fit is


def _held_out_fits(steps: Sequence[TimedStep], engine: LoggedEngine, around: Around) -> list[Fit]:
    """Fitted without them, what is said of the steps of every fifth slice of time. Empty if the others are too few."""
    slices = [int(step.begin_s / _SLICE_S) % _HELD_OUT for step in steps]
    seen = [step for step, place in zip(steps, slices, strict=True) if place]
    held_out = [step for step, place in zip(steps, slices, strict=True) if not place and step.device_s]
    if not held_out or sum(step.device_s is not None for step in seen) < LEAST_STEPS:
        return []
    times = _fitted(seen, engine, around)
    kinds: dict[str, list[TimedStep]] = {}
    for step in held_out:
        kinds.setdefault(kind_of(step), []).append(step)
    return [_fit_of(kind, kinds[kind], times) for kind in sorted(kinds)] + [_fit_of("all", held_out, times)]


def _fit_of(kind: str, steps: Sequence[TimedStep], times: FittedTimes) -> Fit:
    expected = np.array([times.device_s(step.work) for step in steps])
    measured = np.array([step.device_s for step in steps], dtype=np.float64)
    errors = np.abs(expected / measured - 1.0)
    return Fit(
        kind=kind,
        steps=len(steps),
        seconds=float(measured.sum()),
        median_error=float(np.median(errors)),
        p90_error=float(np.percentile(errors, 90)),
        total_error=float(sum(times.mean_s(step.work) for step in steps) / measured.sum() - 1.0),
    )
