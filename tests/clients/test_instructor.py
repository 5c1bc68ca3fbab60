"""instructor over OpenAI's client: answers as types, by tools and by schemas, whole and growing.

Its mode JSON is not here: it asks for any JSON object and hopes, and a small model need not come to its end.
"""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.clients.conftest import KEY, Place
from tests.clients.weather import MAX_TOKENS, QUESTION, Report

instructor: Any = pytest.importorskip("instructor", reason="instructor is not installed")
pytestmark = pytest.mark.model


def client(place: Place, mode: str) -> Any:
    asked = openai.OpenAI(base_url=place.url, api_key=KEY, max_retries=0, timeout=240)
    return instructor.from_openai(asked, mode=getattr(instructor.Mode, mode))


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_an_answer_is_of_its_type_at_the_first_try(place: Place, mode: str) -> None:
    report = client(place, mode).chat.completions.create(
        model=place.model, messages=QUESTION, response_model=Report, max_tokens=MAX_TOKENS, max_retries=0, temperature=1
    )
    assert isinstance(report, Report)


def test_an_answer_that_grows(gateway: Place) -> None:
    growing = client(gateway, "TOOLS").chat.completions.create_partial(
        model=gateway.model,
        messages=QUESTION,
        response_model=Report,
        max_tokens=MAX_TOKENS,
        max_retries=0,
        temperature=0,
    )
    last = None
    for last in growing:  # noqa: B007 - the last one is looked at
        pass
    assert Report.model_validate(last.model_dump())  # type: ignore[attr-defined]
