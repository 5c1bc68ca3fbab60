"""`Pooling`: the states of an input's tokens into one vector, by the modules that sentence-transformers writes.

Does: cls, mean, max and last, several of them side by side, then dense layers. Does not: scale to length 1 (the job says
whether).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tonle.errors import ModelError
from tonle.models.config_values import whole_number
from tonle.workers.encoders.encoder import ACTIVATIONS
from tonle.workers.encoders.folder import DenseFolder, EncoderFolder
from tonle.workers.encoders.packed import Packed
from tonle.workers.encoders.weights import Linear, Tensors

_ACTIVATIONS = {"Identity": "", "Tanh": "tanh", "GELU": "gelu", "ReLU": "relu", "SiLU": "silu"}  # torch's names


class Pooling:
    def __init__(self, folder: EncoderFolder, device: torch.device) -> None:
        """Raises `ModelError`."""
        self._modes = folder.pooling
        self._dense = [_read_dense(each, device) for each in folder.dense]

    def dimensions(self, hidden_size: int) -> int:
        return self._dense[-1][0].weight.shape[0] if self._dense else hidden_size * len(self._modes)

    @torch.inference_mode()
    def vectors(self, states: Tensor, packed: Packed) -> Tensor:
        """(tokens, hidden) to (inputs, dimensions), float32."""
        lengths = torch.tensor(packed.lengths, device=states.device)
        starts = lengths.cumsum(0) - lengths
        found = [_pool(states, mode, starts, lengths) for mode in self._modes]
        return self.project(found[0] if len(found) == 1 else torch.cat(found, dim=-1))

    @torch.inference_mode()
    def project(self, vectors: Tensor) -> Tensor:
        for linear, activation in self._dense:
            vectors = F.linear(vectors, linear.weight, linear.bias)
            vectors = ACTIVATIONS[activation](vectors) if activation else vectors
        return vectors


def _pool(states: Tensor, mode: str, starts: Tensor, lengths: Tensor) -> Tensor:
    if mode == "cls":
        return states[starts].float()
    if mode == "last":
        return states[starts + lengths - 1].float()
    how = "max" if mode == "max" else "sum"
    pooled = torch.segment_reduce(states.float(), how, lengths=lengths, axis=0)
    if mode == "mean":
        return pooled / lengths[:, None]
    return pooled / lengths[:, None].sqrt() if mode == "mean_sqrt_len" else pooled


def _read_dense(dense: DenseFolder, device: torch.device) -> tuple[Linear, str]:
    name = str(dense.config.get("activation_function", "Tanh")).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise ModelError(f"{dense.path}: the activation {name} cannot be served; {', '.join(_ACTIVATIONS)} can")
    shape = whole_number(dense.config, "out_features"), whole_number(dense.config, "in_features")
    return Tensors(dense.path, device, torch.float32).linear("linear", *shape), _ACTIVATIONS[name]
