"""`options` of Ollama's API.

Does: name them, translate those that a server of chat completions has, say of the others that they have no effect. Does
not: check values against a model.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec

from tonle.errors import InvalidRequest
from tonle.protocol.field_types import Integer
from tonle.protocol.fields import OtherFields
from tonle.protocol.openai import about

_NO_LIMIT = (-1, -2)  # Ollama's words for "until the model ends" and "until the context is full"
_SAME_NAME = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
_OF_SERVER = (
    "num_ctx", "num_batch", "num_gpu", "num_keep", "num_thread", "main_gpu", "low_vram", "f16_kv", "logits_all",
    "vocab_only", "use_mmap", "use_mlock", "embedding_only", "numa",
)  # fmt: skip
_OF_SAMPLING = (
    "tfs_z", "typical_p", "repeat_last_n", "mirostat", "mirostat_tau", "mirostat_eta", "penalize_newline",
)  # fmt: skip
# Programs send them with every request, most often with Ollama's defaults: so they are not refused.
_OTHER_FIELDS = OtherFields(
    no_effect={
        **dict.fromkeys(_OF_SERVER, "has no effect: the server decides"),
        **dict.fromkeys(_OF_SAMPLING, "has no effect: the server has no such control"),
    }
)


class Options(msgspec.Struct, kw_only=True):
    other_fields: ClassVar = _OTHER_FIELDS
    num_predict: Annotated[Integer | None, about("Most new tokens; -1 = no limit but the server's.")] = None
    temperature: float | None = None
    top_k: Integer | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Annotated[str | list[str] | None, about("End at any of these strings.")] = None
    repeat_penalty: Annotated[float | None, about("On tokens of prompt and answer; 1 = off.")] = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


def set_options(body: dict[str, Any], options: Options) -> None:
    """Write them into a body of chat completions or completions. Raises `InvalidRequest`."""
    for name in _SAME_NAME:
        if (value := getattr(options, name)) is not None:
            body[name] = value
    if options.repeat_penalty is not None:
        body["repetition_penalty"] = options.repeat_penalty
    if (length := options.num_predict) is not None and length not in _NO_LIMIT:
        if length < 1:
            raise InvalidRequest(
                "options.num_predict must be at least 1, or -1 for no limit", param="options.num_predict"
            )
        body["max_tokens"] = length
