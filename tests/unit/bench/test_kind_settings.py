"""Which settings each kind of requests takes, from Python and from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

from tests.unit.bench.kind_server import kinds
from tests.unit.bench.scripted import serving
from tonle.bench import BenchOptions, Span
from tonle.bench.kinds.metrics import METRICS, RequestKind
from tonle.bench.kinds.settings import CHAT_SETTINGS, KIND_SETTINGS, PATHS
from tonle.bench.kinds.workload import ITEMS, SENTENCES
from tonle.bench.options import Pause
from tonle.bench.slo import Slo
from tonle.cli.bench import KindName, bench
from tonle.errors import ConfigError

runner = CliRunner()


def test_the_tables_know_every_kind() -> None:
    known = set(get_args(RequestKind))
    assert set(METRICS) == {kind.value for kind in KindName} == known
    assert set(PATHS) == known - {"chat"}
    assert (set(ITEMS), set(SENTENCES)) == (set(KIND_SETTINGS["items"]), set(KIND_SETTINGS["sentences"]))
    fields = set(BenchOptions.__dataclass_fields__)
    assert set(CHAT_SETTINGS) - {"preset"} <= fields and set(KIND_SETTINGS) <= fields


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"kind": "asr", "output_tokens": Span(5, 5)}, "output_tokens is for chats"),
        ({"kind": "embeddings", "turns": Span(2, 2)}, "turns is for chats"),
        ({"kind": "images", "temperature": 0.5}, "temperature is for chats"),
        ({"kind": "tts", "items": Span(2, 2)}, "items is for requests of kind embeddings, rerank, images, not of kind tts"),
        ({"kind": "tts", "audio_seconds": Pause(1, 2)}, "audio_seconds is for requests of kind asr"),
        ({"items": Span(2, 2)}, "not of kind chat"),
        ({"kind": "asr", "sentences": Span(2, 2)}, "not of kind asr"),
        ({"kind": "images", "items": Span(0, 2)}, "items 0-2 must be at least 1"),
        ({"kind": "asr", "audio_seconds": Pause(0, 2)}, "more than 0"),
        ({"kind": "asr", "audio_seconds": Pause(1, 9999)}, "at most 3600"),
        ({"kind": "asr", "audio_seconds": Pause(1, 2), "file": Path("x")}, "not for a folder's"),
        ({"kind": "tts", "sentences": Span(1, 2), "file": Path("x")}, "not for a file's"),
        ({"kind": "tts", "extra_body": {"input": "x"}}, "'input'"),
        ({"kind": "asr", "extra_body": {"file": "x"}}, "'file'"),
        ({"extra_body": {"messages": []}}, "'messages'"),
        ({"kind": "embeddings", "slo": Slo.parse(["ttft-p95=1s"])}, "have no TTFT.*E2EL"),
        ({"kind": "tts", "slo": Slo.parse(["itl-p95=1s"])}, "TTFT or E2EL"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        BenchOptions(**settings).validate()


def test_settings_that_do() -> None:
    BenchOptions(kind="tts", file=Path("khmer"), sentences=Span(1, 3), slo=Slo.parse(["ttft-p95=1s"])).validate()
    BenchOptions(kind="rerank", items=Span(2, 50), extra_body={"top_n": 3}, rates=(2.0,)).validate()


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["--kind", "asr", "--output-tokens", "64"], "output_tokens is for chats"),  # though 64 is the default
        (["--kind", "asr", "--temperature", "0"], "temperature is for chats"),
        (["--kind", "tts", "--preset", "chat"], "preset is for chats"),
        (["--kind", "images", "--replay", "audit"], "replay is for chats"),
        (["--kind", "asr", "--max-tokens", "5"], "--max-tokens"),
        (["--items", "3"], "items is for requests of kind"),
        (["--kind", "images", "--items", "many"], "items is a number"),
        (["--kind", "asr", "--audio-seconds", "long"], "audio_seconds"),
        (["--kind", "songs"], "embeddings"),
        (["--kind", "asr", "--dataset", "/nonexistent"], "no such folder"),
    ],
)  # fmt: skip
def test_flags_that_are_refused(args: list[str], why: str) -> None:
    result = runner.invoke(bench, args, env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert why in result.stderr


def test_a_run_from_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    with serving(kinds()) as server:
        args = ["--url", server.url, "--kind", "tts", "--requests", "3", "--ttft-p95", "60s", "--json", str(path)]
        held = runner.invoke(bench, args)
        missed = runner.invoke(bench, [*args, "--e2el-p99", "1ms"])
    assert held.exit_code == 0, held.output
    assert missed.exit_code == 1
    assert "RTFx" in held.stdout and "first audio" in held.stdout and "TPOT" not in held.stdout
    assert "3/3 answered" in held.stderr and "req/s" in held.stderr
    document = json.loads(path.read_text())
    assert (document["request_kind"], document["settings"]["kind"]) == ("tts", "tts")
