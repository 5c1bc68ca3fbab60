"""LoRA adapters on the wire: vLLM's bodies and replies of loading and removing one, and the header that names one.

Does: types, texts and the header's form. Does not: load anything.
"""

from __future__ import annotations

import re
from typing import Annotated

from msgspec import Meta, Struct

from tonle.config.adapter_names import wrong_adapter_name
from tonle.errors import CallerError, InvalidRequest, UnknownModel

LOAD_PATH = "/v1/load_lora_adapter"
UNLOAD_PATH = "/v1/unload_lora_adapter"
PLAIN_TEXT = "text/plain; charset=utf-8"

# Of an answer that an adapter had a part in: NAME@sha256:DIGEST, the content that computed it.
ADAPTER_HEADER = "x-tonle-adapter"

# Plainly a path or a URL: /models/x, ./x, ~/x, C:\x, s3://bucket/x. A name may have a slash in it: org/name.
_PLACE = re.compile(r"[/\\~]|\.{1,2}[/\\]|[A-Za-z]:[/\\]|.*://|.*[/\\]\.\.([/\\]|$)|file:", re.IGNORECASE | re.DOTALL)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_HEADER = re.compile(r"[!-~]{1,300}@sha256:([0-9a-f]{64})")


class UnloadAdapterRequest(Struct, kw_only=True):
    """The body of POST /v1/unload_lora_adapter."""

    lora_name: Annotated[str, Meta(description="The name that requests give as model.")]
    lora_int_id: int | None = None  # of vLLM; not needed
    lora_path: str | None = None  # as in the body of a load; not needed
    base_model: Annotated[
        str | None, Meta(description="The model it is for; only needed in front of several models.")
    ] = None


class LoadAdapterRequest(UnloadAdapterRequest, kw_only=True):
    """The body of POST /v1/load_lora_adapter."""

    lora_path: Annotated[str, Meta(description="A PEFT folder on the server's machine.")]
    load_inplace: Annotated[
        bool, Meta(description="Whether an adapter that has this name already is replaced; else that is an error.")
    ] = False


def check_name(name: str) -> None:
    """Raises `InvalidRequest` if an adapter cannot have this name."""
    if (wrong := wrong_adapter_name(name)) is not None:
        raise InvalidRequest(f"lora_name: {wrong}", param="lora_name")


def unknown_model(name: str, hint: str) -> CallerError:
    """For a request whose `model` is not served here. Nothing is ever loaded because a request names it."""
    if _PLACE.match(name):
        return InvalidRequest(
            f"model must be a name that is served here, not the path or URL {name[:200]!r}; {hint}", param="model"
        )
    return UnknownModel(f"there is no model {name!r} here; {hint}", param="model")


def unknown_adapter(name: str) -> UnknownModel:
    """For a removal of one that is not there."""
    return UnknownModel(
        f"The LoRA adapter '{name[:200]}' cannot be found; GET /v1/models lists those there are", param="lora_name"
    )


def loaded_text(name: str, *, replaced: bool) -> str:
    """vLLM's words for a new one; a replacement begins and ends alike."""
    return f"Success: LoRA adapter '{name}' {'replaced' if replaced else 'added'} successfully."


def unloaded_text(name: str) -> str:
    return f"Success: LoRA adapter '{name}' removed successfully."


def loaded_twice(name: str) -> InvalidRequest:
    return InvalidRequest(
        f"The LoRA adapter '{name}' has already been loaded; to replace it, set load_inplace to true", param="lora_name"
    )


def is_digest(text: str) -> bool:
    return _DIGEST.fullmatch(text) is not None


def header_value(name: str, digest: str) -> str:
    return f"{name}@sha256:{digest}"


def digest_in(header: str | None) -> str | None:
    """The digest that `ADAPTER_HEADER` of a reply tells; None if there is none. A server may say anything."""
    found = _HEADER.fullmatch(header) if header else None
    return None if found is None else found[1]
