"""Tiny models saved in quantized forms, written number by number from the forms' descriptions.

Independent of the code that reads them; single matrices as the forms' own libraries write them are in `quantized_layers`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from tests.fakes.checkpoints import tiny_model, tiny_tokenizer

Tensors = dict[str, torch.Tensor]
Packed = tuple[Tensors, torch.Tensor]  # what is stored, and what it stands for

GROUP = 32
NF4 = (-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0, 0.0795803, 0.1609302, 0.2461123,
       0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0)  # fmt: skip


def _affine(weight: torch.Tensor, group_of: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """numbers (out, in), scale and zero (out, groups)."""
    groups = [weight[:, group_of == group] for group in range(int(group_of.max()) + 1)]
    low = torch.stack([group.amin(dim=1).clamp(max=0) for group in groups], dim=1)
    high = torch.stack([group.amax(dim=1).clamp(min=0) for group in groups], dim=1)
    scale = ((high - low) / 15).half().float()
    zero = (-low / scale).round().clamp(1, 15)
    numbers = (weight / scale[:, group_of] + zero[:, group_of]).round().clamp(0, 15)
    return numbers.long(), scale, zero.long()


def _words(numbers: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """(n, 8 k) numbers 0 to 15 -> (n, k) int32; the number of place order[i] in bits 4 i to 4 i + 3."""
    eights = numbers.numpy().astype(np.uint32).reshape(len(numbers), -1, 8)
    words = np.zeros(eights.shape[:2], np.uint32)
    for bits, place in enumerate(order):
        words |= eights[:, :, place] << np.uint32(4 * bits)
    return torch.from_numpy(words.view(np.int32))


def _awq(weight: torch.Tensor) -> Packed:
    group_of = torch.arange(weight.shape[1]) // GROUP
    numbers, scale, zero = _affine(weight, group_of)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    stored = {"qweight": _words(numbers.t(), order), "qzeros": _words(zero.t(), order), "scales": scale.t().half()}
    return stored, (numbers - zero[:, group_of]) * scale[:, group_of]


def _gptq(weight: torch.Tensor, *, shuffled: bool) -> Packed:
    inputs = weight.shape[1]
    group_of = torch.arange(inputs) // GROUP
    if shuffled:
        group_of = group_of[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
    numbers, scale, zero = _affine(weight, group_of)
    stored = {"qweight": _words(numbers).t(), "qzeros": _words(zero.t() - 1), "scales": scale.t().half(),
              "g_idx": group_of.int()}  # fmt: skip
    return stored, (numbers - zero[:, group_of]) * scale[:, group_of]


def _fp8(weight: torch.Tensor, *, block: int | None) -> Packed:
    outputs, inputs = weight.shape
    height, width = (block, block) if block else (outputs, inputs)
    tall, wide = -(-outputs // height), -(-inputs // width)
    scale = torch.tensor([[weight[i * height : (i + 1) * height, j * width : (j + 1) * width].abs().max() / 448
                           for j in range(wide)] for i in range(tall)])  # fmt: skip
    each = scale[torch.arange(outputs)[:, None] // height, torch.arange(inputs)[None] // width]
    numbers = (weight / each).to(torch.float8_e4m3fn)
    name = {"weight_scale_inv": scale} if block else {"weight_scale": scale.reshape(())}
    return {"weight": numbers, **name}, numbers.float() * each


def _nf4(weight: torch.Tensor) -> Packed:
    table, blocks = torch.tensor(NF4), weight.reshape(-1, GROUP)
    scale = blocks.abs().amax(dim=1)
    numbers = (blocks[..., None] / scale[:, None, None] - table).abs().argmin(dim=-1)  # (blocks, GROUP)
    pairs = numbers.reshape(-1, 2)
    state = {"quant_type": "nf4", "blocksize": GROUP, "dtype": "float32", "shape": list(weight.shape)}
    stored = {
        "weight": (pairs[:, 0] * 16 + pairs[:, 1]).to(torch.uint8)[:, None], "weight.absmax": scale, "weight.quant_map": table,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }  # fmt: skip
    return stored, (table[numbers] * scale[:, None]).view_as(weight)


def _int8(weight: torch.Tensor, scale_name: str, factor: float) -> Packed:
    scale = weight.abs().amax(dim=1) / 127
    numbers = (weight / scale[:, None]).round().to(torch.int8)
    stored = scale * factor if scale_name == "SCB" else scale[:, None]
    return {"weight": numbers, scale_name: stored}, numbers.float() * scale[:, None]


FORMS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], Packed]]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, _awq),
    "gptq": ({"quant_method": "gptq", "bits": 4}, lambda weight: _gptq(weight, shuffled=False)),
    "gptq act-order": ({"quant_method": "gptq", "desc_act": True}, lambda weight: _gptq(weight, shuffled=True)),
    "fp8 blocks": ({"quant_method": "fp8", "weight_block_size": [48, 48]}, lambda weight: _fp8(weight, block=48)),
    "fp8 per tensor": ({"quant_method": "fp8"}, lambda weight: _fp8(weight, block=None)),
    "nf4": ({"quant_method": "bitsandbytes"}, _nf4),
    "bitsandbytes int8": ({"quant_method": "bitsandbytes"}, lambda weight: _int8(weight, "SCB", 127)),
    "compressed int8": (
        {"quant_method": "compressed-tensors", "format": "int-quantized"}, lambda weight: _int8(weight, "weight_scale", 1),
    ),
}  # fmt: skip


def save_quantized(family: str, path: Path, form: str, *, seed: int = 0, **overrides: Any) -> Any:
    """Write a folder with the matrices of all layers in `form`; returns a live model with what they stand for."""
    settings, pack = FORMS[form]
    model = tiny_model(family, seed=seed, **overrides)
    tensors: Tensors = {name: tensor for name, tensor in model.state_dict().items()
                        if not (name == "lm_head.weight" and model.config.tie_word_embeddings)}  # fmt: skip
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            stored, module.weight.data = pack(tensors.pop(f"{name}.weight"))
            tensors |= {f"{name}.{suffix}": tensor for suffix, tensor in stored.items()}
    path.mkdir(parents=True)
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, path / "model.safetensors")
    config = {**model.config.to_dict(), "architectures": [type(model).__name__], "quantization_config": settings}
    (path / "config.json").write_text(json.dumps(config))
    model.generation_config.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return model
