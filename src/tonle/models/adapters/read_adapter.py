"""What an adapter for a model may change."""

from __future__ import annotations

from tonle.models.adapters.adapter import MODULE_PATHS
from tonle.models.spec import ModelSpec
from tonle.models.weights import tensor_shapes


def matrix_shapes(spec: ModelSpec) -> dict[tuple[int, str], tuple[int, int]]:
    """(out, in) of every matrix that an adapter may change, by (layer, module)."""
    shapes = tensor_shapes(spec)
    found: dict[tuple[int, str], tuple[int, int]] = {}
    for layer in range(spec.num_layers):
        for module, path in MODULE_PATHS.items():
            shape = shapes.get(f"model.layers.{layer}.{path}.weight")
            if shape is not None and len(shape) == 2:
                found[layer, module] = (shape[0], shape[1])
    return found
