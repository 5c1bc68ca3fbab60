"""Hidden states from the compiled step: those of torch, whichever other tokens want logits, with adapters and without."""

from __future__ import annotations

import pytest
import torch

from tests.fakes.cpu_models import RandomModel, of_row, step_of
from tests.unit.models.cpu.test_cpu_adapters import MIXED, SLOTS, adapter_for, fast, model
from tonle.models.cpu.cpu_decoder import CpuDecoder
from tonle.models.inputs import StepInputs

__all__ = ["fast", "model"]  # fixtures

NONE = torch.arange(0)
CASES = {
    "of one": (NONE, torch.tensor([40])),
    "of all": (NONE, torch.arange(64)),
    "beside logits": (torch.tensor([1, 0, 63]), torch.tensor([2, 21, 40])),
    "of tokens with logits": (torch.tensor([5, 63, 5]), torch.tensor([63, 30, 5])),
}


@torch.inference_mode()
def expected(model: RandomModel, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and hidden states (T, .) of all tokens, every row alone, by torch."""
    logits, states = [], []
    for row, slot in enumerate(inputs.adapter_slots or [-1] * len(inputs.context_lens)):
        decoder, kv = model.torch(adapter_for(model, 8, slot) if slot >= 0 else None), model.cache()
        if start := int(inputs.positions[inputs.row_starts[row]]):
            decoder.forward(step_of([(0, start)], rows=[row]), kv)
        alone = of_row(inputs, row)
        alone.hidden_indices = alone.logit_indices
        own_logits, own_states = decoder.forward_hidden(alone, kv)
        logits.append(own_logits)
        states.append(own_states)
    return torch.cat(logits), torch.cat(states)


@pytest.mark.parametrize("slots", [None, SLOTS], ids=["base", "adapters"])
@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_as_torch(model: RandomModel, fast: CpuDecoder, case: str, slots: list[int] | None) -> None:
    inputs = step_of(MIXED, slots)
    kv = model.cache()
    for slot in range(3):
        fast.set_adapter(slot, adapter_for(model, 8, slot))
    for row, (start, _) in enumerate(MIXED):
        if start:
            fast.forward(step_of([(0, start)], None if slots is None else [slots[row]], rows=[row]), kv)
    all_logits, all_states = expected(model, inputs)
    inputs.logit_indices, inputs.hidden_indices = CASES[case]
    logits, states = fast.forward_hidden(inputs, kv)
    for found, wanted in ((logits, all_logits[inputs.logit_indices]), (states, all_states[inputs.hidden_indices])):
        assert found.shape == wanted.shape
        assert not len(found) or float((found - wanted).norm() / wanted.norm()) < 1e-3
