"""`cache_dir`: the one folder for what Tonle downloads and compiles, so that one volume keeps all of it.

    models/    the default model
    hub/       models from the hub, if the folder was chosen (see `hub_dir`)
    kernels/   compiled CPU kernels (numba)
    triton/    compiled CUDA kernels

Does: decide paths. Does not: create folders or write to them. The choice travels in the environment, because the engine's
process and the compiler's must agree with the one that read the settings.
"""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "TONLE_CACHE_DIR"
_HUB_VARIABLES = ("HF_HUB_CACHE", "HF_HOME", "HUGGINGFACE_HUB_CACHE")
_TRITON_VARIABLE = "TRITON_CACHE_DIR"


def cache_dir() -> Path:
    """$TONLE_CACHE_DIR (the setting `cache_dir`), else the user's cache directory."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "tonle"
    return Path.home() / ".cache" / "tonle"


def choose_cache_dir(path: str) -> None:
    """For this process and those it starts."""
    os.environ[VARIABLE] = str(Path(path).expanduser().absolute())


def hub_dir() -> Path | None:
    """Where hub models are kept; None: the hub's own cache, which other programs share.

    Ours only if the user chose a cache directory, and did not choose one for the hub.
    """
    if not os.environ.get(VARIABLE) or any(os.environ.get(name) for name in _HUB_VARIABLES):
        return None
    return cache_dir() / "hub"


def use_triton_dir() -> Path:
    """Tell Triton where to keep compiled kernels, unless the user did. Call it before the first kernel is compiled."""
    return Path(os.environ.setdefault(_TRITON_VARIABLE, str(cache_dir() / "triton")))
