"""`open_embedder`, `open_scorer`: a folder's model on a device, by our forward pass or by onnxruntime.

Does: choose between the two and the precision. Does not: tokenize or know jobs.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tonle.errors import ConfigError, ModelError
from tonle.models.config_values import named
from tonle.workers.encoders.encoder import Encoder
from tonle.workers.encoders.folder import EncoderFolder
from tonle.workers.encoders.head import Head
from tonle.workers.encoders.onnx_encoder import OnnxEncoder, size_of
from tonle.workers.encoders.packed import Packed
from tonle.workers.encoders.pooling import Pooling
from tonle.workers.encoders.spec import EncoderSpec, num_labels, read_spec
from tonle.workers.encoders.weights import Tensors, read_weights

Rows = NDArray[np.float32]  # (inputs, dimensions or labels), in the order of `Packed`
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class EncoderModel(Protocol):
    vocab_size: int
    max_tokens: int  # that it can look at
    width: int  # of a row: numbers of a vector, or labels

    def rows(self, packed: Packed) -> Rows: ...


class _Ours:
    def __init__(self, spec: EncoderSpec, tensors: Tensors) -> None:
        self.vocab_size, self.max_tokens = spec.vocab_size, spec.max_tokens
        self.encoder = Encoder(spec, read_weights(tensors, spec))


class OurEmbedder(_Ours):
    def __init__(self, spec: EncoderSpec, tensors: Tensors, pooling: Pooling) -> None:
        super().__init__(spec, tensors)
        self._pooling = pooling
        self.width = pooling.dimensions(spec.hidden_size)

    def rows(self, packed: Packed) -> Rows:
        vectors: Rows = self._pooling.vectors(self.encoder.states(packed), packed).cpu().numpy()
        return vectors


class OurScorer(_Ours):
    def __init__(self, spec: EncoderSpec, tensors: Tensors) -> None:
        super().__init__(spec, tensors)
        self._head = Head(spec, tensors)
        self.width = spec.num_labels

    def rows(self, packed: Packed) -> Rows:
        logits: Rows = self._head.logits(self.encoder.states(packed), packed).cpu().numpy()
        return logits


class _Onnx:
    def __init__(self, folder: EncoderFolder, device: torch.device, wanted: tuple[str, ...]) -> None:
        assert folder.onnx is not None
        self.vocab_size = size_of(folder.config, "vocab_size")
        self.max_tokens = size_of(folder.config, "max_position_embeddings", "n_positions")
        if folder.config.get("model_type") in ("roberta", "xlm-roberta", "camembert", "mpnet"):
            self.max_tokens -= 2  # positions begin behind the padding id
        self._encoder = OnnxEncoder(folder.onnx, device, wanted=wanted)


class OnnxEmbedder(_Onnx):
    def __init__(self, folder: EncoderFolder, device: torch.device) -> None:
        super().__init__(folder, device, ("sentence_embedding", "last_hidden_state", "token_embeddings"))
        self._pooling = Pooling(folder, torch.device("cpu"))
        size = size_of(folder.config, "hidden_size", "dim", "d_model")
        self.width = size if self._encoder.is_pooled else self._pooling.dimensions(size)

    def rows(self, packed: Packed) -> Rows:
        found = self._encoder.run(packed)
        if self._encoder.is_pooled:
            return found
        vectors: Rows = self._pooling.vectors(torch.from_numpy(found), packed).numpy()
        return vectors


class OnnxScorer(_Onnx):
    def __init__(self, folder: EncoderFolder, device: torch.device) -> None:
        super().__init__(folder, device, ("logits",))
        if not self._encoder.is_pooled:
            raise ModelError(
                f"{folder.onnx}: is no cross-encoder: its output {self._encoder.output} has a row for each token"
            )
        self.width = num_labels(folder.config)

    def rows(self, packed: Packed) -> Rows:
        return self._encoder.run(packed)


def open_embedder(folder: EncoderFolder, device: torch.device, options: dict[str, Any]) -> EncoderModel:
    """Raises `ModelError`, `ConfigError`."""
    if folder.onnx is not None:
        return OnnxEmbedder(folder, device)
    with named(folder.path):
        spec = read_spec(folder.config)
    return OurEmbedder(spec, Tensors(folder.path, device, _dtype(spec, device, options)), Pooling(folder, device))


def open_scorer(folder: EncoderFolder, device: torch.device, options: dict[str, Any]) -> EncoderModel:
    """Raises `ModelError`, `ConfigError`."""
    if folder.onnx is not None:
        return OnnxScorer(folder, device)
    with named(folder.path):
        spec = read_spec(folder.config)
    return OurScorer(spec, Tensors(folder.path, device, _dtype(spec, device, options)))


def _dtype(spec: EncoderSpec, device: torch.device, options: dict[str, Any]) -> torch.dtype:
    name = options.get("dtype") or ("float32" if device.type == "cpu" else spec.family.half)
    if name not in _DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(_DTYPES)}, not {name!r}", param="dtype")
    return _DTYPES[name]
