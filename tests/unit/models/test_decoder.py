"""Random decoders: repeatable, and with something to say."""

from __future__ import annotations

import torch

from tests.fakes.checkpoints import tiny_model
from tests.unit.models.stepper import Stepper
from tonle.models.decoder import Decoder
from tonle.models.inputs import KVCache, StepInputs
from tonle.models.load.transformers_model import live_spec

CPU = torch.device("cpu")
SPEC = live_spec(tiny_model("qwen3"))


def test_random_depends_on_the_seed_alone() -> None:
    def logits(seed: int) -> torch.Tensor:
        stepper = Stepper(Decoder.random(SPEC, CPU, torch.float32, seed), [[1, 2, 3]])
        stepper.run(3)
        return stepper.of(0)

    assert torch.equal(logits(1), logits(1))
    assert not torch.allclose(logits(1), logits(2))
    assert logits(1).isfinite().all() and logits(1).std() > 0.1


def test_device_and_dtype() -> None:
    decoder = Decoder.random(SPEC, CPU, torch.bfloat16, 0)
    assert (decoder.device, decoder.dtype) == (CPU, torch.bfloat16)


def test_attention_is_the_seam() -> None:
    """Whatever stands at `decoder.attention` sees every layer's rotated heads, once, in order."""
    seen: list[tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = []

    class Blind:
        def prepare(self, inputs: StepInputs, kv: KVCache) -> Blind:
            return self

        def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            seen.append((layer, tuple(q.shape), tuple(k.shape), tuple(v.shape)))
            return torch.zeros_like(q)

    decoder = Decoder.random(SPEC, CPU, torch.float32, 0)
    decoder.attention = Blind()
    Stepper(decoder, [[1, 2, 3]]).run(3)
    kv_shape = (3, SPEC.num_kv_heads, SPEC.head_dim)
    assert seen == [(layer, (3, SPEC.num_heads, SPEC.head_dim), kv_shape, kv_shape) for layer in range(2)]
