"""The order of a layer, written once: every backend runs a layer by walking `layer_order`.

Does: name the pieces of a layer and their order; hold what a backend answers about a piece (`Support`). Does not: compute.
A piece is what a fused kernel may take in one go; a backend without such a kernel runs its parts one by one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from tonle.models.spec import LayerSpec, ModelSpec


class Piece(IntEnum):
    """What a layer is made of. Those up to ATTEND concern every token of a step, as each leaves a key and a value; in the
    last layer those after it concern only the tokens whose logits are wanted."""

    PROJECT = 0  # norm before; queries, keys and values of the hidden states
    ATTEND = 1  # norms per head, rotation, keys and values to the cache, attention
    ADD_ATTENDED = 2  # output product, norm after; added to the hidden states
    MIX = 3  # norm before; the mixer up to its activation (experts: all of it)
    ADD_MIXED = 4  # the mixer's second product (experts: none), norm after; added to the hidden states


def layer_order(layer: LayerSpec) -> tuple[Piece, ...]:
    """The pieces of this layer as they run."""
    if layer.residual == "parallel":  # the mixer reads the hidden states before attention changes them
        return Piece.PROJECT, Piece.ATTEND, Piece.MIX, Piece.ADD_ATTENDED, Piece.ADD_MIXED
    return Piece.PROJECT, Piece.ATTEND, Piece.ADD_ATTENDED, Piece.MIX, Piece.ADD_MIXED


@dataclass(frozen=True, slots=True)
class Support:
    """A backend's answer: can it do this piece of this layer, and how fast."""

    form: Literal["fused", "plain", "none"]  # kernels of its own, torch operations beside them, or not at all
    reason: str = ""  # why not fused


FUSED = Support("fused")
Answer = Callable[[LayerSpec, Piece], Support]


def why_not(spec: ModelSpec, answer: Answer) -> str | None:
    """The reason why a backend cannot run this model, or None."""
    for layer in dict.fromkeys(spec.layers):
        for piece in layer_order(layer):
            if (support := answer(layer, piece)).form == "none":
                return support.reason
    return None


def say_support(spec: ModelSpec, answer: Answer, log: logging.Logger) -> None:
    """One line for each reason why some piece has no fused form."""
    slow: dict[tuple[str, str], int] = {}
    for layer in spec.layers:
        for piece in layer_order(layer):
            if (support := answer(layer, piece)).form == "plain":
                key = (piece.name.lower().replace("_", " "), support.reason)
                slow[key] = slow.get(key, 0) + 1
    for (piece_name, reason), count in slow.items():
        log.info("%s of %d layers runs on torch operations: %s", piece_name, count, reason)
