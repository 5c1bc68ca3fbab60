"""Sampling against slow, obvious references."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tonle.engine.plan import Join
from tonle.engine.request import GenerationConfig
from tonle.engine.sample.draw import draw
from tonle.engine.sample.noise import child_seed, uniform
from tonle.engine.sample.sampler import Sampler
from tonle.engine.sample.token_logprobs import token_logprobs

VOCAB = 1000
CPU = torch.device("cpu")


def sampler(*configs: GenerationConfig, prompt: list[int] | None = None, output: list[int] | None = None) -> Sampler:
    made = Sampler(len(configs), VOCAB, eos_ids=[0], device=CPU)
    for row, config in enumerate(configs):
        made.join(Join(row, prompt or [1], output or [], config.resolved(), seed=config.seed or row))
    return made


def one(value: float | int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((rows,), value, dtype=dtype)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 0, 1.0, 0.0), (0.7, 50, 1.0, 0.0), (1.3, 0, 0.9, 0.0), (0.8, 40, 0.9, 0.0), (1.0, 0, 1.0, 0.05),
     (5.0, 0, 0.999, 0.0), (1.0, 5, 0.5, 0.1)],
)  # fmt: skip
def test_draws_follow_the_distribution_transformers_would_use(temperature, top_k, top_p, min_p) -> None:
    torch.manual_seed(1)
    logits = torch.randn(1, VOCAB) * 3
    chain = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        chain.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        chain.append(TopPLogitsWarper(top_p))
    if min_p:
        chain.append(MinPLogitsWarper(min_p))
    expected = torch.softmax(chain(None, logits.clone()), -1)[0].double()
    grid = 40_000  # evenly spread uniforms measure the drawn distribution itself
    tokens = []
    for part in torch.arange(grid, dtype=torch.float64).add(0.5).div(grid).split(500):
        rows = len(part)
        tokens.append(draw(logits.expand(rows, -1), one(temperature, rows, torch.float32), one(top_k, rows, torch.int64),
                           one(top_p, rows, torch.float32), one(min_p, rows, torch.float32), part))  # fmt: skip
    measured = torch.bincount(torch.cat(tokens), minlength=VOCAB).double() / grid
    assert float((measured - expected).abs().sum()) < 5e-2
    if top_k or top_p < 1 or min_p:
        assert set(measured.nonzero().flatten().tolist()) <= set(expected.nonzero().flatten().tolist())


def test_a_row_draws_the_same_token_whatever_stands_beside_it() -> None:
    torch.manual_seed(2)
    configs = [
        GenerationConfig(seed=11, temperature=1.0),
        GenerationConfig(seed=12, top_p=0.9),
        GenerationConfig(seed=13, top_k=20),
        GenerationConfig(seed=14, do_sample=False),
        GenerationConfig(seed=15, min_p=0.02, repetition_penalty=1.2),
    ]
    logits = torch.randn(len(configs), VOCAB) * 2
    rows = list(range(len(configs)))
    together = sampler(*configs).sample(logits.clone(), rows, [5] * len(rows)).tolist()
    alone = [sampler(*configs).sample(logits[i : i + 1].clone(), [i], [5]).item() for i in rows]
    assert together == alone


def test_noise_is_uniform_and_depends_on_seed_and_position() -> None:
    values = np.array([uniform(seed, position) for seed in range(100) for position in range(100)])
    assert abs(values.mean() - 0.5) < 0.01 and abs(values.var() - 1 / 12) < 0.005
    assert len(set(values.tolist())) == len(values)
    assert uniform(-5, 3) == uniform(-5, 3)
    assert child_seed(9, 0) == 9 and len({child_seed(9, i) for i in range(64)}) == 64


def test_repetition_penalty_equals_transformers() -> None:
    torch.manual_seed(3)
    logits = torch.randn(1, VOCAB)
    history = [5, 9, 9, 700]
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([history]), logits.clone())
    config = GenerationConfig(repetition_penalty=1.3, do_sample=False)
    made = sampler(config, prompt=history[:2], output=history[2:])
    changed = logits.clone()
    made.sample(changed, [0], [4])
    assert torch.equal(changed, expected)


def test_presence_and_frequency_count_output_only() -> None:
    config = GenerationConfig(presence_penalty=0.5, frequency_penalty=0.25, do_sample=False)
    made = sampler(config, prompt=[7], output=[8, 8, 9])
    logits = torch.zeros(1, VOCAB)
    made.sample(logits, [0], [4])
    assert logits[0, 7] == 0 and logits[0, 8] == -1.0 and logits[0, 9] == -0.75


def test_penalties_follow_sampled_tokens() -> None:
    made = sampler(GenerationConfig(frequency_penalty=2.0, do_sample=False))
    logits = torch.zeros(1, VOCAB)
    logits[0, 3], logits[0, 4] = 1.0, 0.5
    picks = [made.sample(logits.clone(), [0], [i]).item() for i in range(2)]
    assert picks == [3, 4]


def test_bias_and_min_tokens() -> None:
    made = sampler(GenerationConfig(logit_bias={42: 100.0}, do_sample=False))
    assert made.sample(torch.zeros(1, VOCAB), [0], [1]).item() == 42
    made = sampler(GenerationConfig(min_tokens=2, do_sample=False, stop_token_ids=[7]))
    logits = torch.zeros(1, VOCAB)
    logits[0, 0], logits[0, 7], logits[0, 5] = 9.0, 8.0, 1.0
    assert [made.sample(logits.clone(), [0], [i]).item() for i in range(3)] == [5, 5, 0]


def test_logprobs_are_the_models_own() -> None:
    torch.manual_seed(4)
    logits = torch.randn(2, VOCAB)
    table = torch.log_softmax(logits, -1)
    records = token_logprobs(logits, [3, 4], 2)
    assert records[0].logprob == pytest.approx(table[0, 3].item())
    assert [token for token, _ in records[1].top] == table[1].topk(2).indices.tolist()
    assert token_logprobs(logits, [3, 4], 0)[0].top == []
