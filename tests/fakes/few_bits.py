"""Weights in few bits, of random numbers: every form that backends read."""

from __future__ import annotations

import torch

from tonle.models.layers import Quantized

MXFP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
# Form: inputs of a scale, None for one per output.
FORMS: dict[str, int | None] = {
    "int4": 128,
    "int4 in groups of 32": 32,
    "int4 per output": None,
    "int4 with minimums": 64,
    "int4 with minimums per output": None,
    "int8": None,
    "int8 in groups": 64,
    "int8 with minimums": 128,
    "fp8": None,
    "fp8 in blocks": 128,
    "table": 32,
}


def few_bits(form: str, outputs: int, inputs: int, seed: int = 0) -> Quantized:
    """(outputs, inputs): weights of about 1 / sqrt(inputs)."""
    rng = torch.Generator().manual_seed(seed + outputs + inputs)
    groups = inputs // (FORMS[form] or inputs)
    spread = (torch.rand(outputs, groups, generator=rng) + 0.5) / inputs**0.5
    minimum = None
    if form.startswith("int4"):
        numbers = torch.randint(-8, 8, (outputs, inputs), generator=rng).to(torch.int8)
        scale = spread / 8
        if "minimums" in form:  # as GPTQ and AWQ have them: 0 to 15, and a zero point
            numbers = (numbers + 8).view(torch.uint8)
            minimum = -scale * torch.randint(0, 16, scale.shape, generator=rng)
        return Quantized(numbers, scale, minimum, bits=4)
    if form.startswith("int8"):
        numbers = torch.randint(-128, 128, (outputs, inputs), generator=rng).to(torch.int8)
        scale = spread / 128
        if "minimums" in form:
            numbers = (numbers.int() + 128).to(torch.uint8)
            minimum = -scale * torch.randint(100, 156, scale.shape, generator=rng)
        return Quantized(numbers, scale, minimum)
    if form.startswith("fp8"):
        numbers = (torch.randn(outputs, inputs, generator=rng) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        return Quantized(numbers, spread / 128)
    numbers = torch.randint(0, 16, (outputs, inputs), generator=rng).to(torch.uint8)
    return Quantized(numbers, spread / 4, table=MXFP4.clone(), bits=4)
