"""OpenAI's own Python client against a server: what it sends we take, what we answer it understands.

Nothing here knows what the model says: the same tests hold for a scripted front and for a real model at temperature 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.fakes.front import FakeFront
from tests.http.serving import serving

MESSAGES: Any = [
    {"role": "system", "content": "You answer in one sentence."},
    {"role": "user", "content": "What is the capital of France?"},
]
PROMPT = "The capital of France is"


@pytest.fixture(scope="module", params=["scripted", pytest.param("real", marks=pytest.mark.model)])
def base_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """Without the /v1."""
    if request.param == "scripted":
        with serving(FakeFront()) as url:
            yield url
    else:
        yield request.getfixturevalue("default_server").url


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def chat(client: openai.OpenAI, model: str, **options: Any) -> Any:
    return client.chat.completions.create(
        model=model, messages=MESSAGES, temperature=0, **({"max_completion_tokens": 24} | options)
    )


def complete(client: openai.OpenAI, model: str, **options: Any) -> Any:
    return client.completions.create(model=model, temperature=0, **({"prompt": PROMPT, "max_tokens": 16} | options))


def middle_of(client: openai.OpenAI, model: str) -> str:
    """Two characters the model is known to say."""
    text = chat(client, model).choices[0].message.content
    return str(text[len(text) // 2 : len(text) // 2 + 2])


# -- chat


def test_chat(client: openai.OpenAI, model: str) -> None:
    completion = chat(client, model)
    (choice,) = completion.choices
    assert completion.id.startswith("chatcmpl-") and completion.model == model
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason in ("stop", "length")
    usage = completion.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 < usage.completion_tokens <= 24
    assert 0 <= usage.prompt_tokens_details.cached_tokens <= usage.prompt_tokens
    assert completion.model_extra == {}, "nothing beyond OpenAI's fields unless asked for"


def test_chat_stream_says_the_same(client: openai.OpenAI, model: str) -> None:
    whole = chat(client, model)
    chunks = list(chat(client, model, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] == whole.choices[0].finish_reason and reasons[:-1] == [None] * (len(reasons) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_chat_stream_helper(client: openai.OpenAI, model: str) -> None:
    options: Any = {"model": model, "messages": MESSAGES, "temperature": 0, "stop": middle_of(client, model)}
    with client.chat.completions.stream(**options) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert final.choices[0].message.content == text
    assert final.choices[0].finish_reason == "stop", "the helper refuses answers that were cut off"


def test_chat_n(client: openai.OpenAI, model: str) -> None:
    choices = chat(client, model, n=3).choices
    assert [choice.index for choice in choices] == [0, 1, 2] and all(choice.message.content for choice in choices)
    seen = {chunk.choices[0].index for chunk in chat(client, model, n=3, stream=True)}
    assert seen == {0, 1, 2}


def test_chat_logprobs(client: openai.OpenAI, model: str) -> None:
    completion = chat(client, model, logprobs=True, top_logprobs=3, max_completion_tokens=6)
    content = completion.choices[0].logprobs.content
    assert len(content) == completion.usage.completion_tokens == 6
    for entry in content:
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 3
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs), "greedy takes the likeliest"
    spelled = b"".join(bytes(entry.bytes) for entry in content).decode(errors="ignore")
    assert completion.choices[0].message.content.strip("\ufffd ") in spelled
    streamed = [
        entry
        for chunk in chat(client, model, logprobs=True, top_logprobs=3, max_completion_tokens=6, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]


def test_chat_stop(client: openai.OpenAI, model: str) -> None:
    text = chat(client, model).choices[0].message.content
    stop = middle_of(client, model)
    choice = chat(client, model, stop=[stop]).choices[0]
    assert choice.message.content == text.partition(stop)[0] and choice.finish_reason == "stop"
    streamed = chat(client, model, stop=stop, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == choice.message.content


def test_chat_content_parts(client: openai.OpenAI, model: str) -> None:
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    parts = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=8)
    messages = [{"role": "user", "content": "Hello"}]
    plain = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=8)
    assert parts.choices[0].message.content == plain.choices[0].message.content


def test_an_answer_can_be_sent_back(client: openai.OpenAI, model: str) -> None:
    """A conversation: the message object of the client goes into the next request as it is."""
    first = chat(client, model).choices[0].message
    messages = [*MESSAGES, first, {"role": "user", "content": "And of Italy?"}]
    second = client.chat.completions.create(model=model, messages=messages, max_tokens=8)
    assert second.choices[0].message.content and second.model_extra == {}


def test_seed(client: openai.OpenAI, model: str) -> None:
    def text() -> str:
        options: Any = {"temperature": 1.0, "seed": 7, "max_tokens": 12}
        return str(client.chat.completions.create(model=model, messages=MESSAGES, **options).choices[0].message.content)

    assert text() == text()


def test_extensions(client: openai.OpenAI, model: str) -> None:
    extra = {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1, "ignore_eos": True, "priority": "high"}
    completion = chat(client, model, extra_body={**extra, "return_token_ids": True}, max_completion_tokens=7)
    assert completion.usage.completion_tokens == 7 and completion.choices[0].finish_reason == "length"
    assert len(completion.choices[0].token_ids) == 7
    assert len(completion.prompt_token_ids) == completion.usage.prompt_tokens
    assert getattr(completion, "warnings", None) is None


def test_warnings(client: openai.OpenAI, model: str) -> None:
    completion = chat(client, model, store=True, extra_body={"no_such_field": 1}, max_completion_tokens=2)
    assert {warning["param"] for warning in completion.warnings} == {"store", "no_such_field"}


# -- completions


def test_completion(client: openai.OpenAI, model: str) -> None:
    completion = complete(client, model)
    assert completion.id.startswith("cmpl-") and completion.choices[0].text
    assert completion.usage.completion_tokens <= 16
    streamed = complete(client, model, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == completion.choices[0].text


def test_completion_of_several_prompts(client: openai.OpenAI, model: str) -> None:
    prompts = [PROMPT, "One, two, three,"]
    alone = [complete(client, model, prompt=prompt).choices[0].text for prompt in prompts]
    assert [choice.text for choice in complete(client, model, prompt=prompts).choices] == alone


def test_completion_echo_and_logprobs(client: openai.OpenAI, model: str) -> None:
    completion = complete(client, model, echo=True, logprobs=2, max_tokens=4)
    (choice,) = completion.choices
    assert choice.text.startswith(PROMPT)
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == completion.usage.total_tokens
    assert (
        len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == len(logprobs.text_offset) == len(logprobs.tokens)
    )
    assert logprobs.token_logprobs[0] is None and all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert logprobs.text_offset[0] == 0 and logprobs.text_offset == sorted(logprobs.text_offset)
    assert logprobs.text_offset[completion.usage.prompt_tokens] == len(PROMPT), "where the answer begins"


def test_completion_from_token_ids(client: openai.OpenAI, model: str) -> None:
    reply = client.post("../tokenize", body={"prompt": PROMPT}, cast_to=dict[str, Any])
    assert reply["count"] == complete(client, model).usage.prompt_tokens
    from_tokens = complete(client, model, prompt=reply["tokens"])
    assert from_tokens.choices[0].text == complete(client, model).choices[0].text


# -- models, errors, raw


def test_models(client: openai.OpenAI, model: str) -> None:
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no/such/model")


def test_errors_are_the_clients_errors(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=model, messages=MESSAGES, temperature=-1)
    assert bad.value.param == "temperature" and bad.value.code == "invalid_value"
    with pytest.raises(openai.BadRequestError) as empty:
        client.chat.completions.create(model=model, messages=[])
    assert empty.value.param == "messages"
    with pytest.raises(openai.BadRequestError) as long:
        complete(client, model, max_tokens=10_000_000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as unknown:
        complete(client, "no-such-model")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="letters, digits") as named:
        chat(client, model, tools=[{"type": "function", "function": {"name": "a tool", "parameters": {}}}])
    assert named.value.param == "tools[0].function.name"
    with pytest.raises(openai.BadRequestError):
        list(chat(client, model, stream=True, top_p=2))


def test_raw_response(client: openai.OpenAI, model: str) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=model, messages=MESSAGES, max_tokens=4, extra_headers={"X-Request-Id": "from-the-client"}
    )
    assert raw.headers["x-request-id"] == "from-the-client" and float(raw.headers["x-process-time"]) > 0
    assert raw.parse().choices[0].message.content


def test_leaving_a_stream_early(client: openai.OpenAI, model: str) -> None:
    with chat(client, model, stream=True, max_completion_tokens=100, extra_body={"ignore_eos": True}) as stream:
        next(iter(stream))
    assert chat(client, model, max_completion_tokens=2).choices


def test_async_client(base_url: str, model: str) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as client:

            async def stream() -> str:
                options: Any = {"temperature": 0, "max_tokens": 12, "stream": True}
                chunks = await client.chat.completions.create(model=model, messages=MESSAGES, **options)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

            texts = await asyncio.gather(*(stream() for _ in range(8)))
            assert len(set(texts)) == 1 and texts[0], "eight at once say what one says"
            whole = await client.chat.completions.create(model=model, messages=MESSAGES, temperature=0, max_tokens=12)
            assert whole.choices[0].message.content == texts[0]

    asyncio.run(main())
