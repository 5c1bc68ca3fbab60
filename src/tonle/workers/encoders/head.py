"""`Head`: the states of a pair's tokens into scores, as sequence classification of each family does it.

    pooler       BERT: the first token, dense, tanh; then the classifier
    dense_tanh   RoBERTa: the same, with the names of its own
    dense_norm   ModernBERT: the first token or the mean, dense, activation, norm; then the classifier

Does not: turn logits into numbers from 0 to 1 (`kinds/rerank.py`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tonle.workers.encoders.encoder import ACTIVATIONS
from tonle.workers.encoders.packed import Packed
from tonle.workers.encoders.spec import EncoderSpec
from tonle.workers.encoders.weights import Linear, Tensors

# For each head: the dense layer, the norm, the classifier.
_NAMES = {
    "pooler": ("pooler.dense", None, "classifier"),
    "dense_tanh": ("classifier.dense", None, "classifier.out_proj"),
    "dense_norm": ("head.dense", "head.norm", "classifier"),
}


class Head:
    def __init__(self, spec: EncoderSpec, tensors: Tensors) -> None:
        """Raises `ModelError` for weights that have no head."""
        dense, norm, classifier = _NAMES[spec.family.head]
        size = spec.hidden_size
        self._spec = spec
        self._dense: Linear = tensors.linear(tensors.prefix(f"{dense}.weight") + dense, size, size)
        self._norm = tensors.linear(norm, size) if norm else None
        self._classifier = tensors.linear(classifier, spec.num_labels, size)
        self._act = ACTIVATIONS["tanh" if norm is None else spec.classifier_activation]

    @torch.inference_mode()
    def logits(self, states: Tensor, packed: Packed) -> Tensor:
        """(tokens, hidden) to (inputs, labels), float32."""
        lengths = torch.tensor(packed.lengths, device=states.device)
        if self._norm is not None and self._spec.classifier_pooling == "mean":
            sums = torch.segment_reduce(states.float(), "sum", lengths=lengths, axis=0)
            pooled = (sums / lengths[:, None]).to(states.dtype)
        else:
            pooled = states[lengths.cumsum(0) - lengths]
        pooled = self._act(F.linear(pooled, self._dense.weight, self._dense.bias))
        if self._norm is not None:
            shape, eps = (self._spec.hidden_size,), self._spec.norm_eps
            pooled = F.layer_norm(pooled, shape, self._norm.weight, self._norm.bias, eps)
        return F.linear(pooled, self._classifier.weight, self._classifier.bias).float()
