"""`Embeddings`: texts as vectors, by an encoder. Without a model: all-MiniLM-L6-v2, which comes with tonle[embeddings].

A job: `ids` (int32), perhaps `dimensions` (the vector is cut) and `normalize` false (it keeps its length). The result's media
is the vector, float32.

Does: cut and scale. Does not: tokenize (`endpoints/embeddings.py`) or compute (`encoders/`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tonle.errors import InvalidRequest, TonleError
from tonle.workers.encoders.folder import EncoderFolder
from tonle.workers.encoders.open_encoder import EncoderModel, Rows, open_embedder
from tonle.workers.kind import Job, Result
from tonle.workers.kinds.encoder_kind import EncoderKind


class Embeddings(EncoderKind):
    def open(self, folder: EncoderFolder, device: torch.device, options: dict[str, Any]) -> EncoderModel:
        return open_embedder(folder, device, options)

    @property
    def dimensions(self) -> int:
        return self.model.width

    def result(self, job: Job, row: Rows) -> Result | TonleError:
        most = job.fields.get("dimensions", self.dimensions)
        if not isinstance(most, int) or not 0 < most <= self.dimensions:
            return InvalidRequest(f"dimensions must be 1 to {self.dimensions}, not {most!r:.100}", param="dimensions")
        vector = row[:most]
        if job.fields.get("normalize", True):
            vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
        return Result({}, (vector.astype(np.float32).tobytes(),))

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "dimensions": self.dimensions, "pooling": "+".join(self.folder.pooling)}
