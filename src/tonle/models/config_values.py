"""Values out of the settings that come with a model: read with care, since a value of any type may stand anywhere in them.

Does: check types and sizes; give errors the file's path. Does not: know which settings there are (`read_hf.py`,
`read_gguf.py`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tonle.errors import ModelError

Config = Mapping[str, Any]

_MAX_SIZE = 2**31 - 1  # of any size a config names
_MAX_LAYERS = 10_000


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Errors get the path, and those of Python a sentence."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{path}: {error.message}") from None
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        raise ModelError(f"{path}: a setting of the model makes no sense: {error}") from error


def whole_number(config: Config, key: str, default: int | None = None) -> int:
    """`default` where the config names none."""
    value = config.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelError(f"the model's config should name a whole number as {key}, not {value!r}")
    if abs(value) > _MAX_SIZE:
        raise ModelError(f"the model's {key} is beyond any real model's")
    return value


def number(config: Config, key: str, default: float | None = None) -> float:
    """A positive one; `default` where the config names none."""
    found = default if config.get(key) is None else optional_number(config, key)
    if found is None:
        raise ModelError(f"the model's config should name a positive number as {key}, not None")
    return found


def optional_number(config: Config, key: str) -> float | None:
    """A positive one; None where the config names none."""
    value = config.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"the model's config should name a positive number as {key}, not {value!r}")
    return float(value)


def number_of_layers(config: Config, key: str) -> int:
    number = whole_number(config, key)
    if number > _MAX_LAYERS:
        raise ModelError(f"the model's {key} may be at most {_MAX_LAYERS}, not {number}")
    return number


def by_layer(values: Any, num_layers: int, key: str) -> list[Any]:
    """A list with a value for each layer."""
    found: list[Any] = list(values)
    if len(found) < num_layers:
        raise ModelError(f"the model has {num_layers} layers, but {key} speaks of {len(found)}")
    return found[:num_layers]


def token_ids(value: Any) -> tuple[int, ...]:
    """One, several or none; what is neither counts as none."""
    tokens = value if isinstance(value, list | tuple) else [value]
    return tuple(tokens) if all(isinstance(token, int) for token in tokens) else ()
