"""`open_other`: models of architectures that have no row in `families.py`, through `transformers`.

Does: tell them from those that have one, load a folder with `transformers`, adopt a live model. Does not: run code that comes
with a checkpoint, or read pickled weights. `transformers` is an optional part of an installation: only this file and what it
imports need it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tonle.config.model_json import read_json
from tonle.errors import ConfigError, ModelError
from tonle.models.families import FAMILIES
from tonle.models.load import default_dtype
from tonle.models.load.stored_tensors import weight_files
from tonle.models.outline import other_architecture
from tonle.models.quantize import Quantization
from tonle.models.source import ModelSource

if TYPE_CHECKING:  # brings transformers
    from tonle.models.transformers_decoder import TransformersDecoder

_MAX_REASON = 300  # letters of another library's error


def open_other(
    model: ModelSource | Any, *, device: torch.device | None = None, dtype: torch.dtype | None = None,
    quantization: Quantization | None = None,
) -> TransformersDecoder | None:  # fmt: skip
    """None: the model is of a family of ours (`load`). `device` and `dtype` as in `load`. Raises `ModelError`, and `ConfigError`
    if weights are to be quantized, which is not done here."""
    if (architecture := other_architecture_of(model)) is None:
        return None
    if quantization is not None and quantization.to != "none":
        raise ConfigError(
            f"{architecture} runs through transformers, with weights as they are stored; leave quantization "
            "(--quantization) out", param="quantization",
        )  # fmt: skip
    if isinstance(model, ModelSource):
        return _open_folder(model, architecture, device or torch.device("cpu"), dtype)
    return _open_live(model, device, dtype)


def other_architecture_of(model: ModelSource | Any) -> str | None:
    """None: the model is of a family of ours, or of a kind that `load` refuses."""
    if isinstance(model, ModelSource):
        return other_architecture(read_json(model.path / "config.json")) if model.kind == "folder" else None
    library = sys.modules.get("transformers")  # a live model of its own has imported it
    if library is None or not isinstance(model, library.PreTrainedModel) or hasattr(model, "merge_and_unload"):
        return None
    return other_architecture({**model.config.to_dict(), "architectures": [type(model).__name__]})


def _open_folder(
    source: ModelSource, architecture: str, device: torch.device, dtype: torch.dtype | None
) -> TransformersDecoder:
    if importlib.util.find_spec("transformers") is None:
        raise ModelError(
            f"{source.path}: architecture {architecture!r} is not supported directly; with transformers it may run: "
            f"pip install 'tonle[hf]'. Supported directly: {', '.join(FAMILIES)}"
        )
    from tonle.models.transformers_decoder import adopt

    config = read_json(source.path / "config.json")
    stored = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    try:
        model = _load(source.path, dtype or default_dtype(stored, device), has_code="auto_map" in config)
        return adopt(model.to(device))
    except ModelError as error:
        where = "" if str(source.path) in error.message else f"{source.path}: "
        raise ModelError(f"{where}{error.message}") from error.__cause__


def _load(folder: Path, dtype: torch.dtype, *, has_code: bool) -> Any:
    """The live model, every tensor of it from the folder. `has_code`: the checkpoint brings code of its own."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    weight_files(folder)  # refuses what is missing or pickled
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        known = type(config) in AutoModelForCausalLM._model_mapping
        kind: Any = AutoModelForCausalLM if known else AutoModelForImageTextToText
        with _quiet():
            model, found = kind.from_pretrained(
                folder, config=config, dtype=dtype, use_safetensors=True, trust_remote_code=False, output_loading_info=True,
                ignore_mismatched_sizes=True,
            )  # fmt: skip
    except Exception as error:  # of any library that transformers uses; all mean the same to a user
        if has_code:
            raise ModelError(
                "transformers knows it only by code that the checkpoint brings, which is not run"
            ) from error
        reason = " ".join(str(error).split())[:_MAX_REASON] or type(error).__name__
        raise ModelError(f"transformers cannot load it: {reason}") from error
    for what, names in (("missing", found["missing_keys"]), ("of another shape", found["mismatched_keys"])):
        if names:
            first = sorted(str(name[0] if isinstance(name, tuple) else name) for name in names)[0]
            raise ModelError(f"tensor {first} is {what}; the model would run with random numbers in its place")
    return model.eval().requires_grad_(False)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Loading prints bars and tables to stderr, which is our log; what they say is in our errors."""
    from transformers.utils import logging

    library: Any = logging
    had_bars, verbosity = library.is_progress_bar_enabled(), library.get_verbosity()
    library.disable_progress_bar()
    library.set_verbosity_error()
    try:
        yield
    finally:
        library.set_verbosity(verbosity)
        if had_bars:
            library.enable_progress_bar()


def _open_live(model: Any, device: torch.device | None, dtype: torch.dtype | None) -> TransformersDecoder:
    _check_placement(type(model).__name__, model, device, dtype)
    from tonle.models.transformers_decoder import adopt

    return adopt(model)


def _check_placement(name: str, model: Any, device: torch.device | None, dtype: torch.dtype | None) -> None:
    devices = {tensor.device for tensor in model.state_dict().values()}
    if len(devices) > 1 or any(found.type == "meta" for found in devices):
        raise ModelError(f"the live {name} is spread over {', '.join(map(str, devices))}; load it onto one device")
    (own,) = devices
    if device is not None and (device.type != own.type or device.index not in (None, own.index)):
        raise ModelError(f"the live {name} is on {own}, not {device}; move it with model.to(), or leave device='auto'")
    if dtype is not None and dtype != model.dtype:
        raise ModelError(
            f"the live {name} has dtype {model.dtype}, not {dtype}; cast it with model.to(), or leave dtype='auto'"
        )
