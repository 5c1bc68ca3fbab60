"""The body of /v1/images/generations and its reply, with OpenAI's names.

Does: name every field we act on, refuse those that would change the picture. Does not: check sizes against a model
(`workers/endpoints/images.py`).
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import UNSET, Struct, UnsetType

from tonle.protocol.field_types import Integer, about
from tonle.protocol.fields import OtherFields, Refusal
from tonle.protocol.openai import FieldWarning


class ImageRequest(Struct, kw_only=True):
    other_fields: ClassVar = OtherFields(
        refused={
            "background": Refusal("pictures are as the model paints them", ("auto", "opaque")),
            "output_format": Refusal("pictures are PNG", ("png",)),
            "output_compression": Refusal("PNG has no loss to choose", (100,)),
            "stream": Refusal("pictures come whole", (False,)),
            "partial_images": Refusal("pictures come whole", (0,)),
        },
        no_effect={
            "quality": "has no effect; steps does",
            "style": "has no effect; say it in the prompt",
            "moderation": "has no effect: nothing is moderated",
        },
    )
    prompt: Annotated[str | None, about("What the picture shows.")] = None
    model: Annotated[str | None, about("Name of the model; may be left out.")] = None
    n: Annotated[Integer | None, about("Pictures, 1 to 10. Default 1.")] = None
    size: Annotated[str | None, about("WIDTHxHEIGHT in pixels, multiples of 8; auto: the model's own (default).")] = (
        None
    )
    response_format: Annotated[
        Literal["b64_json", "url"] | None, about("b64_json (default). url is refused: nothing is stored to link to.")
    ] = None
    user: Annotated[str | None, about("Has no effect on the picture.")] = None
    # Not OpenAI's.
    negative_prompt: Annotated[str | None, about("What it must not show.")] = None
    steps: Annotated[Integer | None, about("Denoising steps, 1 to 200. Default: the pool's option steps, or 25.")] = (
        None
    )
    guidance_scale: Annotated[float | None, about("How closely to follow the prompt. Default: the model's own.")] = None
    seed: Annotated[Integer | None, about("The same seed, size and steps give the same picture.")] = None


class Image(Struct, kw_only=True):
    b64_json: str  # PNG
    seed: int


class ImageList(Struct, kw_only=True):
    created: int
    data: list[Image]
    size: str
    output_format: str = "png"
    warnings: list[FieldWarning] | UnsetType = UNSET
