"""What the files of a model say about its use, and the errors of files that say something else."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.encoders import save_modules, save_tokenizer
from tonle.errors import ConfigError, ModelError
from tonle.workers.encoders.folder import find_folder, read_folder
from tonle.workers.encoders.spec import read_spec

BERT = {"model_type": "bert", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 48, "max_position_embeddings": 66}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(BERT))
    (tmp_path / "model.safetensors").write_bytes(b"")
    save_tokenizer(tmp_path / "tokenizer.json")
    return tmp_path


def test_a_bare_model_is_pooled_by_the_mean(folder: Path) -> None:
    found = read_folder(folder)
    assert (found.pooling, found.dense, found.max_tokens, found.matryoshka) == (("mean",), (), None, None)


@pytest.mark.parametrize(
    ("config", "modes"),
    [({"pooling_mode_cls_token": True}, ("cls",)), ({"pooling_mode": "lasttoken"}, ("last",)),
     ({"pooling_mode": ["mean", "cls"]}, ("cls", "mean")),
     ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, ("max", "mean"))],
)  # fmt: skip
def test_pooling_is_read(config: dict[str, Any], modes: tuple[str, ...], folder: Path) -> None:
    save_modules(folder, config, prompts={"query": "q: "}, max_tokens=16)
    found = read_folder(folder)
    assert (found.pooling, found.max_tokens, found.prompts) == (modes, 16, {"query": "q: "})


@pytest.mark.parametrize(
    ("config", "words"),
    [({"pooling_mode": "weightedmean"}, "weightedmean cannot be served"), ({}, "of no kind cannot be served"),
     ({"pooling_mode": "mean", "include_prompt": False}, "include_prompt")],
)  # fmt: skip
def test_pooling_that_cannot_be_served(config: dict[str, Any], words: str, folder: Path) -> None:
    save_modules(folder, config)
    with pytest.raises(ModelError, match=words):
        read_folder(folder)


@pytest.mark.parametrize(
    ("modules", "words"),
    [([{"type": "x.WeightedLayerPooling", "path": ""}], "WeightedLayerPooling cannot be served"),
     ({}, "is not a list of modules"),
     ([{"type": "x.Dense", "path": "../other"}], "outside of the model's folder"), ([1], "is not a list of modules"),
     ([{"type": "x.Normalize", "path": ""}, {"type": "x.Dense", "path": "2"}], "Normalize before other modules")],
)  # fmt: skip
def test_modules_that_cannot_be_served(modules: Any, words: str, folder: Path) -> None:
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match=words):
        read_folder(folder)


def test_options_overrule_the_files(folder: Path) -> None:
    save_modules(folder, {"pooling_mode": "cls"}, max_tokens=16)
    found = read_folder(folder, {"pooling": "max", "max_tokens": 8, "matryoshka_dimensions": [16, 8]})
    assert (found.pooling, found.max_tokens, found.matryoshka) == (("max",), 8, (8, 16))
    for name, value in {"pooling": "sum", "max_tokens": 0}.items():
        with pytest.raises(ConfigError) as error:
            read_folder(folder, {name: value})
        assert error.value.param == name


def test_matryoshka_is_read(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(BERT | {"matryoshka_dimensions": [8, 16]}))
    assert read_folder(folder).matryoshka == (8, 16)
    (folder / "config.json").write_text(json.dumps(BERT | {"is_matryoshka": True}))
    assert read_folder(folder).matryoshka == ()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_file_that_is_missing_is_named(name: str, folder: Path) -> None:
    (folder / name).unlink()
    with pytest.raises(ModelError, match=f"has no {name}"):
        read_folder(folder)


def test_models_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="there is no such folder"):
        find_folder(str(tmp_path / "none"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="is not a folder"):
        find_folder(str(tmp_path / "file"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install 'tonle\[embeddings\]'"):
        find_folder(None)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"model_type": "t5"}, "'t5' cannot be served; bert"), ({"position_embedding_type": "relative_key"}, "model.onnx"),
     ({"is_decoder": True}, "is a decoder"), ({"hidden_act": "mish"}, "'mish' cannot be served"),
     ({"num_attention_heads": 5}, "make no sense"), ({"hidden_size": "x"}, "whole number as hidden_size"),
     ({"model_type": "modernbert", "rope_scaling": {"rope_type": "yarn"}}, "rope_scaling"),
     ({"model_type": "modernbert", "layer_types": ["full_attention"]}, "2 layers, but layer_types speaks of 1")],
)  # fmt: skip
def test_configs_that_cannot_be_served(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        read_spec(BERT | change)


def test_old_and_new_configs_of_modernbert_mean_the_same() -> None:
    modern = BERT | {"model_type": "modernbert", "num_hidden_layers": 4}
    old = read_spec(modern | {"global_attn_every_n_layers": 2, "global_rope_theta": 5e4, "local_rope_theta": 1e3})
    new = read_spec(modern | {
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "rope_parameters": {"full_attention": {"rope_theta": 5e4}, "sliding_attention": {"rope_theta": 1e3}},
    })  # fmt: skip
    assert old == new
    assert (old.windows, old.rope_thetas) == ((None, 64, None, 64), (5e4, 1e3, 5e4, 1e3))
