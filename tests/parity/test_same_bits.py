"""Where the guide promises the same text whatever else runs: logits of the compiled CPU kernels do not depend on company.

On processors without dot products of bytes it promises float32's rounding only.
"""

from __future__ import annotations

import pytest
import torch

from tests.unit.models.stepper import Stepper, random_tokens
from tonle.models.cpu.cpu_decoder import CpuDecoder
from tonle.models.cpu.dots import HAS_DOTS
from tonle.models.cpu.open import open_cpu
from tonle.models.source import ModelSource

PROMPT, NEW = 20, 6  # tokens


def logits(decoder: CpuDecoder, company: int, chunk: int) -> torch.Tensor:
    """Of one text's last tokens, beside `company` other rows; its prompt in pieces of `chunk`, the rest token by token."""
    text = random_tokens(PROMPT + NEW, 40_000)
    others = [random_tokens(30 + 3 * number, 40_000, seed=1 + number) for number in range(company)]
    stepper = Stepper(decoder, [text, *others], cache_dtype=decoder.cache_dtype)  # type: ignore[arg-type]
    done = 0
    while done < len(text):
        own = min(chunk, PROMPT - done) if done < PROMPT else 1
        stepper.step({0: own, **{row: 1 + (row + done) % 2 for row in range(1, company + 1) if done < PROMPT + 3}})
        done += own
    return stepper.of(0)[PROMPT - 1 :]


@pytest.mark.model
@pytest.mark.parametrize(("activation_bits", "cache_dtype"), [(8, None), (8, torch.float32), (16, torch.float32)])
def test_logits_are_the_same_bits_in_any_company(
    default_model: ModelSource, activation_bits: int, cache_dtype: torch.dtype | None
) -> None:
    decoder = open_cpu(default_model, activation_bits=activation_bits, cache_dtype=cache_dtype)
    assert isinstance(decoder, CpuDecoder)
    decoder.open_fast_lane()  # without waiting for the process that compiles
    if not decoder.crossover > 10**6:
        pytest.skip("this machine computes large steps through torch, which rounds differently")
    alone = logits(decoder, 0, PROMPT)
    for company, chunk in ((1, PROMPT), (5, PROMPT), (9, 7)):
        found, where = logits(decoder, company, chunk), f"{company} other rows, pieces of {chunk}"
        if HAS_DOTS:
            assert torch.equal(found, alone), where
        else:  # sums of float32, in another order for one row than for several
            torch.testing.assert_close(
                found, alone, rtol=0, atol=0.002, msg=lambda text, where=where: f"{where}: {text}"
            )
