"""Answers of the default model at temperature 1 parse and validate: a sample of `make structured`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from benchmarks.schemas import make_cases
from benchmarks.structured_validity import validate

from tonle import EngineConfig, InferenceEngine
from tonle.models.source import ModelSource

pytestmark = pytest.mark.model

NUM_CASES = 40  # two of each kind
BATCH = 20


@pytest.fixture(scope="module")
def engine(default_model: ModelSource) -> Iterator[InferenceEngine]:
    with InferenceEngine(None, None, EngineConfig(max_batch_size=BATCH + 5, max_sequence_length=1024)) as made:
        yield made


def test_all_answers_are_what_their_schemas_say(engine: InferenceEngine) -> None:
    """In one busy batch with free text beside it, every second one streamed, and a few alone."""
    results = asyncio.run(validate(engine, make_cases(NUM_CASES), NUM_CASES, num_alone=4, batch=BATCH))
    assert [problem for result in results for problem in result.problems] == []
    assert [result.num_valid for result in results] == [2, 2, 18, 18]
