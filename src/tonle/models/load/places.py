"""`places`: where a checkpoint has each tensor of a model, by our names (`weights.tensor_shapes`).

Does: other names, tensors that hold several of ours or of all experts, rows in another order. Does not: read files or unpack
numbers. What a family's checkpoints call their tensors is in its row of `families.py`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import overload

import torch

from tonle.models.families import ExpertsRow, Family, family
from tonle.models.layers import Quantized, Weight
from tonle.models.spec import ModelSpec
from tonle.models.weights import Shape, tensor_shapes

_LAYER_TENSOR = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)")  # what stands between those


@dataclass(frozen=True, slots=True)
class Place:
    """Where one tensor of ours stands: which tensor of the checkpoint, and what of it."""

    stored: str  # the checkpoint's name
    expert: int | None = None  # place in the first dimension, of a tensor that holds all experts
    rows: slice | None = None  # of a tensor that holds several of ours
    transposed: bool = False  # a matrix stored as (in, out)
    pairs: tuple[int, int] | None = None  # (head_dim, rotated): see `halves`

    @overload
    def of(self, stored: torch.Tensor) -> torch.Tensor: ...
    @overload
    def of(self, stored: Quantized) -> Quantized: ...
    @overload
    def of(self, stored: Weight) -> Weight: ...
    def of(self, stored: Weight) -> Weight:
        """Our tensor: a view of the stored one, unless rows are in another order."""
        if isinstance(stored, Quantized):  # scales and minimums have the rows of the numbers
            assert not self.transposed, "groups of inputs cannot be transposed"
            minimum = None if stored.minimum is None else self._select(stored.minimum)
            return replace(
                stored, numbers=self._select(stored.numbers), scale=self._select(stored.scale), minimum=minimum
            )
        return self._select(stored)

    def _select(self, stored: torch.Tensor) -> torch.Tensor:
        if self.expert is not None:
            stored = stored[self.expert]
        if self.transposed:
            stored = stored.transpose(-1, -2)
        if self.rows is not None:
            stored = stored[self.rows]
        return stored if self.pairs is None else stored[halves(stored.shape[0], *self.pairs)]


def halves(num_rows: int, head_dim: int, rotated: int) -> torch.Tensor:
    """(num_rows,) which stored row comes where, for checkpoints whose rotation turns rows 2 i and 2 i + 1 of a head together:
    ours turns i and i + rotated / 2. The rest of each head stays."""
    order = torch.arange(num_rows).view(-1, head_dim)
    turned = order[:, :rotated].reshape(len(order), -1, 2).transpose(1, 2).flatten(1)  # (heads, rotated)
    return torch.cat((turned, order[:, rotated:]), dim=1).flatten()


def places(spec: ModelSpec, found: Collection[str]) -> dict[str, Place]:
    """For each of the model's tensors, by our name, where a Hugging Face checkpoint or a live model has it.

    `found`: the names of its tensors, which say whether matrices that the family usually joins are joined in this one.
    """
    row = family(spec.architecture)
    names = set(found)
    modules = {name.rpartition(".")[0] for name in names}

    def stored_module(index: int, module: str) -> str:
        usual, ours = (f"model.layers.{index}.{path}" for path in (_renamed(module, row), module))
        in_our_words = module.startswith("mlp.") and usual not in modules and ours in modules  # as live Mixtrals
        return ours if in_our_words else usual

    made = arrange(spec, stored_module, modules, row.pairs)
    if row.experts is None:
        return made
    return {name: _of_all_experts(name, spec, row.experts, names) or place for name, place in made.items()}


def _renamed(module: str, row: Family) -> str:
    """The checkpoint's name of a module; an expert's has the expert's number in it."""
    match = _EXPERT.fullmatch(module)
    if match is None:
        return row.renamed.get(module, module)
    any_expert = f"mlp.experts.N.{match[2]}"
    return row.renamed.get(any_expert, any_expert).replace(".N.", f".{match[1]}.")


def _of_all_experts(name: str, spec: ModelSpec, row: ExpertsRow, found: set[str]) -> Place | None:
    """The place of one expert's matrix or bias in a tensor that holds those of all experts, gate and up joined, if the
    checkpoint has such tensors."""
    match = _LAYER_TENSOR.fullmatch(name)
    of_expert = _EXPERT.fullmatch(match[2]) if match else None
    if match is None or of_expert is None:
        return None
    expert, matrix = int(of_expert[1]), of_expert[2]
    joined = f"model.layers.{match[1]}.mlp.experts.{'down_proj' if matrix == 'down_proj' else 'gate_up_proj'}"
    rows = None
    if matrix != "down_proj":
        second, size = int(matrix == "up_proj"), spec.layers[int(match[1])].mixer.size
        rows = slice(second, None, 2) if row.by_turns else slice(second * size, (second + 1) * size)
    # In MXFP4 matrices are (out, in), also in a family that otherwise has them as (in, out).
    forms = (
        [(f"{joined}_bias", False)] if match[3] == "bias" else [(joined, row.transposed), (f"{joined}_blocks", False)]
    )
    for stored, transposed in forms:
        if stored in found:
            return Place(stored, expert=expert, rows=rows, transposed=transposed)
    return None


def arrange(
    spec: ModelSpec, stored_module: Callable[[int, str], str], modules: Collection[str], in_pairs: bool
) -> dict[str, Place]:
    """The places of tensors in files that spell layer `index`'s `module` as `stored_module(index, module)`.

    `modules`: those that the file has. `in_pairs`: its rotation turns neighbouring rows.
    """
    joined = family(spec.architecture).joined
    shapes = tensor_shapes(spec)
    made: dict[str, Place] = {}
    for name, shape in shapes.items():
        match = _LAYER_TENSOR.fullmatch(name)
        if match is None:
            made[name] = Place(name)
            continue
        index, module, kind = int(match[1]), match[2], match[3]
        turned = in_pairs and module in ("self_attn.q_proj", "self_attn.k_proj")
        place = Place(f"{stored_module(index, module)}.{kind}", pairs=rotated_pairs(spec, index) if turned else None)
        for whole, parts in joined.items():
            if module in parts and stored_module(index, parts[0]) not in modules:
                before = parts[: parts.index(module)]
                first = sum(shapes[f"model.layers.{index}.{part}.{kind}"][0] for part in before)
                rows = slice(first, first + shape[0])
                place = replace(place, stored=f"{stored_module(index, whole)}.{kind}", rows=rows)
        made[name] = place
    return made


def rotated_pairs(spec: ModelSpec, layer: int) -> tuple[int, int]:
    """`Place.pairs` of a layer's queries and keys. Where they are not rotated, files have all of their rows in pairs."""
    rope = spec.layers[layer].attention.rope
    return spec.head_dim, spec.head_dim if rope is None or rope.rotated is None else rope.rotated


def stored_shapes(spec: ModelSpec, where: Mapping[str, Place]) -> dict[str, Shape]:
    """The shapes that the checkpoint's own tensors must have, by its names."""
    rows: defaultdict[str, int] = defaultdict(int)
    experts: dict[str, int] = {}
    rest: dict[str, Shape] = {}
    transposed: set[str] = set()
    for name, shape in tensor_shapes(spec).items():
        place = where[name]
        rest[place.stored] = shape[1:]
        if place.transposed:
            transposed.add(place.stored)
        if place.expert is not None:
            experts[place.stored] = max(experts.get(place.stored, 0), place.expert + 1)
        if not place.expert:  # of the first expert alone: all have the same rows
            rows[place.stored] += shape[0]
    shapes: dict[str, Shape] = {}
    for stored, num_rows in rows.items():
        shape = (num_rows, *rest[stored])
        if stored in transposed:
            shape = shape[::-1]
        shapes[stored] = (experts[stored], *shape) if stored in experts else shape
    return shapes
