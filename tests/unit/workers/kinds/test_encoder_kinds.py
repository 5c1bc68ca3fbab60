"""Embeddings and cross-encoders as kinds: what a batch makes of bad jobs, options, dense layers, and files that are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fakes.encoders import save_encoder, save_modules
from tests.parity.test_encoders import job, loaded, pooled, states_of, vectors
from tonle.errors import ConfigError, InvalidRequest, ModelError
from tonle.workers.encoders.token_job import DESCRIBE
from tonle.workers.kind import Job, Result
from tonle.workers.kinds.embeddings import Embeddings
from tonle.workers.kinds.rerank import Rerank


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    save_encoder("bert", folder)
    return folder


@pytest.fixture
def own(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_a_bad_job_fails_alone(saved: Path) -> None:
    kind = loaded(Embeddings(), saved, max_tokens=10)
    bad = [
        job([5, 64]), job([-1]), job([]), job([5] * 11), Job({}), Job({"ids": b"123"}), job([5, 6], [0]), job([5], [2]),
        job([5], dimensions=33),
    ]  # fmt: skip
    good = job([5, 6, 7])
    found = kind.run([good, *bad, DESCRIBE, good])
    assert [type(each) for each in found] == [Result, *[InvalidRequest] * len(bad), Result, Result]
    for place in (0, -1):
        assert np.abs(np.frombuffer(found[place].media[0], np.float32) - vectors(kind, [good])[0]).max() < 1e-5
    assert found[-2].fields["max_tokens"] == 10
    assert kind.run([]) == []


def test_warm_up_runs(saved: Path) -> None:
    kind = loaded(Embeddings(), saved)
    assert all(isinstance(each, Result) for each in kind.run(kind.warm_up()))
    assert kind.describe() == {
        "architecture": "bert", "max_tokens": 66, "runtime": "torch", "dimensions": 32, "pooling": "mean"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "param"),
    [({"poling": "cls"}, "poling"), ({"dtype": "int8"}, "dtype"), ({"pooling": "sum"}, "pooling"),
     ({"max_tokens": "x"}, "max_tokens"), ({"threads": 0.5}, "threads"), ({"threads": -1}, "threads")],
)  # fmt: skip
def test_options_that_make_no_sense(options: dict[str, Any], param: str, saved: Path) -> None:
    with pytest.raises(ConfigError) as error:
        loaded(Embeddings(), saved, **options)
    assert error.value.param == param


def test_dense_layers_come_behind_pooling(own: Path) -> None:
    theirs = save_encoder("bert", own)
    save_modules(own, {"pooling_mode": ["cls", "max"]})
    modules = json.loads((own / "modules.json").read_text())
    modules.insert(2, {"type": "sentence_transformers.models.Dense", "path": "2_Dense"})
    (own / "modules.json").write_text(json.dumps(modules))
    (own / "2_Dense").mkdir()
    torch.manual_seed(1)
    linear = torch.nn.Linear(64, 24)
    save_file(
        {"linear.weight": linear.weight.data, "linear.bias": linear.bias.data}, own / "2_Dense" / "model.safetensors"
    )
    config = {
        "in_features": 64,
        "out_features": 24,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    (own / "2_Dense" / "config.json").write_text(json.dumps(config))
    kind = loaded(Embeddings(), own)
    assert kind.dimensions == 24
    ids = [5, 9, 4, 7]
    states = states_of(theirs, ids)
    wanted = torch.tanh(linear(torch.cat([pooled(states, "cls"), pooled(states, "max")]))).detach().numpy()
    assert np.abs(vectors(kind, [job(ids, normalize=False)])[0] - wanted).max() < 1e-4
    (own / "2_Dense" / "config.json").write_text(json.dumps(config | {"activation_function": "mine.Own"}))
    with pytest.raises(ModelError, match="Own cannot be served"):
        loaded(Embeddings(), own)


def test_old_names_of_norms_and_prefixes_are_known(own: Path) -> None:
    before = vectors(loaded(Embeddings(), own), [job([5, 6, 7])])
    tensors = load_file(own / "model.safetensors")
    renamed = {}
    for name, tensor in tensors.items():
        if "LayerNorm" in name:
            name = name.replace(".weight", ".gamma").replace(".bias", ".beta")
        renamed[f"bert.{name}"] = tensor
    save_file(renamed, own / "model.safetensors")
    assert np.array_equal(vectors(loaded(Embeddings(), own), [job([5, 6, 7])]), before)


def test_weights_that_do_not_fit_the_config(own: Path) -> None:
    tensors = load_file(own / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in tensors.items() if "layer.3.output.dense" not in name},
        own / "model.safetensors",
    )
    with pytest.raises(ModelError, match=r"have no encoder\.layer\.3\.output\.dense\.weight"):
        loaded(Embeddings(), own)
    save_file(tensors | {"embeddings.word_embeddings.weight": torch.zeros(63, 32)}, own / "model.safetensors")
    with pytest.raises(ModelError, match=r"has the shape \(63, 32\); config.json says \(64, 32\)"):
        loaded(Embeddings(), own)
    save_file({"other": torch.zeros(2)}, own / "model.safetensors")
    with pytest.raises(ModelError, match="not of the model that config"):
        loaded(Embeddings(), own)
    (own / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no model\.safetensors.*pytorch_model\.bin"):
        loaded(Embeddings(), own)


def test_cross_encoders_need_a_model_with_a_head(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="needs a model"):
        Rerank().load(None, "cpu", {})
    with pytest.raises(ModelError, match="have no classifier"):
        loaded(Rerank(), saved)
    save_encoder("bert", tmp_path, num_labels=3)
    with pytest.raises(ModelError, match="has 3 labels"):
        loaded(Rerank(), tmp_path)
