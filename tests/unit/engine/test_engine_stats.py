"""What `get_stats` makes of the messages of an engine."""

from __future__ import annotations

import pytest

from tonle.config.engine import EngineConfig
from tonle.engine.engine_stats import EngineStats
from tonle.engine.messages import LoopStats, Step


def test_a_step_is_known_by_the_next_one() -> None:
    """How long a step took stands in the message after it: its seconds belong to the tokens of the one before."""
    stats = EngineStats(EngineConfig())
    for number, (num_tokens, busy_s) in enumerate([(8, 0.0), (2, 4.0), (1, 4.5)], 1):
        tokens = list(range(num_tokens))
        stats.add_step(
            Step(
                handles=tokens, counts=[1] * num_tokens, tokens=tokens, stats=LoopStats(num_steps=number, busy_s=busy_s)
            )
        )
    metrics = stats.snapshot("running", None)["performance_metrics"]
    assert metrics["tokens_per_second"]["min"] == pytest.approx(8 / 4.0)
    assert metrics["tokens_per_second"]["max"] == pytest.approx(2 / 0.5)
    assert metrics["batch_processing_time"]["max"] == pytest.approx(4.0)
