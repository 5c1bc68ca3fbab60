"""POST /v1/images/generations: a text in, pictures out, as base64 of PNG.

Does: check, one job per picture, each with a seed of its own. Does not: store pictures: a URL is refused.
"""

from __future__ import annotations

import base64
import importlib.util
import re
import secrets
import time
from typing import Any

import msgspec
from msgspec import UNSET

from tonle.edge.client_connection import Sink
from tonle.errors import InvalidRequest
from tonle.gateway.refusals import NotServedHere
from tonle.protocol.images import Image, ImageList, ImageRequest
from tonle.protocol.parse import parse, strict_refusal, warning_headers
from tonle.workers.kind import Job
from tonle.workers.pool import WorkerPool
from tonle.workers.worker_request import WorkerRequest

MAX_IMAGES = 10
MAX_STEPS = 200
MAX_PROMPT_CHARS = 32_000
MAX_SEED = 2**63 - 1
MAX_SIDE = 8192
_SIZE = re.compile(r"(\d{1,5})x(\d{1,5})")


async def images(request: WorkerRequest, pool: WorkerPool, sink: Sink) -> None:
    _check_served(pool)
    asked, warnings = parse(request.body, ImageRequest)
    if warnings and request.is_strict:
        raise strict_refusal(warnings)
    jobs = image_jobs(asked)
    results = await pool.run_all(jobs)
    made = [
        Image(b64_json=base64.b64encode(result.media[0]).decode(), seed=result.fields["seed"]) for result in results
    ]
    first = results[0].fields
    reply = ImageList(
        created=int(time.time()), data=made, size=f"{first['width']}x{first['height']}", warnings=warnings or UNSET
    )
    sink.head(200, {"content-type": "application/json", **warning_headers(warnings)})
    sink.data(msgspec.json.encode(reply))


def _check_served(pool: WorkerPool) -> None:
    """Of a pool that starts with its first job. Raises `NotServedHere`."""
    if importlib.util.find_spec("diffusers") is None:
        raise NotServedHere(
            "pictures need diffusers, which is not installed on this server: pip install 'tonle[images]'"
        )
    if pool.config.model is None:
        raise NotServedHere(
            "the images pool of this server has no model: start it with a diffusers folder or a hub name, such as "
            "--worker images=stabilityai/sd-turbo"
        )


def image_jobs(asked: ImageRequest) -> list[Job]:
    """Raises `InvalidRequest`."""
    if not asked.prompt:
        raise InvalidRequest("prompt is missing", param="prompt")
    for name in ("prompt", "negative_prompt"):
        if len(getattr(asked, name) or "") > MAX_PROMPT_CHARS:
            raise InvalidRequest(f"{name} is longer than {MAX_PROMPT_CHARS} characters", param=name)
    if asked.response_format == "url":
        raise InvalidRequest(
            "response_format url is not supported: pictures are not stored; use b64_json", param="response_format"
        )
    number = _within("n", asked.n, 1, MAX_IMAGES, 1)
    steps = None if asked.steps is None else _within("steps", asked.steps, 1, MAX_STEPS, 1)
    width, height = _size(asked.size)
    first = secrets.randbits(31) if asked.seed is None else _within("seed", asked.seed, 0, MAX_SEED - MAX_IMAGES, 0)
    fields: dict[str, Any] = {
        "prompt": asked.prompt, "negative_prompt": asked.negative_prompt, "width": width, "height": height, "steps": steps,
        "guidance_scale": asked.guidance_scale,
    }  # fmt: skip
    return [Job({**fields, "seed": first + place}) for place in range(number)]


def _within(name: str, value: int | None, low: int, high: int, default: int) -> int:
    if value is None:
        return default
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be {low} to {high}, not {value}", param=name)
    return value


def _size(text: str | None) -> tuple[int | None, int | None]:
    if text in (None, "auto"):
        return None, None
    found = _SIZE.fullmatch(str(text))
    sides = (int(found[1]), int(found[2])) if found else (0, 0)
    if not all(8 <= side <= MAX_SIDE and side % 8 == 0 for side in sides):
        raise InvalidRequest(
            f"size must be WIDTHxHEIGHT in multiples of 8, 8 to {MAX_SIDE}, or auto; not {str(text)[:40]!r}",
            param="size",
        )
    return sides
