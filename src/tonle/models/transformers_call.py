"""`ModelCall`: one way to call any `transformers` model: tokens in, logits of the wanted ones out.

Does: know which arguments the model's `forward` takes, catch its last hidden states, switch its attention for a while. Does not:
know of steps or caches.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch


class ModelCall:
    """A live model and what can be asked of it."""

    def __init__(self, model: Any) -> None:
        self.model = model
        bodies = (model.base_model, model.get_decoder())  # the head may be fed by one or the other
        self._bodies = list({id(body): body for body in bodies if body is not None and body is not model}.values())
        self._parameters = frozenset(inspect.signature(model.forward).parameters)
        configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
        self._configs = [config for config in configs.values() if hasattr(config, "_attn_implementation")]

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def text_config(self) -> Any:
        return self.model.config.get_text_config(decoder=True)

    @property
    def layer_types(self) -> list[str]:
        return list(getattr(self.text_config, "layer_types", None) or [])

    def takes(self, argument: str) -> bool:
        return argument in self._parameters

    def __call__(
        self, tokens: torch.Tensor, wanted: torch.Tensor, want_hidden: bool, arguments: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """tokens (R, n) -> logits (R, W, vocab) of the places `wanted` (W,) of each row, and where asked for the last hidden
        states (R, n, hidden)."""
        given = {name: value for name, value in arguments.items() if self.takes(name)}
        if self.takes("logits_to_keep"):
            given["logits_to_keep"] = wanted
        with self._catching(want_hidden) as caught:
            logits: torch.Tensor = self.model(input_ids=tokens, **given).logits
        if not self.takes("logits_to_keep"):
            logits = logits.index_select(1, wanted)
        return logits, caught[-1] if caught else None

    @contextlib.contextmanager
    def _catching(self, want_hidden: bool) -> Iterator[list[torch.Tensor]]:
        """What the model's body gives to its head; the last one, of bodies inside each other."""
        caught: list[torch.Tensor] = []
        if not want_hidden:
            yield caught
            return
        hooks = [
            body.register_forward_hook(lambda _module, _arguments, output: caught.append(output[0]))
            for body in self._bodies
        ]
        try:
            yield caught
        finally:
            for hook in hooks:
                hook.remove()

    @contextlib.contextmanager
    def attention(self, name: str) -> Iterator[None]:
        """The model's layers call the attention of this name."""
        before = [config._attn_implementation for config in self._configs]
        try:
            for config in self._configs:
                config._attn_implementation = name
            yield
        finally:
            for config, own in zip(
                self._configs, before, strict=True
            ):  # a config sets those inside it: outer ones first
                config._attn_implementation = own
