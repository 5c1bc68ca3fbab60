"""Adapters in settings: one reader for flags, variables and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tonle.config.load_settings import load
from tonle.errors import ConfigError

TWO = (("khmer-qa", "/a/khmer"), ("org/med", "/a/med"))


@pytest.mark.parametrize(
    "value",
    [
        ["khmer-qa=/a/khmer", "org/med=/a/med"],
        "khmer-qa=/a/khmer,org/med=/a/med",
        " khmer-qa = /a/khmer , org/med = /a/med ",
        {"khmer-qa": "/a/khmer", "org/med": "/a/med"},
        '{"khmer-qa": "/a/khmer", "org/med": "/a/med"}',
        [{"name": "khmer-qa", "path": "/a/khmer"}, "org/med=/a/med"],
        '[{"name": "khmer-qa", "path": "/a/khmer", "base_model_name": "b"}, {"name": "org/med", "path": "/a/med"}]',
        ['{"name": "khmer-qa", "path": "/a/khmer"}', '{"name": "org/med", "path": "/a/med"}'],
    ],
)
def test_all_spellings_mean_the_same(value: Any) -> None:
    config = load({"lora": value}, environ={})
    assert config.lora == TWO
    assert config.engine().lora == dict(TWO)
    if isinstance(value, str):
        assert load({}, environ={"TONLE_LORA": value}).lora == TWO


def test_a_path_may_have_commas_and_equals_signs() -> None:
    assert load({"lora": ["a=/x,y", "b=/k=v"]}, environ={}).lora == (("a", "/x,y"), ("b", "/k=v"))


def test_a_file_has_a_mapping(tmp_path: Path) -> None:
    file = tmp_path / "tonle.yaml"
    file.write_text("lora:\n  khmer-qa: /a/khmer\n  org/med: /a/med\nmax_loras: 2\n")
    config = load({}, file=file, environ={})
    assert (config.lora, config.engine().max_loras) == (TWO, 2)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("x", "^--lora must be NAME=PATH, for example khmer-qa=/adapters/khmer-qa, not 'x'$"),
        ("a=", "NAME=PATH"),
        ("=/p", "NAME=PATH"),
        ("{", 'NAME=PATH or {"name": NAME, "path": PATH}, for example'),
        ({"a": 1}, "NAME=PATH"),
        (7, "NAME=PATH"),
        (["a=/x", "a=/y"], "a is there twice"),
        ("/etc/passwd=/x", "neither a path nor a URL"),
        ("https://host/a=/x", "neither a path nor a URL"),
        ("a b=/x", "neither a path nor a URL"),
    ],
)
def test_what_cannot_be_read_is_told(value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load({"lora": value}, environ={})


def test_an_adapter_cannot_have_the_models_name() -> None:
    with pytest.raises(ConfigError, match="the model itself is served under that name"):
        load({"lora": "m=/x", "served_model_name": "m"}, environ={})
