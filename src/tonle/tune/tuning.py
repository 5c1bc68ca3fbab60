"""`run_tune`: a tuning from its options to the result, for programs; `tonle tune` prints what it says.

Does: put the parts together: profile, simulator, server, folder. Does not: print or decide.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from os import cpu_count, getloadavg
from pathlib import Path
from typing import Any

import msgspec

import tonle
from tonle.advise.read_model import find_model
from tonle.bench import Load
from tonle.bench.numbers import clock_text
from tonle.bench.slo import duration_text
from tonle.config.load_settings import load
from tonle.config.serve import SETTINGS
from tonle.errors import ConfigError, ModelError
from tonle.simulate.profile import Profile, load_profile, save_profile
from tonle.simulate.run_profile import run_profile
from tonle.simulate.traces import trace_of_workload
from tonle.tune.budget import PROFILE_S, Budget
from tonle.tune.correction import Correction
from tonle.tune.measurer import Measurer, NotMeasured
from tonle.tune.objective import Goal
from tonle.tune.options import TuneOptions
from tonle.tune.page import render_page
from tonle.tune.prediction import Predict, SimulatedServer
from tonle.tune.results import Candidate, TuneResult, write_results
from tonle.tune.run import Task, Tuner
from tonle.tune.safe_load import GatewayLimits, gateway_limits
from tonle.tune.search import optuna_module
from tonle.tune.servers import CommandLauncher, Launcher, TonleLauncher, model_of_command, vllm_launcher
from tonle.tune.space import Choice, DeviceFacts, Settings, choices, key_of, without_effect
from tonle.tune.stage_measured import measured_outcome, measured_settings
from tonle.tune.state import PROFILE, TuneDir

IMPOSSIBLE = 1.5  # times the limit, for one request alone: the simulation is not that far off
BUSY_LOAD = 0.7  # load average per core
_DEFAULT_MODEL = SETTINGS["model"].type.show(None)
_DEFAULT_STORED_AS = "Q4_1"
_PROFILED_TOKENS = {"cpu": 1024, "cuda": 8192}  # of a step: more than the default, so that larger steps are known too

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Known:
    """What is known before the first measurement."""

    launcher: Launcher
    knobs: list[Choice]
    first: list[Settings]
    predict: Predict | None


def run_tune(options: TuneOptions, say: Say = lambda text: None) -> TuneResult:
    """Raises `ConfigError` if it cannot start. At Ctrl-C the result has what was found so far, and `interrupted`."""
    optuna_module()
    options.validate()
    config = _read_config(options.config)
    _check_inputs(options, config)
    options = replace(options, bench=replace(options.bench, slo=options.goal.slo))
    inputs = options.inputs(
        TonleLauncher(options.model, config).measured_config
    )  # no keys: they are saved with the result
    folder = TuneDir.open(options.out, inputs, datetime.now(UTC).isoformat(timespec="seconds"))
    budget = Budget(options.budget_s, spent_before_s=folder.state.spent_s)
    if folder.measurements:
        say(
            f"going on in {folder.path}: {len(folder.measurements)} measurements are there, {clock_text(budget.spent_s)} spent"
        )

    def tell(text: str) -> None:
        folder.state.spent_s = budget.spent_s
        folder.save()
        say(f"[{budget}] {text}")

    _note_busy_machine(folder, tell)
    known = _prepare(options, config, folder, budget, tell)
    task = Task(bench=options.bench, goal=options.goal, knobs=known.knobs, seed=options.seed, first=known.first)
    measurer = Measurer(known.launcher, options.bench, folder, tell)
    tuner = Tuner(task, folder, measurer, budget, say, known.predict)
    try:
        tuner.run()
    except NotMeasured as error:
        raise ConfigError(f"the server could not be measured with its default settings: {error.reason}") from None
    result = result_of(options, folder, budget, tuner, known)
    write_results(result, folder.path, config)
    (folder.path / "report.html").write_text(render_page(result), encoding="utf-8")
    return result


def _check_inputs(options: TuneOptions, config: dict[str, Any]) -> None:
    """What is read later: before a folder is made, a server started and a minute spent. Raises `ConfigError`."""
    trace_of_workload(options.bench, 1)
    if options.server == "tonle" and "quantization" in options.allow:
        check_quantization(options.model, config)
    if options.profile is not None:
        server = load_profile(options.profile).server
        device = _device(config)
        if server.device != device:
            raise ConfigError(
                f"--profile {options.profile} is a profile of {server.device_name} ({server.device}), and this server computes "
                f"on {device}: leave --profile out, and its step times are measured first",
                param="profile",
            )


def _device(config: dict[str, Any]) -> str:
    """Of the server: what the file says, or else as it chooses."""
    chosen = str(os.environ.get("TONLE_DEVICE") or config.get("device") or "auto")
    return ("cuda" if _has_gpu() else "cpu") if chosen == "auto" else chosen.split(":")[0]


def _model_name(model: str | None, config: dict[str, Any]) -> str:
    """As the user names it; else the default model's."""
    return str(model or config.get("model") or _DEFAULT_MODEL)


def check_quantization(model: str | None, config: dict[str, Any]) -> None:
    """Weights of few bits would be rounded a second time. What is not on this machine is not known. Raises `ConfigError`."""
    if config.get("quantization", "auto") != "auto":
        raise ConfigError(
            "--allow quantization does not go with --config where the settings file has a quantization: leave one of them out",
            param="allow",
        )
    name = _model_name(model, config)
    try:
        stored = _DEFAULT_STORED_AS if name == _DEFAULT_MODEL else find_model(name).stored_as
    except ModelError:
        return
    if stored is not None:
        raise ConfigError(
            f"--allow quantization: the weights of {name} are quantized already ({stored}): leave it out, or tune a model whose "
            "weights are stored in 16 bits",
            param="allow",
        )


def other_model_note(profile: Profile, model: str | None, config: dict[str, Any]) -> str | None:
    """If the profile is of another model than the one that is tuned, as far as names tell."""
    asked = _model_name(model, config)
    name = Path(asked).name
    known = Path(profile.server.model).name
    if known in (name, name.removesuffix(".gguf")):
        return None
    return (
        f"the profile is of {profile.server.model}, and the model is {asked}: if its steps take another time, the simulation "
        "ranks settings wrongly"
    )


def _prepare(options: TuneOptions, config: dict[str, Any], folder: TuneDir, budget: Budget, say: Say) -> Known:
    if options.server != "tonle":
        return _prepare_command(options)
    launcher = TonleLauncher(options.model, config, folder.path)
    if launcher.left_out:
        left_out = ", ".join(launcher.left_out)
        _note(folder, say, f"while measuring, these settings of {options.config} are not in force: {left_out}")
    profile = _profile(options, launcher, folder, budget, say)
    if options.profile is not None and (note := other_model_note(profile, options.model, config)) is not None:
        _note(folder, say, note)
    for note in profile.notes:
        _note(folder, say, f"the profile: {note}")
    facts = DeviceFacts(profile.server.device, cpu_count() or 1, options.goal.slo)
    knobs = choices("tonle", facts, allow=options.allow, own=options.values)
    for note in without_effect(options.allow, knobs):
        _note(folder, say, note)
    predict = SimulatedServer(
        profile, options.bench, options.goal.slo, launcher.measured_config, trace_of_workload, seed=options.seed
    )
    try:
        if not options.bench.replay:  # its load cannot be made one request alone
            _refuse_impossible(options.goal, predict)
    except ConfigError:
        (folder.path / PROFILE).unlink(missing_ok=True)  # it may be at fault: the next run measures again
        raise
    users = options.bench.levels[0].users
    return Known(launcher, knobs, _near_users(knobs, users), predict)


def _prepare_command(options: TuneOptions) -> Known:
    command = options.command or ""
    facts = DeviceFacts(options.device or ("cuda" if _has_gpu() else "cpu"), cpu_count() or 1, options.goal.slo)
    users = options.bench.levels[0].users
    if options.server == "vllm":
        knobs = choices("vllm", facts, allow=options.allow, own=options.values)
        launcher = vllm_launcher(command)
    else:
        # The first value is the default of a place in the command; the others are searched.
        launcher = CommandLauncher(
            command, defaults={name: values[0] for name, values in options.values.items() if values}
        )
        own = {name: values[1:] if name in launcher.places else values for name, values in options.values.items()}
        knobs = choices("other", facts, own=own)
    launcher.validate()
    return Known(launcher, knobs, _near_users(knobs, users), None)


def _read_config(file: Path | None) -> dict[str, Any]:
    """The settings as the file has them, after the loader has checked them. Raises `ConfigError`."""
    if file is None:
        return {}
    import yaml

    load({}, file=file, environ={})
    return dict(yaml.safe_load(file.read_text(encoding="utf-8")) or {})


def _profile(options: TuneOptions, launcher: TonleLauncher, folder: TuneDir, budget: Budget, say: Say) -> Profile:
    """Given, made by an earlier run, or made now."""
    if options.profile is not None:
        return load_profile(options.profile)
    file = folder.path / PROFILE
    if file.exists():
        return load_profile(str(file))
    seconds = min(PROFILE_S, 0.15 * budget.total_s)
    say(f"measuring how long steps take, for {clock_text(seconds)} and the start of a server")
    users = options.bench.levels[0].users or 0
    # Steps are profiled without guesses, and a draft model does not go with that.
    without = {name: value for name, value in launcher.config.items() if not name.startswith("speculation")}
    flags = replace(launcher, config=without).config_flags()
    gpu = _has_gpu()
    rows = launcher.measured_config.get("max_num_seqs") or (256 if gpu else 32)
    if users > int(rows):
        flags += ["--max-num-seqs", str(min(users, 512 if gpu else 128))]
    if "max_num_batched_tokens" not in launcher.measured_config:
        flags += ["--max-num-batched-tokens", str(_PROFILED_TOKENS["cuda" if gpu else "cpu"])]
    profile = run_profile(options.model, flags, seconds=seconds, seed=options.seed)
    save_profile(profile, file)
    return profile


def _refuse_impossible(goal: Goal, predict: Predict) -> None:
    """An SLO that one request alone misses by far holds under no settings. Raises `ConfigError`."""
    alone = predict.outcome({}, Correction(), load=Load("concurrency", 1))
    for result in alone.bounds:
        if result.value_ms is not None and result.value_ms > IMPOSSIBLE * result.bound.limit_ms:
            raise ConfigError(
                f"no settings can hold {result.bound}: one request alone, with the server to itself, has "
                f"{duration_text(result.value_ms)} by simulation. Allow more, use a faster device or a smaller model, or, if "
                "other programs kept this machine busy while its steps were measured, try again when it is idle",
                param="slo",
            )


def _note(folder: TuneDir, say: Say, note: str) -> None:
    """Once, though a tuning may go on several times."""
    if note not in folder.state.notes:
        folder.state.notes.append(note)
        say(f"note: {note}")


def _note_busy_machine(folder: TuneDir, say: Say) -> None:
    """Other programs make every number worse, and each by another amount. Of a tuning that goes on, the load was its own."""
    if folder.measurements:
        return
    load, cpus = getloadavg()[0], cpu_count() or 1
    if load > BUSY_LOAD * cpus:
        _note(
            folder,
            say,
            f"other programs kept this machine busy (load average {load:.1f} on {cpus} cores): measure when it is idle",
        )


def _near_users(knobs: list[Choice], users: int | None) -> list[Settings]:
    """Worth an early try: as many sequences as there are users, half and a quarter of them; the smallest and largest steps."""
    found: list[Settings] = []
    by_name = {knob.name: knob for knob in knobs}
    if users is not None and "max_num_seqs" in by_name:
        values = [value for value in by_name["max_num_seqs"].values if isinstance(value, int)]
        wanted = [min(values, key=lambda value: abs(value - share * users)) for share in (0.5, 1.0, 0.25) if values]
        found += [{"max_num_seqs": value} for value in dict.fromkeys(wanted)]
    if "max_num_batched_tokens" in by_name:
        tokens = by_name["max_num_batched_tokens"].values
        found += [{"max_num_batched_tokens": tokens[0]}, {"max_num_batched_tokens": tokens[-1]}]
    return found


def _has_gpu() -> bool:
    return Path("/dev/nvidia0").exists() or Path("/dev/nvidiactl").exists()


def result_of(options: TuneOptions, folder: TuneDir, budget: Budget, tuner: Tuner, known: Known) -> TuneResult:
    """What was found so far, as data."""
    state, goal, best = folder.state, options.goal, tuner.best
    correction = state.correction or Correction()
    limits: GatewayLimits | None = None
    if tuner.safe is not None and tuner.safe.outcome is not None:
        outcome = tuner.safe.outcome
        prefill = outcome.total_tokens_per_s - outcome.output_tokens_per_s
        if known.predict is not None:
            prefill = known.predict.prefill_tokens_per_s(best, correction)
        limits = gateway_limits(tuner.safe, goal, prefill_tokens_per_s=prefill)
    candidates = []
    simulated = {key_of(trial.settings): trial.outcome for trial in [*state.trials, *state.reranked]}
    for settings in measured_settings(folder):
        measured = measured_outcome(folder, goal, settings)
        candidates.append(Candidate(settings=settings, measured=measured, simulated=simulated.get(key_of(settings))))
    candidates.sort(key=lambda each: goal.rank(each.measured), reverse=True)
    launcher = known.launcher
    inputs = state.inputs
    return TuneResult(
        tonle=tonle.__version__,
        inputs=inputs
        if options.command is None
        else msgspec.structs.replace(inputs, model=model_of_command(options.command)),
        goal=goal,
        settings=best,
        compared=tuner.tuned,
        evidence=tuner.evidence,
        verdict=tuner.verdict,
        candidates=candidates,
        trials=state.reranked or state.trials,
        correction=state.correction,
        safe=tuner.safe,
        limits=limits,
        failed=state.failed,
        notes=state.notes,
        command=launcher.words(best, 8000) if isinstance(launcher, CommandLauncher) else None,
        spent_s=budget.spent_s,
        interrupted=tuner.interrupted,
    )
