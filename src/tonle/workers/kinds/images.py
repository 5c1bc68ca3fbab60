"""`Images`: pictures from texts, with a pipeline of `diffusers`: Stable Diffusion, SDXL, Flux and others that take a prompt.

Job.fields: prompt, negative_prompt, width, height, steps, guidance_scale, seed (one picture per job; None: the default).
Result.fields: width, height, seed. Result.media: one PNG.

Does: load a folder or a hub name, paint one picture at a time. Does not: moderate, edit or store pictures.
"""

from __future__ import annotations

import inspect
import io
from typing import Any, ClassVar

from tonle.errors import ConfigError, InvalidRequest, ModelError, TonleError
from tonle.workers.kind import Job, Kind, Result

DEFAULT_STEPS = 25
INSTALL = "pip install 'tonle[images]'"
_OPTIONS = ("dtype", "steps", "max_pixels", "attention_slicing")
MAX_PIXELS = 2048 * 2048


class Images(Kind):
    batches: ClassVar[bool] = False  # a picture fills a device

    def load(self, model: str | None, device: str, options: dict[str, Any]) -> None:
        if model is None:
            raise ConfigError(
                "the images worker needs a model: a diffusers folder or a hub name, such as --worker "
                "images=stabilityai/sd-turbo", param="model",
            )  # fmt: skip
        if unknown := set(options) - set(_OPTIONS):
            raise ConfigError(f"images has no option {min(unknown)!r}; it has {', '.join(_OPTIONS)}", param="options")
        try:
            import diffusers
            import torch
        except ImportError as error:
            raise ConfigError(f"pictures need {error.name or 'diffusers'}: {INSTALL}", param="kind") from error
        dtype = getattr(torch, options.get("dtype", "float16" if device.startswith("cuda") else "float32"), None)
        if not isinstance(dtype, torch.dtype):
            raise ConfigError(f"dtype must be float32, float16 or bfloat16, not {options['dtype']!r}", param="options")
        try:
            pipelines: Any = diffusers.DiffusionPipeline
            self._pipeline = pipelines.from_pretrained(model, torch_dtype=dtype).to(device)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{model} cannot be loaded as a diffusers pipeline: {error}", param="model") from error
        self._pipeline.set_progress_bar_config(disable=True)
        if options.get("attention_slicing"):
            self._pipeline.enable_attention_slicing()
        self._takes = set(inspect.signature(self._pipeline.__call__).parameters)
        if "prompt" not in self._takes:
            raise ModelError(
                f"{model} is a pipeline that takes no prompt; one that makes pictures from texts is needed"
            )
        self._steps = int(options.get("steps", DEFAULT_STEPS))
        self._max_pixels = int(options.get("max_pixels", MAX_PIXELS))
        self._side = self._own_side()

    def run(self, batch: list[Job]) -> list[Result | TonleError]:
        return [self._paint(job.fields) for job in batch]

    def describe(self) -> dict[str, Any]:
        return {
            "pipeline": type(self._pipeline).__name__, "width": self._side, "height": self._side, "steps": self._steps,
            "max_pixels": self._max_pixels,
        }  # fmt: skip

    def _own_side(self) -> int:
        """Pixels of the model's own pictures, which are square."""
        core = getattr(self._pipeline, "unet", None) or getattr(self._pipeline, "transformer", None)
        cells = getattr(getattr(core, "config", None), "sample_size", None)
        cells = cells if isinstance(cells, int) else 64
        return int(cells * getattr(self._pipeline, "vae_scale_factor", 8))

    def _paint(self, fields: dict[str, Any]) -> Result | TonleError:
        import torch

        width, height = fields.get("width") or self._side, fields.get("height") or self._side
        if width * height > self._max_pixels:
            return InvalidRequest(f"size: at most {self._max_pixels:,} pixels, not {width}x{height}", param="size")
        asked = {
            "prompt": fields["prompt"], "negative_prompt": fields.get("negative_prompt"), "width": width, "height": height,
            "num_inference_steps": fields.get("steps") or self._steps, "guidance_scale": fields.get("guidance_scale"),
        }  # fmt: skip
        known = {name: value for name, value in asked.items() if value is not None}
        if missing := known.keys() - self._takes:
            return InvalidRequest(f"{type(self._pipeline).__name__} does not take {min(missing)}", param=min(missing))
        seed = int(fields["seed"])
        generator = torch.Generator("cpu").manual_seed(seed)  # the same noise on every device
        with torch.inference_mode():
            picture = self._pipeline(**known, generator=generator, num_images_per_prompt=1).images[0]
        written = io.BytesIO()
        picture.save(written, format="PNG")
        return Result({"width": picture.width, "height": picture.height, "seed": seed}, (written.getvalue(),))
