"""Commands and settings files that can be used as they are printed."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.unit.advise.cases import CHAT, question
from tonle.advise.advice import Advice, advise
from tonle.advise.choose import Question
from tonle.config.load_settings import load, load_deploy, load_gateway
from tonle.deploy.render import render
from tonle.deploy.workload import Workload


def advice_of(asked: Question) -> Advice:
    return advise(asked, simulated=False)


def written(advice: Advice, folder: Path) -> dict[str, Path]:
    paths = {name: folder / name for name in advice.settings_files}
    for name, text in advice.settings_files.items():
        paths[name].write_text(text)
    return paths


def test_a_settings_file_starts_a_server_and_renders(tmp_path: Path) -> None:
    advice = advice_of(question("Qwen/Qwen2.5-7B-Instruct", "H200", CHAT, slo=("itl-p99=20ms",)))
    path = written(advice, tmp_path)["tonle.yaml"]
    settings = advice.groups[0].settings
    serve = load({}, file=path, environ={})
    assert (serve.max_num_seqs, serve.max_num_batched_tokens) == (
        settings.max_num_seqs,
        settings.max_num_batched_tokens,
    )
    assert serve.long_prefill_token_threshold == settings.long_prefill_token_threshold
    files = render("kubernetes", Workload.of(*load_deploy({}, file=path)))
    assert any(f"--max-num-seqs={settings.max_num_seqs}" in file.text for file in files)


def test_length_classes_come_with_a_file_for_each_and_one_for_the_gateway(tmp_path: Path) -> None:
    advice = advice_of(question(rate=4.0, slo=("itl-p99=250ms",)))
    paths = written(advice, tmp_path)
    gateway = load_gateway({}, file=paths["gateway.yaml"], environ={})
    assert gateway.length_threshold == 5000
    for group in advice.groups:
        own = [backend for backend in gateway.backends if backend.length == group.length]
        assert len(own) == group.replicas
        assert {backend.max_concurrent for backend in own} == {group.settings.max_num_seqs}
        serve, deploy = load_deploy({}, file=paths[f"tonle-{group.length}.yaml"])
        assert (deploy.engine, deploy.gpus, deploy.min_replicas) == ("vllm", 2, group.replicas)
        assert serve.max_num_seqs == group.settings.max_num_seqs
        assert render("kubernetes", Workload.of(serve, deploy))


@pytest.mark.parametrize(
    ("asked", "start"),
    [
        (question("qwen2.5-7b", "H200", CHAT), "tonle serve MODEL --max-model-len 1024"),
        (question("qwen2.5-7b", "H200", CHAT, engine="vllm"), "vllm serve FP8_CHECKPOINT --max-model-len 1024"),
        (question(), "vllm serve FP8_CHECKPOINT --tensor-parallel-size 2 --max-model-len 22528"),
        (question(precisions=("bf16",)), "vllm serve MODEL --tensor-parallel-size 4"),
        (question("Qwen/Qwen2.5-7B", "MI300X", CHAT, precisions=("bf16",)), "vllm serve Qwen/Qwen2.5-7B"),
        (question("Qwen/Qwen2.5-7B-AWQ", "H200", CHAT), "vllm serve Qwen/Qwen2.5-7B-AWQ"),
    ],
)
def test_the_command_of_a_server(asked: Question, start: str) -> None:
    lines = [line for line in advice_of(asked).commands if not line.startswith("#")]
    assert lines[0].startswith(start)
    assert "--max-concurrent" in lines[1]


def test_flags_are_those_of_the_verbs() -> None:
    """A flag that `tonle serve` or `tonle gateway` does not have would be refused by a person's shell, not here."""
    from typer.testing import CliRunner

    from tonle.cli.app import app

    for line in advice_of(question("qwen2.5-7b", "H200", CHAT, users=300)).commands:
        words = shlex.split(line)
        if words[:1] == ["tonle"]:
            verb = words[1 : 3 if words[1] == "deploy" else 2]
            shown = CliRunner().invoke(app, [*verb, "--help"], env={"COLUMNS": "200"})
            for word in words:
                assert not word.startswith("--") or word in shown.stdout, line
