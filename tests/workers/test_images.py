"""Pictures: a tiny pipeline with random weights in a real worker process, over HTTP; and what is refused."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.gateway.running_gateway import run
from tests.workers.test_served_pools import HERE, alone, client_of
from tonle.errors import ConfigError, InvalidRequest, ModelError
from tonle.protocol.images import ImageRequest
from tonle.workers.builtin import BUILTIN, BuiltinKind
from tonle.workers.endpoints import images as endpoint
from tonle.workers.endpoints.images import image_jobs
from tonle.workers.kind import Result
from tonle.workers.kinds.images import Images

NO_DIFFUSERS = "diffusers is not installed (the extra images)"


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stable Diffusion with a few thousand weights."""
    pytest.importorskip("diffusers", reason=NO_DIFFUSERS)
    import torch
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    folder = tmp_path_factory.mktemp("pipeline")
    torch.manual_seed(0)
    letters = [chr(number) for number in range(33, 127)]
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    tokenizer = CLIPTokenizer({word: place for place, word in enumerate(words)}, [])
    tokenizer.model_max_length = 77
    text = CLIPTextModel(CLIPTextConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        bos_token_id=len(words) - 2, eos_token_id=len(words) - 1, pad_token_id=len(words) - 1,
    ))  # fmt: skip
    unet = UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32, attention_head_dim=4,
    )  # fmt: skip
    vae = AutoencoderKL(
        block_out_channels=(8, 8), norm_num_groups=4, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    made = StableDiffusionPipeline(
        vae=vae, text_encoder=text, tokenizer=tokenizer, unet=unet, scheduler=DDIMScheduler(), safety_checker=None,
        feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    made.save_pretrained(folder)
    return folder


def test_a_pipeline_paints(pipeline: Path) -> None:
    """In this process: importing diffusers takes longer than all else, and once is enough."""
    kind = Images()
    kind.load(str(pipeline), "cpu", {"steps": 2})
    assert kind.describe() == {
        "pipeline": "StableDiffusionPipeline", "width": 16, "height": 16, "steps": 2, "max_pixels": 2048 * 2048,
    }  # fmt: skip
    asked = ImageRequest(prompt="a river", n=2, size="16x24", seed=5, negative_prompt="rain")
    one, two = kind.run(image_jobs(asked))
    again = kind.run(image_jobs(ImageRequest(prompt="a river", size="16x24", seed=6, negative_prompt="rain")))
    assert isinstance(one, Result) and isinstance(two, Result) and isinstance(again[0], Result)
    assert one.media != two.media and two.media == again[0].media  # the seeds count up
    from PIL import Image

    assert Image.open(io.BytesIO(bytes(one.media[0]))).size == (16, 24)
    (large,) = kind.run(image_jobs(ImageRequest(prompt="x", size="4096x4096")))
    assert isinstance(large, InvalidRequest) and large.param == "size"


def test_pictures_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    """The endpoint and a real worker process, with a kind that needs no diffusers."""
    monkeypatch.setitem(BUILTIN, "images", BuiltinKind(f"{HERE}:Paint", BUILTIN["images"].handlers))
    monkeypatch.setattr(endpoint.importlib.util, "find_spec", lambda name: name)

    async def main() -> None:
        async with alone({"kind": "images", "model": "painter"}) as url:
            client = client_of(url)

            async def paint(**fields: Any) -> list[bytes]:
                seed = {"seed": fields.pop("seed", 5)}
                made = await client.images.generate(prompt="a river", model="painter", extra_body=seed, **fields)
                return [base64.b64decode(each.b64_json or "") for each in made.data or ()]

            assert await paint(n=2, size="16x24") == [b"a river 16x24 5", b"a river 16x24 6"]
            with pytest.raises(openai.BadRequestError, match="not stored; use b64_json"):
                await paint(response_format="url")
            with pytest.raises(openai.BadRequestError, match="multiples of 8"):
                await paint(size="15x15")
            with pytest.raises(openai.BadRequestError, match="output_format"):
                await paint(output_format="webp")

    run(main())


def test_a_pool_without_a_model_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with alone({"kind": "images", "min_instances": "0"}) as url, httpx.AsyncClient(base_url=url) as http:
            monkeypatch.setattr(endpoint.importlib.util, "find_spec", lambda name: name)
            reply = await http.post("/v1/images/generations", json={"prompt": "x"})
            assert reply.status_code == 501 and "--worker images=" in reply.json()["error"]["message"]
            monkeypatch.setattr(endpoint.importlib.util, "find_spec", lambda name: None)
            reply = await http.post("/v1/images/generations", json={"prompt": "x"})
            assert reply.status_code == 501 and "tonle[images]" in reply.json()["error"]["message"]

    run(main())


@pytest.mark.parametrize(("fields", "param"), [
    ({}, "prompt"), ({"prompt": "x", "n": 11}, "n"), ({"prompt": "x", "n": 0}, "n"), ({"prompt": "x", "steps": 0}, "steps"),
    ({"prompt": "x", "size": "9999x9999"}, "size"), ({"prompt": "x", "seed": -1}, "seed"), ({"prompt": "x" * 40_000}, "prompt"),
    ({"prompt": "x", "response_format": "url"}, "response_format"),
])  # fmt: skip
def test_bad_requests_name_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        image_jobs(ImageRequest(**fields))
    assert error.value.param == param


def test_what_cannot_be_loaded_is_explained(tmp_path: Path) -> None:
    pytest.importorskip("diffusers", reason=NO_DIFFUSERS)
    with pytest.raises(ConfigError, match="needs a model"):
        Images().load(None, "cpu", {})
    with pytest.raises(ConfigError, match="no option 'colour'"):
        Images().load("x", "cpu", {"colour": 1})
    with pytest.raises(ModelError, match="cannot be loaded"):
        Images().load(str(tmp_path), "cpu", {})
