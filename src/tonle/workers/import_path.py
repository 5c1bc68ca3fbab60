"""`load_object`: what an import path names, `package.module:Name`. Does not: know what it is for."""

from __future__ import annotations

import importlib
from typing import Any

from tonle.errors import ConfigError


def load_object(path: str) -> Any:
    """What `package.module:Name` names. Raises `ConfigError`, or what the module raises."""
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise  # something that the module needs
        raise ConfigError(
            f"there is no module {error.name!r} for {path}; it must be importable from where Tonle is started "
            "(PYTHONPATH)",
            param="kind",
        ) from None
    if not hasattr(module, name):
        raise ConfigError(f"the module {module_name} has no {name!r}", param="kind")
    return getattr(module, name)
