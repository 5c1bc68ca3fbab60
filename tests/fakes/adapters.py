"""Random LoRA adapters for the tiny checkpoints: in memory, as PEFT folders, and merged into a model's weights.

Their effect is of the size of the weights they change (`strength`), so that a forgotten, misplaced or wrongly scaled part
changes logits by far more than rounding does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.fakes.checkpoints import tiny_model, tiny_tokenizer
from tonle.models.adapters import MODULES, Adapter, AdapterPart
from tonle.models.adapters.adapter import MODULE_PATHS, digest_of
from tonle.models.adapters.read_adapter import matrix_shapes
from tonle.models.load.places import Place, places, stored_shapes
from tonle.models.load.transformers_model import live_spec
from tonle.models.spec import ModelSpec

PREFIX = "base_model.model.model."  # before layers.0. … in the files that PEFT writes


def random_adapter(
    spec: ModelSpec,
    *,
    rank: int | Mapping[str, int] = 4,
    modules: Iterable[str] = MODULES,
    layers: Iterable[int] | None = None,
    seed: int = 0,
    strength: float = 0.5,
) -> Adapter:
    """In memory. `rank`: of all, or of each module; `strength`: its matrices' spread, in that of the model's own."""
    parts: dict[tuple[int, str], AdapterPart] = {}
    shapes = matrix_shapes(spec)
    generator = torch.Generator().manual_seed(seed)
    chosen = list(modules)
    for layer in range(spec.num_layers) if layers is None else layers:
        for module in chosen:
            if (layer, module) not in shapes:  # a plain mixer has no gate
                continue
            out_size, in_size = shapes[layer, module]
            size = rank if isinstance(rank, int) else rank[module]
            a = torch.randn(size, in_size, generator=generator) * in_size**-0.5
            b = torch.randn(out_size, size, generator=generator) * strength * size**-0.5
            parts[layer, module] = AdapterPart(a, b)
    return Adapter(digest_of(parts), parts)


def write_adapter(
    folder: Path,
    spec: ModelSpec,
    *,
    rank: int | Mapping[str, int] = 4,
    alpha: float = 8,
    modules: Iterable[str] = MODULES,
    layers: Iterable[int] | None = None,
    seed: int = 0,
    strength: float = 0.5,
    dtype: torch.dtype = torch.float32,
    prefix: str = PREFIX,
    infix: str = "",
    use_rslora: bool = False,
    **config: Any,
) -> Adapter:
    """Write a PEFT folder; returns what reading it must give. `config` are more fields of adapter_config.json.

    `prefix` and `infix` spell the tensors' names: {prefix}layers.0.self_attn.q_proj.lora_A{infix}.weight.
    """
    chosen = list(modules)
    made = random_adapter(spec, rank=rank, modules=chosen, layers=layers, seed=seed, strength=strength)
    tensors: dict[str, torch.Tensor] = {}
    parts: dict[tuple[int, str], AdapterPart] = {}
    ranks: dict[str, int] = {}
    for (layer, path), stored in _as_stored(spec, made).items():
        size = stored.a.shape[0]
        scaling = alpha / (math.sqrt(size) if use_rslora else size)
        a, b = stored.a.to(dtype), (stored.b / scaling).to(dtype)  # as stored: before scaling
        stem = f"{prefix}layers.{layer}.{path}"
        tensors[f"{stem}.lora_A{infix}.weight"], tensors[f"{stem}.lora_B{infix}.weight"] = a, b
        ranks[path.rpartition(".")[2]] = size
        for module, place in stored.places.items():
            parts[layer, module] = AdapterPart(a.float(), place.of(b.float() * scaling))
    of_all = rank if isinstance(rank, int) else 1
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": of_all,
        "rank_pattern": {name: size for name, size in ranks.items() if size != of_all},
        "lora_alpha": alpha,
        "alpha_pattern": {},
        "target_modules": list(ranks),
        "layers_to_transform": None if layers is None else list(layers),
        "use_rslora": use_rslora,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "lora_dropout": 0.05,
        "inference_mode": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**content, **config}))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return Adapter(digest_of(parts), parts)


@dataclass
class _Stored:
    """What an adapter adds to one matrix of the checkpoint, before any scaling, and which of ours stand in it."""

    a: torch.Tensor
    b: torch.Tensor
    places: dict[str, Place]  # by module


def _as_stored(spec: ModelSpec, adapter: Adapter) -> dict[tuple[int, str], _Stored]:
    """By layer and the checkpoint's name of the matrix. Where that holds several of ours, side by side, the ranks add up: A has
    the rows of all, and B has zeros where one of ours meets another's."""
    where, shapes = places(spec, ()), stored_shapes(spec, places(spec, ()))
    made: dict[tuple[int, str], _Stored] = {}
    for (layer, module), part in adapter.parts.items():
        prefix = f"model.layers.{layer}."
        place = where[f"{prefix}{MODULE_PATHS[module]}.weight"]
        path = place.stored.removeprefix(prefix).removesuffix(".weight")
        rows, columns = shapes[place.stored]
        found = made.setdefault((layer, path), _Stored(torch.empty(0, columns), torch.empty(rows, 0), {}))
        b = torch.zeros(rows, part.rank)
        b[_stored_rows(place, rows)] = part.b
        found.a, found.b = torch.cat((found.a, part.a)), torch.cat((found.b, b), dim=1)
    for (layer, path), stored in made.items():
        for module, canonical in MODULE_PATHS.items():
            place = where.get(f"model.layers.{layer}.{canonical}.weight", Place(""))
            if place.stored == f"model.layers.{layer}.{path}.weight":
                stored.places[module] = place
    return made


def _stored_rows(place: Place, num_rows: int) -> torch.Tensor:
    """Which of the checkpoint's rows ours are."""
    return place.of(torch.arange(num_rows))


@torch.no_grad()
def merge(model: Any, adapter: Adapter) -> Any:
    """Add the adapter to a live transformers model's weights, in place; returns the model."""
    weights = model.state_dict()
    where = places(live_spec(model), weights)
    for (layer, module), part in adapter.parts.items():
        place = where[f"model.layers.{layer}.{MODULE_PATHS[module]}.weight"]
        weight = weights[place.stored]
        added = (part.b.double() @ part.a.double()).to(weight.dtype)
        weight[_stored_rows(place, weight.shape[0])] += added
    return model


def save_merged(family: str, path: Path, adapter: Adapter, *, seed: int = 0, **overrides: Any) -> Any:
    """`save_folder` of the same checkpoint with the adapter merged into its weights; returns the live merged model."""
    model = merge(tiny_model(family, seed=seed, **overrides), adapter)
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return model
