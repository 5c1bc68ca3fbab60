"""/v1/responses of `tonle serve` itself: one process, and one of several front ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.fakes.front import FakeFront
from tests.http.serving import serving
from tonle.config.serve import ServeConfig
from tonle.gateway.apis.responses.response_store import MemoryResponses
from tonle.replica.replica import ReplicaOptions
from tonle.replica.serve import build_server


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(FakeFront()) as found:
        yield found


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_text_events_and_the_store(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="scripted", messages=[{"role": "user", "content": "Hi"}], max_completion_tokens=8
    )
    made = client.responses.create(model="scripted", input="Hi", max_output_tokens=8)
    assert made.output_text == chat.choices[0].message.content and made.status == "incomplete"
    assert chat.usage is not None and made.usage is not None
    assert made.usage.input_tokens == chat.usage.prompt_tokens and made.usage.output_tokens == 8
    events: list[Any] = list(
        client.responses.create(
            model="scripted", input="And?", previous_response_id=made.id, stream=True, max_output_tokens=8
        )
    )
    final = events[-1].response
    assert events[-1].type == "response.incomplete" and final.previous_response_id == made.id
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == final.output_text
    assert final.usage.input_tokens > made.usage.input_tokens, "it has the first turn, too"
    assert client.responses.retrieve(final.id).to_dict() == final.to_dict()


def test_an_engines_refusal_speaks_of_the_callers_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="input has") as refused:
        client.responses.create(model="scripted", input="word " * 400)
    assert refused.value.param == "input" and refused.value.code == "context_length_exceeded"
    cut = client.responses.create(
        model="scripted",
        input=[{"role": "user", "content": "word " * 800}, {"role": "user", "content": "Hi"}],
        truncation="auto",
        max_output_tokens=4,
    )
    assert "oldest messages left out: 1" in str(cut.to_dict()["warnings"])


def test_several_front_ends_store_nothing_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    several = ReplicaOptions(metrics_dir=str(tmp_path))
    assert build_server(FakeFront(), ServeConfig(), several)._responses.store is None  # type: ignore[arg-type]
    assert isinstance(build_server(FakeFront(), ServeConfig())._responses.store, MemoryResponses)  # type: ignore[arg-type]
    redis = ServeConfig(response_store="redis://127.0.0.1:1/0")
    assert build_server(FakeFront(), redis, several)._responses.store is not None  # type: ignore[arg-type]
