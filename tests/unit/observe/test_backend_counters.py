"""Tokens of a backend's counters, spread over seconds."""

from __future__ import annotations

import pytest

from tonle.observe.backend_counters import BackendCounters
from tonle.observe.backend_state import BackendState
from tonle.observe.sample import Sample


@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 61, 997])
def test_all_tokens_are_counted_and_no_second_gets_next_to_none(tokens: int) -> None:
    counters, told = BackendCounters(5.0), 0
    counters.told(BackendState(name="b", at=0.0, generation_tokens=0, prompt_tokens=0))
    seconds = []
    for second in range(60):
        if second % 5 == 0:
            told += tokens if second in (0, 10) else 0
            counters.told(BackendState(name="b", at=0.0, generation_tokens=told, prompt_tokens=0))
        sample = Sample(t=second)
        counters.take(sample)
        seconds.append(sample.output_tokens)
    assert sum(seconds) == pytest.approx(2 * tokens)
    assert not [count for count in seconds if 0 < count < 0.1]  # a rest of rounding would make a token cost a fortune
