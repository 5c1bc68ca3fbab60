"""Profiles: files that keep what was measured, and one made of a real server."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from tests.fakes.checkpoints import save_folder
from tonle.bench.measure import Sample
from tonle.cli.app import app
from tonle.engine.schedule.step_facts import StepWork
from tonle.engine.step_log import LoggedEngine, LoggedRequest, LoggedStep, StepLog, StepLogFile, read_step_log
from tonle.errors import ConfigError
from tonle.simulate import run_profile
from tonle.simulate.around import time_around
from tonle.simulate.fitted_times import Curve, FittedTimes
from tonle.simulate.profile import Fit, Profile, ServerFacts, load_profile, save_profile, shipped_profiles
from tonle.simulate.profile_loads import ProfileLoad
from tonle.simulate.run_profile import make_profile

TIMES = FittedTimes(
    lag=1, front_s=0.002, back_s=0.001, front_gap_s=3e-4, back_row_s=1e-6, decode=Curve([1, 8], [0.01, 0.02], 8),
    mixed=Curve([1, 64], [0.01, 0.1]), draw=Curve([0, 8], [0.0, 0.001]), chunk_s=1e-4, decode_read_s=1e-6,
    prompt_read_s=1e-7, host_step_s=1e-4, host_row_s=1e-5, host_token_s=1e-6, ratios=[0.9, 1.0, 1.4],
    kind_ratios={0: [1.0], 4: [0.5, 2.0]},
)  # fmt: skip
SERVER = ServerFacts(
    model="m", device="cuda", device_name="H", dtype="bfloat16", block_size=16, num_blocks=100, context_length=1024,
    max_num_seqs=8, max_num_batched_tokens=64, long_prefill_tokens=32, settings={"kv_cache_dtype": "fp8"},
)  # fmt: skip
PROFILE = Profile(made_at="2026-01-01T00:00:00+00:00", tonle="1", server=SERVER, times=TIMES)
ENGINE = LoggedEngine(
    model="m", device="cpu", device_name="C", dtype="float32", block_size=16, num_blocks=100, context_length=1024,
    vocab_size=320, max_num_seqs=8, max_num_batched_tokens=64, long_prefill_tokens=32, lag=0,
)  # fmt: skip


def test_a_profile_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    save_profile(PROFILE, path)
    again = load_profile(str(path))
    assert again == PROFILE
    three, two_and_a_prompt, eight = (
        StepWork(3, 0, 0, 90, 0, 3),
        StepWork(2, 1, 40, 50, 800, 3),
        StepWork(8, 0, 0, 9, 0, 8),
    )
    for work in (three, two_and_a_prompt):
        assert again.times.device_s(work) == TIMES.device_s(work)
        assert again.times.host_s(work) == TIMES.host_s(work)
    assert [again.times.jitter(work, 0.99) for work in (three, two_and_a_prompt, eight)] == [2.0, 1.0, 1.4]


def test_limits_are_the_servers_but_for_what_is_changed() -> None:
    limits = PROFILE.limits(max_num_seqs=4, long_prefill_tokens=16)
    assert (limits.max_num_seqs, limits.long_prefill_tokens, limits.max_num_batched_tokens) == (4, 16, 64)
    assert (limits.context_length, limits.block_size, limits.min_forced, limits.prefix_caching) == (1024, 16, 2, True)
    without = msgspec.structs.replace(SERVER, settings={"enable_prefix_caching": False})
    assert not msgspec.structs.replace(PROFILE, server=without).limits().prefix_caching


def test_limits_follow_the_settings_that_the_server_was_started_with() -> None:
    assert PROFILE.limits(max_num_batched_tokens=128).long_prefill_tokens == 64, (
        "half of a step, as without a threshold"
    )
    given: dict[str, Any] = {
        "long_prefill_token_threshold": 32, "priority_ageing_s": 1.5, "enable_continuous_batching": False,
        "batch_timeout_ms": 20.0, "a_setting_of_another_version": 1,
    }  # fmt: skip
    server = msgspec.structs.replace(SERVER, settings=given)
    limits = msgspec.structs.replace(PROFILE, server=server).limits(max_num_batched_tokens=128)
    assert (limits.long_prefill_tokens, limits.ageing_s) == (32, 1.5)
    assert (limits.continuous, limits.batch_timeout_s) == (False, 0.02)


def test_what_is_no_profile_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Make one with `tonle profile -o FILE`"):
        load_profile(str(tmp_path / "none"))
    path = tmp_path / "p.json"
    for text in ("{}", "nothing", '{"schema": "tonle.profile/9"}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="is not a profile of steps"):
            load_profile(str(path))
    with pytest.raises(ConfigError, match="cannot write"):
        save_profile(PROFILE, tmp_path / "missing" / "p.json")


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("times", "decode", "sizes"), [], "a curve needs sizes.*times.decode"),
        (("times", "mixed", "seconds"), [0.1], "one number of seconds for each size.*times.mixed"),
        (("times", "draw"), {"sizes": [8, 2], "seconds": [0.1, 0.2]}, "sizes of a curve ascend.*times.draw"),
        (("times", "decode"), {"sizes": [1, 2], "seconds": [-0.1, 0.2]}, "below 0.*times.decode"),
        (("server", "num_blocks"), 0, "num_blocks"),
        (("server", "settings"), {"priority_ageing_s": "soon"}, "priority_ageing_s"),
    ],
)
def test_a_profile_with_a_value_that_makes_no_sense_is_refused(
    tmp_path: Path, place: tuple[str, ...], value: object, said: str
) -> None:
    data = inner = msgspec.to_builtins(PROFILE)
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    path = tmp_path / "p.json"
    path.write_bytes(msgspec.json.encode(data))
    with pytest.raises(ConfigError, match=f"is not a profile of steps.*{said}"):
        load_profile(str(path))


@pytest.mark.parametrize("name", shipped_profiles())
def test_shipped_profiles_make_sense(name: str) -> None:
    profile = load_profile(name)
    rows = [profile.times.device_s(StepWork(rows, 0, 0, 200 * rows, 0, rows)) for rows in (1, 4, 16, 32)]
    assert 0 < rows[0] <= rows[1] <= rows[2] <= rows[3] < 1
    prompt = StepWork(0, 1, 256, 0, 256 * 128, 1)
    assert profile.times.device_s(prompt) > rows[0]
    assert 0 <= profile.times.front_s < 0.1
    assert profile.limits().max_num_seqs == profile.server.max_num_seqs


def test_what_lies_around_steps_is_told_from_the_clients_moments() -> None:
    """Requests of 10 tokens come twice, and cannot be told apart while both are under way."""
    requests = [
        LoggedRequest(10, 1.002, 1.003, 1.1),
        LoggedRequest(20, 2.002, 2.004, 2.1),
        LoggedRequest(10, 2.001, 2.01, 2.1),
    ]
    steps = [LoggedStep(1, 1, 1, 1, at, at, 1, 0, 0, 0, 0, drawn, 1, 0) for at, drawn in ((1.1, 1), (2.1, 5))]

    def sample(prompt_tokens: int, start_s: float, first_s: float) -> Sample:
        return Sample(index=0, start_s=start_s, end_s=9.0, arrivals_s=[first_s], prompt_tokens=prompt_tokens)

    seen = [sample(10, 1.0, 1.1 + 0.003), sample(20, 2.0, 2.1 + 0.007), sample(10, 0.9, 2.2)]
    around = time_around(StepLogFile(ENGINE, steps, requests), [ProfileLoad("some", 2, seen)])
    assert around.back_s == pytest.approx(0.003, abs=1e-5)
    assert around.back_row_s == pytest.approx(0.004 / 5, abs=1e-5)
    assert around.front_s == pytest.approx(0.002 + 0.0012, abs=1e-4)
    with pytest.raises(ConfigError, match="none of the requests"):
        time_around(StepLogFile(ENGINE, steps, requests), [ProfileLoad("others", 1, [sample(99, 1.0, 2.0)])])


def test_the_way_to_the_loop_is_that_of_requests_which_found_it_idle() -> None:
    """The second and third wait for steps to end, which is no part of the way."""
    requests = [
        LoggedRequest(10, 1.002, 1.0024, 1.1),
        LoggedRequest(20, 1.052, 1.1, 1.2),
        LoggedRequest(30, 1.152, 1.2, 1.3),
        LoggedRequest(40, 2.002, 2.0026, 2.1),
    ]
    # From the plan to the end; requests that run after it.
    moments = [(0.5, 0.6, 0), (1.003, 1.1, 1), (1.1, 1.2, 1), (1.2, 1.3, 0), (2.003, 2.1, 0)]
    steps = [
        LoggedStep(begin, begin, begin, begin, end, end, 1, 0, 0, 0, 0, 1, left, 0) for begin, end, left in moments
    ]
    seen = [
        Sample(index=0, start_s=each.arrived_s - 0.002, end_s=each.first_s + 0.0018, arrivals_s=[each.first_s + 0.001],
               prompt_tokens=each.prompt_tokens)
        for each in requests
    ]  # fmt: skip
    seen[3].start_s = seen[2].end_s + 0.0001  # its user is the third's
    around = time_around(StepLogFile(ENGINE, steps, requests), [ProfileLoad("some", 2, seen)])
    assert around.front_s == pytest.approx(0.002 + 0.0005, abs=1e-5)
    assert around.front_scatter_s == pytest.approx([0.0, requests[3].arrived_s - seen[3].start_s - 0.002], abs=1e-6)
    # The first of them is followed by the third's request, which was sent before the second answer ended.
    assert around.turns_s[0] == pytest.approx(0.0009, abs=1e-5)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """`tonle profile` of a tiny model."""
    folder = tmp_path_factory.mktemp("profile")
    save_folder("llama", folder / "tiny")
    words = [
        "profile",
        str(folder / "tiny"),
        "-o",
        str(folder / "p.json"),
        "--seconds",
        "2",
        "--clients",
        "2",
        "--keep",
        str(folder / "kept"),
    ]
    flags = ["--max-num-seqs", "4", "--max-num-batched-tokens", "96", "--max-model-len", "256", "--device", "cpu",
             "--dtype", "float32"]  # fmt: skip
    return CliRunner().invoke(app, [*words, "--", *flags], env={"COLUMNS": "200"}), folder


def test_a_profile_of_a_real_server_tells_its_steps(made: tuple[Any, Path]) -> None:
    result, folder = made
    assert result.exit_code == 0, result.output
    profile = load_profile(str(folder / "p.json"))
    server = profile.server
    assert (server.max_num_seqs, server.max_num_batched_tokens, server.context_length) == (4, 96, 256)
    assert (server.device, profile.times.lag) == ("cpu", 0)
    assert server.settings["max_batch_size"] == 4
    assert "step_log" not in server.settings
    log = read_step_log(folder / "kept" / "steps.jsonl")
    for rows in (1, 2, 3, 4):
        assert any(step.rows == rows and not step.prompts for step in log.steps), f"no step of {rows} rows alone"
    assert any(step.prompts and step.rows for step in log.steps)
    assert profile.times.front_s > 0
    assert profile.times.back_s > 0
    times = profile.times
    assert 0 < times.commit_s(StepWork(4, 0, 0, 100, 0, 4)) < times.host_s(StepWork(4, 0, 0, 100, 0, 4))
    assert times.turns_s and times.turns_s[0] > 0 and times.turns_s == sorted(times.turns_s)
    assert times.front_scatter_s[0] < 0 < times.front_scatter_s[-1]
    assert (
        profile.times.device_s(StepWork(4, 0, 0, 100, 0, 4)) >= profile.times.device_s(StepWork(1, 0, 0, 25, 0, 1)) > 0
    )
    assert "decode, 1 row" in result.stdout
    assert "up to 4 rows and 96 tokens in a step" in result.stdout


def _prompts(begin_s: float) -> list[LoggedStep]:
    """For two seconds: without any, there is no profile."""
    moments = (begin_s + 0.09 * place for place in range(21))
    return [LoggedStep(at, at, at + 0.09, at + 0.09, at + 0.09, at + 0.09, 0, 1, 8, 0, 0, 1, 1, 0) for at in moments]


def test_the_fit_is_judged_by_steps_it_was_not_fitted_to() -> None:
    """Steps of one and of two rows in turns, a second each, which the fit tells exactly."""
    steps = [
        LoggedStep(
            at, at, at + 0.1 * rows, at + 0.1 * rows, at + 0.1 * rows, at + 0.1 * rows, rows, 0, 0, 0, 0, rows, 1, 0
        )
        for at, rows in ((float(place), 1 + place % 2) for place in range(200))
    ]
    steps += _prompts(200.5)  # none of them is held out
    requests = [LoggedRequest(9, 0.5, 0.5, 1.0)]
    sample = Sample(index=0, start_s=0.0, end_s=200.0, arrivals_s=[1.1], prompt_tokens=9)
    fits = make_profile(StepLogFile(ENGINE, steps, requests), [ProfileLoad("some", 2, [sample])]).fits
    assert [(fit.kind, fit.steps) for fit in fits] == [("decode,   1 rows", 20), ("decode,   2 rows", 20), ("all", 40)]
    assert all(fit.p90_error < 0.01 and abs(fit.total_error) < 0.01 for fit in fits)
    assert fits[-1].seconds == pytest.approx(20 * 0.1 + 20 * 0.2)


def test_steps_of_a_spell_are_left_out_and_their_share_of_the_time_is_told() -> None:
    """The same two loads twice; the machine is half as fast for the second load's second time."""
    steps, loads, now = [], [], 0.0
    for number, (rows, factor) in enumerate(((1, 1.0), (2, 1.0), (1, 1.0), (2, 2.0))):
        begin = now
        while now < begin + 20.0:
            end = now + 0.1 * rows * factor
            steps.append(LoggedStep(now, now, end, end, end, end, rows, 0, 0, 0, 0, rows, 1, 0))
            now = end
        steps += _prompts(now)
        now += 2.0
        sample = Sample(index=number, start_s=begin, end_s=now, arrivals_s=[begin + 1.1], prompt_tokens=9)
        loads.append(ProfileLoad("some", rows, [sample], stage=number % 2))
    profile = make_profile(StepLogFile(ENGINE, steps, [LoggedRequest(9, 0.5, 0.5, 1.0)]), loads)
    assert profile.left_out == pytest.approx(0.25, abs=0.03)
    assert profile.times.device_s(StepWork(2, 0, 0, 0, 0, 2)) == pytest.approx(0.2, rel=0.02)


def _alternating(num_prompts: int) -> tuple[StepLogFile, list[ProfileLoad]]:
    steps = [
        LoggedStep(at, at, at + 0.1, at + 0.1, at + 0.1, at + 0.1, 1, int(has), 8 * has, 0, 0, 1 + has, 1, 0)
        for at, has in ((0.1 * place, place < num_prompts) for place in range(400))
    ]
    sample = Sample(index=0, start_s=0.0, end_s=40.0, arrivals_s=[1.1], prompt_tokens=9)
    return StepLogFile(ENGINE, steps, [LoggedRequest(9, 0.5, 0.5, 1.0)]), [ProfileLoad("some", 1, [sample])]


def test_a_profile_with_few_steps_of_a_kind_says_so_and_one_without_any_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"only 1 steps with prompts could be timed.*measure for longer"):
        make_profile(*_alternating(1))
    (note,) = make_profile(*_alternating(12)).notes
    assert note.startswith("only 12 steps with prompts could be timed")
    assert make_profile(*_alternating(60)).notes == []


def test_the_log_of_a_server_that_does_not_start_is_there_to_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ConfigError, match=r"the whole log: ") as raised:
        run_profile.run_profile(str(tmp_path / "no-such-model"))
    log = Path(raised.value.message.split("the whole log: ")[1].rstrip(")"))
    assert log.parent.parent == tmp_path and "no-such-model" in log.read_text()


def test_the_log_of_another_server_is_found_out(made: tuple[Any, Path]) -> None:
    log = read_step_log(made[1] / "kept" / "steps.jsonl")
    other = Sample(index=0, start_s=0.0, end_s=1.0, arrivals_s=[0.5], prompt_tokens=7)
    with pytest.raises(ConfigError, match="is it the log of this server"):
        make_profile(log, [ProfileLoad("alone", 1, [other])])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--url", "http://127.0.0.1:1"], "--url and --step-log go together"),
        (["m", "--url", "http://127.0.0.1:1", "--step-log", "x"], "MODEL and flags are for a server that is started"),
        (["--url", "http://127.0.0.1:1", "--step-log", "/nowhere/x"], "cannot read the step log"),
        (["--seconds", "0"], "--seconds must be between"),
        (["-o", "/nowhere/p.json"], "there is no folder /nowhere"),
        (["-o", "/"], "cannot write /: name a file"),
        (["--", "--port", "80"], "--port does not go with a profile"),
        (["--compare", "no-such"], "cannot read the profile no-such"),
    ],
)
def test_wrong_words_end_with_status_2_and_say_what_to_do(words: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["profile", *words])
    assert result.exit_code == 2
    assert message in result.output


def test_a_server_that_speculates_is_not_profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class DrivenError(Exception): ...

    def drive(*args: Any, **more: Any) -> None:
        raise DrivenError

    monkeypatch.setattr(run_profile, "drive", drive)

    def profile(**settings: Any) -> None:
        StepLog(tmp_path / "steps", msgspec.structs.replace(ENGINE, settings=settings)).close()
        run_profile.profile_running("http://127.0.0.1:1", tmp_path / "steps", seconds=0.1)

    wrong: list[dict[str, Any]] = [{}, {"speculation": "suffix"}, {"enable_speculative_decoding": True}]
    for settings in wrong:
        with pytest.raises(ConfigError, match="--speculation off"):
            profile(**settings)
    with pytest.raises(DrivenError):
        profile(speculation="off")


@pytest.mark.parametrize(("error", "is_told"), [(0.05, False), (0.2, True)])
def test_a_fit_that_is_far_off_is_told(
    error: float, is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit = Fit(kind="all", steps=900, seconds=9.0, median_error=error, p90_error=2 * error, total_error=0.0)
    found = msgspec.structs.replace(PROFILE, fits=[fit], left_out=0.2)
    monkeypatch.setattr(run_profile, "run_profile", lambda *args, **more: found)
    result = CliRunner().invoke(app, ["profile", "-o", str(tmp_path / "p.json")], env={"COLUMNS": "400"})
    assert result.exit_code == 0
    assert ("did other programs run on this machine?" in result.output) is is_told
    assert "Left out: 20% of the steps' time" in result.output


def test_flags_that_bring_guesses_back_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a flag that is there twice, the last one counts."""

    class Started:
        url = "http://127.0.0.1:1"

        def __enter__(self) -> Started:
            return self

        def __exit__(self, *error: object) -> None:
            pass

    def start(model: str | None, flags: list[str], **options: Any) -> Started:
        assert flags.index("off") < flags.index("suffix")
        settings = {"speculation": flags[flags.index("suffix")]}
        StepLog(tmp_path / "steps.jsonl", msgspec.structs.replace(ENGINE, settings=settings)).close()
        return Started()

    monkeypatch.setattr(run_profile.ServerProcess, "tonle", start)
    monkeypatch.setattr(run_profile, "drive", lambda *a, **k: pytest.fail("loads were sent"))
    with pytest.raises(ConfigError, match="a server with these flags may speculate"):
        run_profile.run_profile(None, ["--speculation", "suffix"], keep=tmp_path)
