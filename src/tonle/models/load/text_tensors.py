"""`TextTensors`: the tensors of a multimodal checkpoint's text part, under the names and in the shapes of a plain checkpoint."""

from __future__ import annotations

import torch

from tonle.models.layers import Weight
from tonle.models.load.stored_tensors import Tensors
from tonle.models.text_part import text_name
from tonle.models.weights import Shape

# Of all experts: the place of hidden_size among (experts, out, in). Qwen3-VL was published with (experts, in, out).
_HIDDEN_AT = {"mlp.experts.gate_up_proj": 2, "mlp.experts.down_proj": 1}


class TextTensors:
    """Those of other parts are left out (`text_part.py`)."""

    def __init__(self, tensors: Tensors, hidden_size: int) -> None:
        self._tensors = tensors
        self._stored = {name: stored for stored in tensors.shapes if (name := text_name(stored)) is not None}
        self.shapes: dict[str, Shape] = {name: tensors.shapes[stored] for name, stored in self._stored.items()}
        self.integers = {
            name: tensors.integers[stored] for name, stored in self._stored.items() if stored in tensors.integers
        }
        self._turned = {name for name, shape in self.shapes.items() if _is_turned(name, shape, hidden_size)}
        for name in self._turned:
            experts, inputs, outputs = self.shapes[name]
            self.shapes[name] = (experts, outputs, inputs)

    def get(self, name: str, expert: int | None = None) -> Weight:
        tensor = self._tensors.get(self._stored[name], expert)
        if name not in self._turned:
            return tensor
        assert isinstance(tensor, torch.Tensor), "quantized experts are stored one by one"
        return tensor.transpose(-1, -2)


def _is_turned(name: str, shape: Shape, hidden_size: int) -> bool:
    at = next((at for ending, at in _HIDDEN_AT.items() if name.endswith(ending)), None)
    return at is not None and len(shape) == 3 and shape[at] != hidden_size == shape[3 - at]
