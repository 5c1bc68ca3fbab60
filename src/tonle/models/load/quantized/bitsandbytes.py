"""bitsandbytes: 4-bit numbers that are places in a table (nf4, fp4), with a scale for each 64; or 8-bit with one for each output.

4 bits  weight (out * in / 2, 1) uint8, the first of two numbers in the high half; the same bytes may be stored as floats
        (bnb_4bit_quant_storage, for training in shards); weight.quant_map (16,) float32, the table;
        weight.absmax, the scales: float32, or with double quantization places in weight.nested_quant_map (256,), times
        weight.nested_absmax (one for each nested_blocksize of them), plus nested_offset;
        weight.quant_state.bitsandbytes__nf4, JSON in bytes: shape, blocksize, nested_blocksize, nested_offset
8 bits  weight (out, in) int8; SCB (out,) float32, 127 times the scale
"""

from __future__ import annotations

import json
from typing import Any

import torch

from tonle.models.layers import Quantized, Weight
from tonle.models.load.quantized.form import Form, Parts
from tonle.models.load.quantized.unpack import unpack_halves
from tonle.models.weights import Shape

_STATES = (".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4")


class BitsAndBytes(Form):
    markers = (".weight.absmax", ".SCB")
    suffixes = (
        ".weight",
        ".weight.absmax",
        ".weight.quant_map",
        ".weight.nested_absmax",
        ".weight.nested_quant_map",
        ".SCB",
    )

    def shape(self, parts: Parts) -> Shape:
        return parts.shape(".weight") if ".SCB" in parts else tuple(_state(parts)["shape"])

    def read(self, parts: Parts) -> Weight:
        if ".SCB" in parts:
            return Quantized(parts.typed(".weight", torch.int8), parts.floats(".SCB").float()[:, None] / 127)
        state = _state(parts)
        outputs, inputs = state["shape"]
        size = int(state["blocksize"])
        table, scale = parts.floats(".weight.quant_map").float(), _scales(parts, state)
        if len(table) != 16 or len(scale) != -(-outputs * inputs // size):
            raise ValueError(f"a table of {len(table)} and {len(scale)} scales for {outputs} x {inputs} numbers")
        octets = parts[".weight"].flatten().view(torch.uint8)
        numbers = unpack_halves(octets, high_first=True)[: outputs * inputs]
        if inputs % size == 0:
            return Quantized(numbers.view(outputs, inputs), scale.view(outputs, -1), table=table, bits=4)
        # A group may begin in one row and end in the next, and be larger than the matrix.
        spread = scale.repeat_interleave(min(size, outputs * inputs))[: outputs * inputs]
        return (table[numbers.int()] * spread).view(outputs, inputs)


def _state(parts: Parts) -> dict[str, Any]:
    """What is not a tensor, as JSON in the bytes of one."""
    suffix = next((suffix for suffix in _STATES if suffix in parts), _STATES[0])
    state: dict[str, Any] = json.loads(bytes(parts[suffix].tolist()))
    return state


def _scales(parts: Parts, state: dict[str, Any]) -> torch.Tensor:
    """(blocks,) float32."""
    if ".weight.nested_absmax" not in parts:
        return parts.floats(".weight.absmax").float()
    nested = parts.floats(".weight.nested_quant_map").float()[parts.octets(".weight.absmax").int()]
    block_of = torch.arange(len(nested)) // int(state["nested_blocksize"])
    return nested * parts.floats(".weight.nested_absmax").float()[block_of] + float(state["nested_offset"])
