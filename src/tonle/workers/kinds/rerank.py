"""`Rerank`: how well a document fits a query, by a cross-encoder: an encoder that reads both together, and a classifier.

A job: `ids` and `types` of the pair. The result: `score`, 0 to 1.

Does: logits into scores. Does not: tokenize or sort (`endpoints/rerank.py`), or compute (`encoders/`).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from tonle.errors import ModelError, TonleError
from tonle.workers.encoders.folder import EncoderFolder
from tonle.workers.encoders.open_encoder import EncoderModel, Rows, open_scorer
from tonle.workers.kind import Job, Result
from tonle.workers.kinds.encoder_kind import EncoderKind


class Rerank(EncoderKind):
    def load(self, model: str | None, device: str, options: dict[str, Any]) -> None:
        if model is None:
            raise ModelError(
                "a pool of cross-encoders needs a model: a folder, or a hub name such as BAAI/bge-reranker-v2-m3. A pool of "
                "embeddings ranks, too: by the cosine of its vectors"
            )
        super().load(model, device, options)

    def open(self, folder: EncoderFolder, device: torch.device, options: dict[str, Any]) -> EncoderModel:
        model = open_scorer(folder, device, options)
        if model.width > 2:
            raise ModelError(
                f"{folder.path}: has {model.width} labels; a cross-encoder for ranking has one, or two (no and yes)"
            )
        return model

    def result(self, job: Job, row: Rows) -> Result | TonleError:
        """Two labels: the share of the second. That is the sigmoid of their difference."""
        logit = float(row[0]) if len(row) == 1 else float(row[1]) - float(row[0])
        return Result({"score": 1 / (1 + math.exp(-max(min(logit, 700.0), -700.0)))})

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "labels": self.model.width}
