"""`OnnxEncoder`: an encoder that was exported as model.onnx, by onnxruntime.

Does: run it over inputs of about one length, which it needs padded. Does not: pool; an export that pools by itself
(`sentence_embedding`) is used as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tonle.errors import ConfigError, ModelError
from tonle.workers.encoders.packed import Group, Packed

_INPUTS = {"input_ids", "attention_mask", "token_type_ids"}
_MOST_PADDING = 0.15  # of a rectangle, padding / tokens


class OnnxEncoder:
    def __init__(self, file: Path, device: torch.device, *, wanted: tuple[str, ...]) -> None:
        """`wanted`: names of outputs, the best first. Raises `ModelError`, `ConfigError`."""
        try:
            import onnxruntime
        except ModuleNotFoundError:
            raise ModelError(
                f"{file} needs onnxruntime, which is not installed: pip install 'tonle[embeddings]'"
            ) from None
        provider = "CUDAExecutionProvider" if device.type == "cuda" else "CPUExecutionProvider"
        if provider not in onnxruntime.get_available_providers():
            raise ConfigError(
                f"the installed onnxruntime cannot use {device}; install onnxruntime-gpu, or set device cpu",
                param="device",
            )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        chosen: list[Any] = [(provider, {"device_id": device.index or 0}) if device.type == "cuda" else provider]
        try:
            self._session = onnxruntime.InferenceSession(str(file), options, providers=chosen)
        except Exception as error:  # onnxruntime has a class for each of its codes
            raise ModelError(f"{file}: cannot be used by onnxruntime: {error}") from error
        self._inputs = {each.name for each in self._session.get_inputs()}
        if not {"input_ids"} <= self._inputs <= _INPUTS:
            raise ModelError(
                f"{file}: has the inputs {', '.join(sorted(self._inputs))}; an encoder has {sorted(_INPUTS)}"
            )
        outputs = {each.name: len(each.shape) for each in self._session.get_outputs()}
        self.output = next((name for name in wanted if name in outputs), next(iter(outputs)))
        self.is_pooled = outputs[self.output] == 2  # one row for each input, not for each token

    def run(self, packed: Packed) -> NDArray[np.float32]:
        """(inputs, …) if it pools, else (tokens, hidden)."""
        return np.concatenate([self._rectangle(packed, group) for group in packed.groups(_MOST_PADDING)])

    def _rectangle(self, packed: Packed, group: Group) -> NDArray[np.float32]:
        shape = (len(group.lengths), group.lengths[-1])
        inside = np.arange(shape[1]) < np.asarray(group.lengths)[:, None]
        span = slice(group.first, group.first + group.num_tokens)
        feed = {name: np.zeros(shape, np.int64) for name in self._inputs}
        feed["input_ids"][inside] = packed.ids[span]
        if "attention_mask" in feed:
            feed["attention_mask"][inside] = 1
        if "token_type_ids" in feed:
            feed["token_type_ids"][inside] = packed.types[span]
        (found,) = self._session.run([self.output], feed)
        rows: NDArray[np.float32] = np.asarray(found, np.float32)
        return rows if self.is_pooled else rows[inside]


def size_of(config: Mapping[str, Any], *names: str) -> int:
    """A size that exports of any architecture have, under one of these names. Raises `ModelError`."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and value > 0:
            return value
    raise ModelError(f"config.json has none of {', '.join(names)}")
