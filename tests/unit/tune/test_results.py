"""The files that a tuning leaves: settings and limits go through the real loaders, the report is whole, commands are right."""

from __future__ import annotations

import html.parser
import json
import math
import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from tests.fakes.checkpoints import Quant, save_folder, save_gguf
from tests.unit.tune.fake_server import SLO, USERS, Clock, FakeMeasure, FakePredict, folder_at, inputs, level, report
from tonle.bench import BenchOptions
from tonle.bench.measure import GpuReport
from tonle.bench.slo import Slo
from tonle.config.load_settings import load, load_gateway
from tonle.errors import ConfigError, TonleError
from tonle.simulate.profile import load_profile
from tonle.tune import tuning
from tonle.tune.budget import Budget
from tonle.tune.objective import Goal, outcome_of
from tonle.tune.options import TuneOptions
from tonle.tune.page import render_page
from tonle.tune.results import TuneResult, headline, short_reason, summary, write_results
from tonle.tune.run import Task, Tuner
from tonle.tune.servers import CommandLauncher, TonleLauncher, model_of_command, vllm_launcher
from tonle.tune.space import Choice
from tonle.tune.state import Tag, TuneDir
from tonle.tune.tuning import Known, result_of, run_tune

KNOBS = [Choice("max_num_seqs", (8, 12), simulated=True), Choice("max_num_batched_tokens", (128, 256), simulated=True)]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> TuneResult:
    folder, clock = folder_at(tmp_path_factory.mktemp("tune") / "out"), Clock()
    budget = Budget(600, clock=clock)
    task = Task(bench=BenchOptions(concurrency=(USERS,)), goal=Goal(SLO), knobs=KNOBS)
    predict = FakePredict(clock)
    tuner = Tuner(task, folder, FakeMeasure(folder, clock, slow=1.1), budget, lambda text: None, predict)
    tuner.run()
    options = TuneOptions(bench=task.bench, goal=task.goal, out=folder.path)
    return result_of(options, folder, budget, tuner, Known(TonleLauncher(None), KNOBS, [], predict))


def test_the_best_settings_load_as_a_server_reads_them(result: TuneResult, tmp_path: Path) -> None:
    assert result.settings == {"max_num_seqs": 12, "max_num_batched_tokens": 128}
    write_results(result, tmp_path, {"kv_cache_memory": "1GiB", "max_num_seqs": 64})
    config = load({}, file=tmp_path / "best.yaml", environ={})
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (12, 128)  # over what the user's file says
    assert config.kv_cache_memory_bytes == 1024**3
    text = (tmp_path / "best.yaml").read_text()
    assert "# default → tuned: TTFT p95" in text and "tonle serve --config" in text


def test_the_model_of_the_command_line_goes_over_that_of_the_file(result: TuneResult, tmp_path: Path) -> None:
    named = msgspec.structs.replace(result, inputs=msgspec.structs.replace(result.inputs, model="org/mine"))
    write_results(named, tmp_path, {"model": "org/other", "api_key": "secret"})
    written = yaml.safe_load((tmp_path / "best.yaml").read_text())
    assert written["model"] == "org/mine" and written["api_key"] == "secret"
    assert (tmp_path / "best.yaml").stat().st_mode & 0o077 == 0  # a key is in it
    assert "secret" not in (tmp_path / "result.json").read_text()


def test_a_server_that_does_not_start_is_told_in_one_line(result: TuneResult) -> None:
    reason = (
        "vllm serve m --port 1\nended (exit code 1) before it was ready; its last lines of output:\n    INFO: hello\n"
        "    ValueError: a|b\n(the whole log: x.log)"
    )
    assert short_reason(reason) == "ended (exit code 1) before it was ready: ValueError: a|b"
    assert short_reason("no request was answered: timeout") == "no request was answered: timeout"
    failed = msgspec.structs.replace(result, failed={"max_num_seqs=1": reason})
    assert "ready: ValueError: a\\|b | – |" in summary(failed)
    assert "ValueError: a|b" in render_page(failed)


def test_a_default_that_does_not_start_is_an_error_with_its_reason(tmp_path: Path) -> None:
    options = TuneOptions(
        bench=BenchOptions(), goal=Goal(SLO), out=tmp_path / "out", server="other",
        command="sh -c 'echo no such model; exit 3' {port} {slots}", values={"slots": (1, 2)},
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"default settings(.|\n)*exit code 3(.|\n)*no such model"):
        run_tune(options)


def test_the_limits_load_as_a_gateway_reads_them(result: TuneResult, tmp_path: Path) -> None:
    write_results(result, tmp_path, {})
    config = load_gateway({}, file=tmp_path / "gateway.yaml", environ={})
    assert result.limits is not None and result.safe is not None
    assert config.max_concurrent == result.limits.max_concurrent == result.safe.value
    assert (config.max_queued, config.max_queued_tokens) == (result.limits.max_queued, result.limits.max_queued_tokens)


def test_limits_of_other_settings_are_not_left_there(result: TuneResult, tmp_path: Path) -> None:
    """A tuning that goes on and is stopped has found no safe load of what is now the best."""
    write_results(result, tmp_path, {})
    write_results(msgspec.structs.replace(result, safe=None, limits=None, interrupted=True), tmp_path, {})
    assert (tmp_path / "best.yaml").exists() and not (tmp_path / "gateway.yaml").exists()


def test_a_result_is_read_back_and_told_in_words(result: TuneResult, tmp_path: Path) -> None:
    write_results(result, tmp_path, {})
    again = msgspec.json.decode((tmp_path / "result.json").read_bytes(), type=TuneResult)
    assert again == result
    text = summary(result)
    assert headline(result) in text and "| default |" in text and "Safe load: " in text
    assert headline(result).startswith(
        "The best settings found are max_num_seqs 12, max_num_batched_tokens 128: they hold the SLO"
    )
    assert result.verdict is not None
    kept = msgspec.structs.replace(
        result, settings={}, verdict=msgspec.structs.replace(result.verdict, is_better=False)
    )
    assert headline(kept).startswith("Keep the default settings. The best others found, max_num_seqs 12")
    write_results(kept, tmp_path, {})
    assert load({}, file=tmp_path / "best.yaml", environ={}).max_num_seqs is None


def test_use_and_memory_of_gpus_are_told_where_they_were_read(result: TuneResult) -> None:
    assert "GPU" not in summary(result) and "GPU" not in render_page(result)
    first = result.candidates[0]
    made = report(level(first.settings))
    gpus = [GpuReport(name="G", utilization=0.83, memory_used=61 * 2**30, memory_total=80 * 2**30)]
    measured = outcome_of([msgspec.structs.replace(made.levels[0], gpus=gpus)], SLO)
    with_gpu = msgspec.structs.replace(
        result, candidates=[msgspec.structs.replace(first, measured=measured), *result.candidates[1:]]
    )
    assert "GPU 83.0 % busy, 61.0 GiB" in summary(with_gpu)
    page = render_page(with_gpu)
    for text in ("GPU busy", "GPU memory", "83.0 %", "61.0 GiB"):
        assert text in page, text


class Tags(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


def test_the_report_is_one_file_with_a_picture(result: TuneResult) -> None:
    evil = msgspec.structs.replace(result, notes=["<script>alert(1)</script>"])
    page = render_page(evil)
    tags = Tags()
    tags.feed(page)
    names = [name for name, _ in tags.seen]
    assert names.count("svg") == 1 and names.count("circle") == len(result.trials) + len(result.candidates)
    assert "script" not in names and not [name for name, values in tags.seen if {"src", "href"} & set(values)]
    numbers = [
        float(value or "nan")
        for name, values in tags.seen
        if name == "circle"
        for value in (values["cx"], values["cy"])
    ]
    assert all(math.isfinite(number) and 0 <= number <= 720 for number in numbers)
    assert "−" in page and "95 % interval" in page


def test_a_folder_belongs_to_one_tuning(tmp_path: Path) -> None:
    first = folder_at(tmp_path / "out")
    other = msgspec.structs.replace(inputs(), load="concurrency 99")
    assert TuneDir.open(tmp_path / "out", other, "").state.inputs == other  # nothing was measured: nothing is lost
    first.add(Tag(server={}, stage="search", round=0, startup_s=1.0), report(level({})))
    with pytest.raises(ConfigError, match=r"load: concurrency 16, now concurrency 99.*another --out"):
        TuneDir.open(tmp_path / "out", other, "")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("do not touch")
    with pytest.raises(ConfigError, match="no folder of `tonle tune`"):
        folder_at(tmp_path / "mine")
    (tmp_path / "out" / "state.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot read"):
        folder_at(tmp_path / "out")


# -- commands


def test_vllm_gets_its_own_flags_and_a_port() -> None:
    launcher = vllm_launcher("vllm serve org/model --dtype bfloat16")
    launcher.validate()
    words = launcher.words({"max_num_seqs": 64, "long_prefill_token_threshold": 256}, 8123)
    assert shlex.join(words) == (
        "vllm serve org/model --dtype bfloat16 --port 8123 --max-num-seqs 64 --long-prefill-token-threshold 256"
    )
    assert model_of_command("vllm serve org/model --dtype bfloat16") == "org/model"
    with pytest.raises(ConfigError, match="leave --port out"):
        vllm_launcher("vllm serve m --port 8000")


def test_places_in_any_other_command() -> None:
    launcher = CommandLauncher(
        "llama-server -m 'a b.gguf' --port {port} -np {slots} -b{batch}", {"slots": 4, "batch": 512}
    )
    launcher.validate()
    assert launcher.words({}, 9) == ["llama-server", "-m", "a b.gguf", "--port", "9", "-np", "4", "-b512"]
    assert launcher.words({"slots": 8}, 9)[6] == "8"
    with pytest.raises(ConfigError, match=r"place \{slots\} without values; add --values slots="):
        CommandLauncher("x {slots}").validate()
    with pytest.raises(ConfigError, match="is empty"):
        CommandLauncher("  ").validate()


def test_a_measured_server_has_no_keys_and_no_audit_trail(tmp_path: Path) -> None:
    config = {
        "api_key": ["secret"],
        "audit_dir": "trail",
        "port": 9,
        "max_model_len": 512,
        "frontends": 2,
        "model": "m",
    }
    launcher = TonleLauncher(None, config, tmp_path)
    assert launcher.measured_config == {"max_model_len": 512, "frontends": 2, "model": "m"}
    assert launcher.left_out == ["api_key", "audit_dir", "port"]
    assert launcher.config_flags() == ["--config", str(tmp_path / "server.yaml")]
    assert load({}, file=tmp_path / "server.yaml", environ={}).max_model_len == 512


# -- options


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget_s": 20}, "two minutes are the least"),
        ({"command": "vllm serve x"}, "--command is for other servers"),
        ({"server": "vllm"}, '--server vllm needs --command "vllm serve MODEL'),
        (
            {"server": "vllm", "command": 'vllm serve "model'},
            "--command cannot be read as a command line: No closing quotation",
        ),
        ({"server": "vllm", "command": "vllm serve x", "model": "x"}, "part of --command"),
        ({"server": "vllm", "command": "vllm serve x", "profile": "p"}, "--profile is for Tonle's own server"),
        ({"bench": BenchOptions(concurrency=(1, 2))}, "one load, not several"),
        ({"allow": ("speed",)}, "--allow takes kv-dtype, quantization, speculation, not speed"),
        ({"goal": Goal(Slo())}, "say what to tune for"),
        (
            {"values": {"max_num_seqs": ("a", "b")}},
            "--values max_num_seqs: must be a whole number, at least 1, not 'a'",
        ),
        ({"values": {"max_num_seqs": (0,)}}, "--values max_num_seqs: must be a whole number, at least 1, not 0"),
        ({"values": {"max_num_batched_tokens": (-5, 64)}}, "--values max_num_batched_tokens: must be"),
        (
            {"values": {"max_num_seqs": ("none",)}},
            "--values max_num_seqs: 'none' is the default, which is always tried",
        ),
        ({"values": {"nosuch": (3,)}}, "does not search nosuch"),
        (
            {"server": "vllm", "command": "vllm serve x", "values": {"max_num_seqs": ("a",)}},
            "--values max_num_seqs: must be a whole number",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    given: dict[str, object] = {"bench": BenchOptions(), "goal": Goal(SLO), "out": tmp_path / "out", **changes}
    with pytest.raises(ConfigError, match=message):
        TuneOptions(**given).validate()  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bench": BenchOptions(replay=Path("/nope"))}, "/nope"),
        ({"bench": BenchOptions(file=Path("nofile.jsonl"))}, "nofile.jsonl"),
        ({"profile": "llama-3.2-3b-h200"}, "a profile of NVIDIA H200.*, and this server computes on cpu"),
    ],
)
def test_inputs_that_are_wrong_are_found_before_a_server_is_started(
    changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: object, **__: object) -> Any:
        raise AssertionError("a server was started")

    monkeypatch.setattr(tuning, "run_profile", started)
    monkeypatch.setattr(tuning, "_has_gpu", lambda: False)
    options = TuneOptions(**{"bench": BenchOptions(), "goal": Goal(SLO), "out": tmp_path / "out", **changes})
    with pytest.raises(TonleError, match=message):
        run_tune(options)
    assert not (tmp_path / "out").exists()


def test_weights_that_are_quantized_already_are_not_quantized_again(tmp_path: Path) -> None:
    plain, quantized = tmp_path / "plain", tmp_path / "quantized"
    save_folder("llama", plain)
    save_folder("llama", quantized)
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    save_gguf("llama", tmp_path / "q.gguf", quant=Quant.Q8_0)
    save_gguf("llama", tmp_path / "f.gguf")
    for model, settings, said in (
        (None, {}, r"the weights of SmolLM2-135M-Instruct are quantized already \(Q4_1\)"),
        (None, {"model": str(quantized)}, r"are quantized already \(int4\)"),
        (str(tmp_path / "q.gguf"), {}, r"are quantized already \(Q8_0\)"),
        (str(plain), {"quantization": "int8"}, "the settings file has a quantization"),
    ):
        with pytest.raises(ConfigError, match=said):
            tuning.check_quantization(model, settings)
    for model in (str(plain), str(tmp_path / "f.gguf"), "org/not-fetched"):
        tuning.check_quantization(model, {})


@pytest.mark.parametrize(
    ("model", "config", "is_another"),
    [
        (None, {}, False),
        ("/models/SmolLM2-135M-Instruct", {}, False),
        ("SmolLM2-135M-Instruct.gguf", {}, False),
        ("org/SmolLM2-135M-Instruct", {}, False),
        ("org/other", {}, True),
        (None, {"model": "org/other"}, True),
    ],
)
def test_a_profile_of_another_model_is_noted(model: str | None, config: dict[str, Any], is_another: bool) -> None:
    note = tuning.other_model_note(load_profile("smollm2-135m-cpu"), model, config)
    assert (note is not None) == is_another
    if note is not None:
        assert "the profile is of SmolLM2-135M-Instruct, and the model is org/other" in note
