"""Settings: what is read, what is refused, what a level is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from tonle.bench import BenchOptions, BenchReport, LevelReport, Load, Span
from tonle.bench.datasets.presets import PRESETS
from tonle.bench.options import parse_numbers, parse_ramp
from tonle.bench.sweep import Saturation
from tonle.cli.bench import bench
from tonle.cli.bench_data import REPLAY_PANEL
from tonle.cli.slo_flags import PANEL
from tonle.errors import ConfigError


def test_spans() -> None:
    assert Span.parse("128", "x") == Span(128, 128)
    assert Span.parse(" 32 - 400 ", "x") == Span(32, 400)
    assert str(Span(32, 400)) == "32-400"
    assert str(Span(5, 5)) == "5"


@pytest.mark.parametrize("text", ["", "a", "1-", "-3", "1-2-3", "1.5"])
def test_what_is_no_span(text: str) -> None:
    with pytest.raises(ConfigError, match="input_tokens"):
        Span.parse(text, "input_tokens")


def test_lists_of_numbers() -> None:
    assert parse_numbers("1,4, 16", "x") == (1, 4, 16)
    with pytest.raises(ConfigError, match="concurrency"):
        parse_numbers("1,,2", "concurrency")
    with pytest.raises(ConfigError, match="concurrency"):
        parse_numbers("1,inf", "concurrency")


def test_a_level_per_number_of_users_or_per_rate() -> None:
    assert [load.label for load in BenchOptions(concurrency=(1, 16)).levels] == ["concurrency 1", "concurrency 16"]
    assert [load.label for load in BenchOptions(rates=(0.5,)).levels] == ["rate 0.5/s"]


def test_open_loops_know_their_gaps() -> None:
    assert BenchOptions(rates=(2.0,), burstiness=0.5).levels == [Load("rate", 2.0, arrivals="gamma", burstiness=0.5)]
    assert BenchOptions(rates=(2.0,), arrivals="constant").levels == [Load("rate", 2.0, arrivals="constant")]
    assert BenchOptions(ramp=(1.0, 9.0), duration_s=4.0).levels == [Load("ramp", 1.0, 9.0)]
    assert BenchOptions(ramp=(1.0, 9.0), duration_s=4.0).num_requests(Load("ramp", 1.0, 9.0)) is None


def test_a_sweep_starts_where_it_is_told_to() -> None:
    loads = [
        BenchOptions(sweep="rate").new_sweep().next_load(),
        BenchOptions(sweep="rate", rates=(4.0,), arrivals="constant").new_sweep().next_load(),
        BenchOptions(sweep="concurrency", concurrency=(8,)).new_sweep().next_load(),
    ]
    assert loads == [Load("rate", 1.0), Load("rate", 4.0, arrivals="constant"), Load("concurrency", 8)]
    assert BenchOptions(sweep="rate").levels == []


def test_ramps_are_read() -> None:
    assert parse_ramp(" 0.5 - 8", "ramp") == (0.5, 8.0)
    for text in ("5", "a-b", "1-2-3", "-1-2"):
        with pytest.raises(ConfigError, match="two rates such as 1-20"):
            parse_ramp(text, "ramp")


def test_how_many_requests_a_level_has() -> None:
    one, many, rate = Load("concurrency", 1), Load("concurrency", 16), Load("rate", 2.0)
    assert [BenchOptions().num_requests(load) for load in (one, many, rate)] == [8, 64, 40]
    assert BenchOptions(requests=5).num_requests(many) == 5
    assert BenchOptions(duration_s=3.0).num_requests(many) is None
    assert BenchOptions(duration_s=3.0, requests=7).num_requests(many) == 7


def test_full_length_answers_are_the_default_of_synthetic_prompts_only() -> None:
    assert BenchOptions().ignores_eos
    assert not BenchOptions(file=Path("x")).ignores_eos
    assert BenchOptions(file=Path("x"), ignore_eos=True).ignores_eos
    assert not BenchOptions(ignore_eos=False).ignores_eos


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"concurrency": ()}, "concurrency"),
        ({"concurrency": (1, 0)}, "concurrency"),
        ({"rates": (float("inf"),)}, "rate"),
        ({"ramp": (1.0, 5.0)}, "ramp"),  # no duration
        ({"ramp": (2.0, 2.0), "duration_s": 5.0}, "ramp"),
        ({"ramp": (-1.0, 2.0), "duration_s": 5.0}, "ramp"),
        ({"ramp": (1.0, 2.0), "duration_s": 5.0, "rates": (1.0,)}, "ramp"),
        ({"arrivals": "gamma"}, "arrivals"),
        ({"rates": (1.0,), "burstiness": 0.0}, "burstiness"),
        ({"rates": (1.0,), "burstiness": 0.5, "arrivals": "constant"}, "burstiness"),
        ({"sweep": "concurrency", "rates": (1.0,)}, "sweep"),
        ({"sweep": "rate", "rates": (1.0, 2.0)}, "sweep"),
        ({"sweep": "rate", "max_levels": 1}, "max_levels"),
        ({"processes": 0}, "processes"),
        ({"requests": 0}, "requests"),
        ({"duration_s": 0.0}, "duration"),
        ({"timeout_s": float("nan")}, "timeout"),
        ({"warmup": -1}, "warmup"),
        ({"shared_prefix_tokens": -1}, "shared_prefix_tokens"),
        ({"input_tokens": Span(0, 4)}, "input_tokens"),
        ({"output_tokens": Span(9, 4)}, "output_tokens"),
        ({"extra_body": {"stream": False}}, "extra_body"),
        ({"prompt_kind": "ids", "endpoint": "chat"}, "prompt_kind"),
        ({"file": Path("x"), "shared_prefix_tokens": 3}, "file"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        BenchOptions(**changes).validate()
    assert caught.value.param == param


def test_the_key_is_not_shown() -> None:
    assert "secret" not in repr(BenchOptions(api_key="secret"))


def test_the_page_has_every_flag_of_load_and_data_and_every_field_of_the_report() -> None:
    page = (Path(__file__).parents[3] / "docs" / "benchmarking.md").read_text()
    panels = ("Load", PANEL, "Prompts", REPLAY_PANEL)
    params = [param for param in get_command(bench).params if getattr(param, "rich_help_panel", "") in panels]
    flags = [flag for param in params for flag in param.opts]
    assert len(flags) > 15
    for flag in flags:
        assert f"`{flag}" in page or f" {flag} " in page, flag
    for preset in PRESETS:
        assert f"| `{preset}` |" in page, preset
    for name in (*LevelReport.__struct_fields__, *BenchReport.__struct_fields__, *Saturation.__struct_fields__):
        assert f"`{name}`" in page, name
