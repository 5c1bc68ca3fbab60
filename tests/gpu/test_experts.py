"""On a GPU: experts in every tiling that the rule gives, as compiled, one layer right after another, against float32."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from benchmarks.gpu_experts import MAX_ERROR, Layers, expected, normed

from tonle.models.cuda.experts_grouped import grouped_tiling
from tonle.models.spec import MixerSpec

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
MIXER = MixerSpec(kind="experts", size=768, num_experts=32, experts_per_token=4)
ROWS = [1, 2, 16, 64, 100, 300, 1100]


@pytest.fixture(scope="module", params=["bf16", "fp8", "int8", "int4"])
def layers(request: pytest.FixtureRequest) -> Layers:
    torch.manual_seed(0)
    return Layers(MIXER, 2048, 3, max(ROWS), CUDA, request.param)


def test_these_rows_have_every_tiling() -> None:
    assert len({grouped_tiling(rows * 4, 32, glu=True) for rows in ROWS[1:]}) == len(
        {grouped_tiling(rows * 4, 32, glu=True) for rows in range(2, 5000)}
    )


@pytest.mark.parametrize("rows", ROWS)
@torch.inference_mode()
def test_chosen_tilings(layers: Layers, rows: int) -> None:
    """Layers follow one another at once, in one scratch that holds NaN. The last rows do not exist, and stay as they are."""
    live = rows - rows // 8
    x = torch.randn(rows, 2048, device=CUDA).bfloat16()
    count = torch.tensor([live], dtype=torch.int32, device=CUDA)
    scratch = layers.all[0].scratch
    assert scratch is not None
    for buffer in (scratch._active, scratch._given, scratch._shares):
        buffer.fill_(torch.nan)
    runs = []
    for _ in range(2):
        outs, logits = [torch.full_like(x, 0.01) for _ in layers.all], []
        for layer, out in zip(layers.all, outs, strict=True):
            layer.scratch = scratch
            layer.mix(x, layers.norm, count)
            layer.add(out, count, settled=True)
            logits.append(scratch.room(layer, rows).logits.clone())
        runs.append(outs)
    for layer, out, again, chosen_by in zip(layers.all, *runs, logits, strict=True):
        assert torch.equal(out, again)
        wanted = expected(layer, normed(x[:live], layers.norm), chosen_by[:live])
        error = float((out[:live].float() - 0.01 - wanted).norm() / wanted.norm())
        print(f"{rows} rows: {error:.2e} off")
        assert error < MAX_ERROR
        assert bool((out[live:] == torch.full_like(out[live:], 0.01)).all())
