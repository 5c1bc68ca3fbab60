"""What a LoRA adapter may be called, and what to do with one that is elsewhere.

Does: check names. Does not: know which adapters are loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from tonle.errors import ConfigError

MAX_NAME_CHARS = 128
DOWNLOAD = "adapters are not fetched from URLs or hubs: download it first (hf download ORG/NAME --local-dir FOLDER)"
# Parts between slashes, as in names of the hub. No part is empty or begins with a dot: a name is never a path or an address.
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._:-]*(?:/[A-Za-z0-9_-][A-Za-z0-9._:-]*)*")


def wrong_adapter_name(name: str) -> str | None:
    """What is wrong with it, as a sentence, or None. Names travel in headers, metrics and `NAME=PATH`."""
    if len(name) <= MAX_NAME_CHARS and _NAME.fullmatch(name):
        return None
    return (
        f"an adapter cannot be called {name[:MAX_NAME_CHARS]!r}: a name has 1 to {MAX_NAME_CHARS} letters of A-Z and a-z, digits "
        "and the characters . _ - : / and is neither a path nor a URL"
    )


def models_own_name(name: str) -> str:
    """The sentence about an adapter that is called as the model is: requests for that name get the model."""
    return f"adapter {name}: the model itself is served under that name; choose another for the adapter"


def check_not_models(adapters: Iterable[str], *model_names: str) -> None:
    """No adapter of the setting `lora` has one of the model's names. Raises `ConfigError`."""
    for name in adapters:
        if name in model_names:
            raise ConfigError(models_own_name(name), param="lora")
