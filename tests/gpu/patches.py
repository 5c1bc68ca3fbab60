"""Mistakes that a CUDA path could have, as patches of it: `PATCHES[name]()` makes one, for the rest of the process.

Does: replace functions of `tonle.models.cuda` and of the CUDA runner. Does not: touch the references, which are transformers and
our eager decoder. A patch that no longer finds what it replaces says so.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


class CannotPatchError(Exception):
    """The code that a patch changes is not there: the patch, not the code, needs work."""


def _wrap(module: str, name: str, around: Callable[..., Any]) -> None:
    """Replace a function, wherever it was imported to, by around(original, arguments by name)."""
    __import__(module)
    original = getattr(sys.modules[module], name, None)
    if original is None:
        raise CannotPatchError(f"{module} has no {name}")
    signature = inspect.signature(original)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return around(lambda: original(*bound.args, **bound.kwargs), bound.arguments)

    __import__("tonle.models.cuda.model")
    for found in [found for key, found in sys.modules.items() if key.startswith("tonle.")]:
        if vars(found).get(name) is original:
            setattr(found, name, wrapped)


def _set(module: str, name: str, **values: Any) -> None:
    """Call a function with other arguments than it is called with."""

    def around(call: Callable[[], Any], arguments: dict[str, Any]) -> Any:
        for argument, value in values.items():
            if argument not in arguments:
                raise CannotPatchError(f"{module}.{name} has no argument {argument}")
            arguments[argument] = value
        return call()

    _wrap(module, name, around)


def _zero_after(module: str, name: str) -> None:
    """Whatever a kernel writes to `out`, nothing is left of it."""

    def around(call: Callable[[], Any], arguments: dict[str, Any]) -> Any:
        found = call()
        arguments["out"].zero_()
        return found

    _wrap(module, name, around)


_DECODE, _PREFILL = "tonle.models.cuda.decode_attention", "tonle.models.cuda.prefill_attention"


def _no_attention() -> None:
    _zero_after(_PREFILL, "prefill_attention")
    _zero_after(_DECODE, "decode_attention")


def _no_prompt_attention() -> None:
    _zero_after(_PREFILL, "prefill_attention")


def _no_decode_attention() -> None:
    """Of steps without prompts."""

    def around(call: Callable[[], Any], arguments: dict[str, Any]) -> Any:
        found = call()
        if arguments["fused"]:
            arguments["out"].zero_()
        return found

    _wrap(_DECODE, "decode_attention", around)


def _window_ignored() -> None:
    _set(_PREFILL, "prefill_attention", window=None)
    _set(_DECODE, "decode_attention", window=None)


def _head_norms_ignored() -> None:
    _set("tonle.models.cuda.cuda_rope", "rotate_and_store", q_gain=None, k_gain=None)
    _set(_DECODE, "decode_attention", q_gain=None, k_gain=None)


def _rope_scaling_ignored() -> None:
    from tonle.models.rope import Rotary
    from tonle.models.spec import RopeSpec

    def around(call: Callable[[], Any], arguments: dict[str, Any]) -> Any:
        head_dim = 2 * len(arguments["rotary"]._frequencies)
        arguments["rotary"] = Rotary(RopeSpec(), head_dim, arguments["device"])  # with the theta of all models here
        return call()

    _wrap("tonle.models.cuda.cuda_rope", "angle_table", around)


def _keys_to_the_wrong_slots() -> None:
    """Of prompts: each token's to the slot of the one before it."""
    from tonle.engine.run.packing import Packer

    original = Packer.pack

    def pack(self: Packer, plan: Any) -> Any:
        packed = original(self, plan)
        slots = packed.buffer.host("slots")[: packed.num_tokens]
        np.maximum(slots - 1, 0, out=slots)
        return packed

    Packer.pack = pack  # type: ignore[method-assign]


def _with_decoder(change: Callable[[Any], Any]) -> None:
    """Make the CUDA model of other weights."""
    from tonle.models.cuda.model import CudaModel

    original = CudaModel.__init__

    @functools.wraps(original)
    def made(self: CudaModel, decoder: Any, *args: Any, **kwargs: Any) -> None:
        other = object.__new__(type(decoder))
        other.__dict__.update(vars(decoder))
        layers = list(decoder.weights.layers)
        other.weights = dataclasses.replace(decoder.weights, layers=change(layers))
        original(self, other, *args, **kwargs)

    CudaModel.__init__ = made  # type: ignore[method-assign]


def _biases_ignored() -> None:
    def change(layers: list[Any]) -> list[Any]:
        for i, layer in enumerate(layers):
            parts = [dataclasses.replace(part, bias=torch.zeros_like(part.bias)) if part.bias is not None else part
                     for part in layer.qkv.parts]  # fmt: skip
            layers[i] = dataclasses.replace(layer, qkv=type(layer.qkv)(*parts))
        return layers

    _with_decoder(change)


def _last_mixer_skipped() -> None:
    def change(layers: list[Any]) -> list[Any]:
        down = layers[-1].down
        parts = [dataclasses.replace(part, weight=torch.zeros_like(part.weight)) for part in down.parts]
        layers[-1] = dataclasses.replace(layers[-1], down=type(down)(*parts))
        return layers

    _with_decoder(change)


def _norm_gains_ignored() -> None:
    def change(layers: list[Any]) -> list[Any]:
        for i, layer in enumerate(layers):
            norm = layer.input_norm
            layers[i] = dataclasses.replace(layer, input_norm=type(norm)(torch.ones_like(norm.weight), norm.eps))
        return layers

    _with_decoder(change)


def _adapter_ignored() -> None:
    from tonle.models.cuda.model import CudaModel

    if not hasattr(CudaModel, "set_adapter"):
        raise CannotPatchError("CudaModel has no set_adapter")
    CudaModel.set_adapter = lambda self, slot, adapter: None


def _adapter_of_the_next_slot() -> None:
    from tonle.models.cuda.model import CudaModel

    if not hasattr(CudaModel, "set_adapter"):
        raise CannotPatchError("CudaModel has no set_adapter")
    original, most = CudaModel.set_adapter, [0]
    enable = CudaModel.enable_adapters

    def enable_adapters(self: Any, num_slots: int, max_rank: int) -> None:
        most[0] = num_slots
        enable(self, num_slots, max_rank)

    CudaModel.enable_adapters = enable_adapters
    CudaModel.set_adapter = lambda self, slot, adapter: original(self, (slot + 1) % most[0], adapter)


PATCHES: dict[str, Callable[[], None]] = {
    "no attention": _no_attention,
    "no attention in prompts": _no_prompt_attention,
    "no attention in decode steps": _no_decode_attention,
    "window ignored": _window_ignored,
    "q/k norm ignored": _head_norms_ignored,
    "rope scaling ignored": _rope_scaling_ignored,
    "qkv biases ignored": _biases_ignored,
    "norm gains ignored": _norm_gains_ignored,
    "last mixer skipped": _last_mixer_skipped,
    "keys and values to wrong slots": _keys_to_the_wrong_slots,
    "adapter ignored": _adapter_ignored,
    "adapter of the next slot": _adapter_of_the_next_slot,
}
