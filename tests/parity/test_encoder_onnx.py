"""Encoders that were exported as model.onnx, by onnxruntime, against their safetensors."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes.encoders import save_encoder, token_ids
from tests.parity.test_encoders import LENGTHS, job, loaded, scores, vectors
from tonle.errors import ModelError
from tonle.workers.kinds.embeddings import Embeddings
from tonle.workers.kinds.rerank import Rerank

pytest.importorskip("onnxruntime", reason="needs tonle[embeddings]")
pytest.importorskip("onnx", reason="writes the files of these tests")


class Exported(torch.nn.Module):
    """Tensors in and out, as exports have them."""

    def __init__(self, model: Any, output: str) -> None:
        super().__init__()
        self.model, self.output = model, output

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor
    ) -> torch.Tensor:
        found = self.model(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)
        if self.output != "sentence_embedding":
            return getattr(found, self.output)  # type: ignore[no-any-return]
        mask = attention_mask[..., None]
        return (found.last_hidden_state * mask).sum(dim=1) / mask.sum(dim=1)


def export(model: Any, output: str, file: Path) -> None:
    inputs = ["input_ids", "attention_mask", "token_type_ids"]
    axes = {name: {0: "inputs", 1: "tokens"} for name in inputs}
    axes[output] = {0: "inputs", 1: "tokens"} if output == "last_hidden_state" else {0: "inputs"}
    ones = torch.ones(2, 5, dtype=torch.long)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        torch.onnx.export(
            Exported(model, output), (ones, ones, ones), str(file), dynamo=False, input_names=inputs,
            output_names=[output], dynamic_axes=axes,
        )  # fmt: skip


@pytest.mark.parametrize("output", ["last_hidden_state", "sentence_embedding"])
def test_vectors_are_those_of_the_safetensors(output: str, tmp_path: Path) -> None:
    export(save_encoder("bert", tmp_path), output, tmp_path / "model.onnx")
    ours = loaded(Embeddings(), tmp_path)
    assert ours.describe()["runtime"] == "torch"
    jobs = [job(ids) for ids in token_ids(20, LENGTHS)]
    exported = loaded(Embeddings(), tmp_path, onnx=True)
    assert exported.describe()["runtime"] == "onnxruntime"
    assert np.abs(vectors(exported, jobs) - vectors(ours, jobs)).max() < 1e-4
    (tmp_path / "model.safetensors").unlink()
    alone = loaded(Embeddings(), tmp_path)
    assert np.array_equal(vectors(alone, jobs), vectors(exported, jobs))


def test_scores_are_those_of_the_safetensors(tmp_path: Path) -> None:
    export(save_encoder("bert", tmp_path, num_labels=1), "logits", tmp_path / "model.onnx")
    jobs = [job(ids, [0] * (len(ids) - 1) + [1]) for ids in token_ids(10, LENGTHS)]
    exported = loaded(Rerank(), tmp_path, onnx=True)
    assert np.abs(scores(exported, jobs) - scores(loaded(Rerank(), tmp_path), jobs)).max() < 1e-5
    assert exported.describe() == {"architecture": "bert", "max_tokens": 66, "runtime": "onnxruntime", "labels": 1}


def test_files_that_are_no_encoders(tmp_path: Path) -> None:
    save_encoder("bert", tmp_path)
    (tmp_path / "model.onnx").write_bytes(b"no model")
    with pytest.raises(ModelError, match="cannot be used by onnxruntime"):
        loaded(Embeddings(), tmp_path, onnx=True)
