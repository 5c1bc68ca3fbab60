"""POST /v1/completions: prompts of every kind, echo, log-probabilities, streams."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.fakes.front import BEGIN, END, FakeFront
from tests.http.serving import events
from tonle.telemetry.time_spent import TimeSpent

PATH = "/v1/completions"
REPLY = "សួស្តី, I am scripted."


@pytest.fixture(autouse=True)
def _reply(front: FakeFront) -> None:
    front.reply = lambda prompt, index: f"{prompt}?" + "!" * index


def texts(client: httpx.Client, **body: Any) -> list[str]:
    reply = client.post(PATH, json=body)
    assert reply.status_code == 200, reply.text
    return [choice["text"] for choice in reply.json()["choices"]]


def test_whole_answer(client: httpx.Client) -> None:
    reply = client.post(PATH, json={"prompt": "abc", "max_tokens": 50}).json()
    assert reply["id"].startswith("cmpl-") and reply["object"] == "text_completion"
    assert reply["choices"] == [{"index": 0, "text": "abc?", "logprobs": None, "finish_reason": "stop"}]
    assert reply["usage"]["prompt_tokens"] == 4 and reply["usage"]["completion_tokens"] == 5


def test_default_is_16_tokens(client: httpx.Client, front: FakeFront) -> None:
    assert texts(client, prompt="x" * 30) == ["x" * 16]
    # where the context leaves less, the default shrinks; what is asked for does not
    assert len(texts(client, prompt="x" * 505)[0]) == 512 - 506
    assert client.post(PATH, json={"prompt": "x" * 505, "max_tokens": 16}).status_code == 400


def test_prompts_of_every_kind(client: httpx.Client) -> None:
    assert texts(client, prompt="ab") == ["ab?"]
    assert texts(client, prompt=["ab", "c"]) == ["ab?", "c?"]
    assert texts(client, prompt=[97, 98]) == ["ab?"]
    assert texts(client, prompt=[[97, 98], [99]]) == ["ab?", "c?"]
    assert texts(client, prompt=["ab", "c"], n=2) == ["ab?", "ab?!", "c?", "c?!"]


def test_usage_of_several_prompts(client: httpx.Client) -> None:
    usage = client.post(PATH, json={"prompt": ["ab", "c"], "n": 2}).json()["usage"]
    assert usage["prompt_tokens"] == 3 + 2
    assert usage["completion_tokens"] == (4 + 5) + (3 + 4)


def test_special_tokens(client: httpx.Client, front: FakeFront) -> None:
    texts(client, prompt="a")
    texts(client, prompt="a", add_special_tokens=False)
    assert [generation.prompt for generation, _ in front.submitted] == [[BEGIN, 97], [97]]


def test_stream_of_several_prompts(client: httpx.Client) -> None:
    *chunks, usage, done = events(
        client.post(
            PATH, json={"prompt": ["ab", "c"], "n": 2, "stream": True, "stream_options": {"include_usage": True}}
        ).text
    )
    found = ["", "", "", ""]
    reasons: list[Any] = [None] * 4
    for chunk in chunks:
        (choice,) = chunk["choices"]
        found[choice["index"]] += choice["text"]
        reasons[choice["index"]] = choice["finish_reason"]
    assert found == ["ab?", "ab?!", "c?", "c?!"] and reasons == ["stop"] * 4
    assert usage["usage"]["prompt_tokens"] == 5 and usage["choices"] == [] and done == "[DONE]"


@pytest.mark.parametrize("stream", [False, True])
def test_echo(client: httpx.Client, stream: bool) -> None:
    reply = client.post(PATH, json={"prompt": ["ab", "c"], "echo": True, "stream": stream})
    found = ["", ""]
    for chunk in events(reply.text)[:-1] if stream else [reply.json()]:
        for choice in chunk["choices"]:
            found[choice["index"]] += choice["text"]
    assert found == ["abab?", "cc?"]


def test_echo_of_token_ids(client: httpx.Client) -> None:
    assert texts(client, prompt=[97, 98], echo=True) == ["abab?"]
    assert texts(client, prompt=[[97], [98]], echo=True) == ["aa?", "bb?"]


def test_logprobs(client: httpx.Client, front: FakeFront) -> None:
    front.reply = lambda prompt, index: "កa"
    logprobs = client.post(PATH, json={"prompt": "x", "logprobs": 2}).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"][3:] == ["a", "<end>"]
    assert logprobs["token_logprobs"] == [-0.5] * 5
    assert logprobs["top_logprobs"][3] == {"a": -0.5, "b": -1.5}
    assert logprobs["text_offset"] == [0, 0, 0, 1, 2], "a letter of three tokens is one character of text"


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(client: httpx.Client, front: FakeFront, stream: bool) -> None:
    front.reply = lambda prompt, index: "z"
    reply = client.post(PATH, json={"prompt": "កb", "logprobs": 1, "echo": True, "stream": stream})
    joined: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    text = ""
    for chunk in events(reply.text)[:-1] if stream else [reply.json()]:
        choice = chunk["choices"][0]
        text += choice["text"]
        for name, values in (choice["logprobs"] or {}).items():
            joined[name] += values
    assert text == "កbz"
    assert joined["tokens"][0] == "<begin>" and joined["tokens"][4:] == ["b", "z", "<end>"]
    assert joined["token_logprobs"][0] is None and joined["top_logprobs"][0] is None
    assert joined["token_logprobs"][1:] == [-0.5] * 6
    assert joined["text_offset"] == [0, 0, 0, 0, 1, 2, 3], "the begin token is not in the text"


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_alone(client: httpx.Client, stream: bool) -> None:
    """max_tokens 0 with echo: how likely is this text? Evaluation harnesses ask that."""
    body = {"prompt": "ab", "logprobs": 1, "echo": True, "max_tokens": 0, "stream": stream, "return_token_ids": True}
    reply = client.post(PATH, json=body)
    chunks = events(reply.text)[:-1] if stream else [reply.json()]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == "ab"
    assert choices[0]["logprobs"]["tokens"] == ["<begin>", "a", "b"]
    assert choices[-1]["finish_reason"] == "length"
    if not stream:
        assert chunks[0]["usage"]["completion_tokens"] == 0


def test_prompt_logprobs(client: httpx.Client) -> None:
    choice = client.post(PATH, json={"prompt": "ab", "prompt_logprobs": 1}).json()["choices"][0]
    assert choice["logprobs"] is None and choice["text"] == "ab?"
    assert choice["prompt_logprobs"][:2] == [None, {"97": {"logprob": -0.5, "decoded_token": "a", "rank": 1}}]


def test_token_ids(client: httpx.Client) -> None:
    body = {"prompt": "a", "return_token_ids": True}
    choice = client.post(PATH, json=body).json()["choices"][0]
    assert choice["prompt_token_ids"] == [BEGIN, 97] and choice["token_ids"] == [97, 63, END]
    first, *rest, _ = events(client.post(PATH, json={**body, "stream": True}).text)
    assert first["choices"][0]["prompt_token_ids"] == [BEGIN, 97]
    assert [token for chunk in rest for token in chunk["choices"][0]["token_ids"]] == [97, 63, END]


def test_warnings_in_the_first_chunk(client: httpx.Client) -> None:
    first, *rest, _ = events(client.post(PATH, json={"prompt": "a", "store": True, "stream": True}).text)
    assert first["warnings"] == [{"param": "store", "message": "accepted, has no effect"}]
    assert all("warnings" not in chunk for chunk in rest)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, [2]]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": ["a"] * 9}, "prompt"),
        ({"prompt": ["a"] * 3, "n": 3}, "n"),
        ({"prompt": [258]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ""} | {"add_special_tokens": False}, "prompt"),
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": "a", "n": 3, "best_of": 2}, "best_of"),
        ({"prompt": "a", "best_of": 2, "stream": True}, "best_of"),
        ({"prompt": ["a"] * 3, "best_of": 3}, "best_of"),
        ({"prompt": "a", "use_beam_search": True}, "use_beam_search"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x" * 600}, "prompt"),
        ({"prompt": ["a", "x" * 600]}, "prompt[1]"),
    ],
)
def test_refused(client: httpx.Client, front: FakeFront, body: dict[str, Any], param: str) -> None:
    reply = client.post(PATH, json=body)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param, reply.text
    assert not front.submitted


def test_best_of_equal_to_n(client: httpx.Client) -> None:
    assert len(texts(client, prompt="a", n=2, best_of=2)) == 2


def test_best_of_computes_more_answers_than_it_returns(client: httpx.Client, front: FakeFront) -> None:
    reply = client.post(PATH, json={"prompt": ["ab", "c"], "n": 2, "best_of": 3}).json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in reply["choices"])
    assert reply["usage"]["completion_tokens"] == (4 + 5 + 6) + (3 + 4 + 5), "all that were computed count"
    assert [generation.config.best_of for generation, _ in front.submitted] == [3, 3]


def test_a_whole_answer_tells_how_many_guesses_were_right(client: httpx.Client, front: FakeFront) -> None:
    front.spent = [TimeSpent(draft_tokens=12, accepted_tokens=7)]
    headers = client.post(PATH, json={"prompt": "a"}).headers
    assert (headers["x-draft-tokens"], headers["x-accepted-tokens"]) == ("12", "7")
    plain = client.post(PATH, json={"prompt": "a"}).headers
    assert "x-draft-tokens" not in plain and "x-decode-time" in plain


def test_speculation_can_be_switched_off_for_a_request(client: httpx.Client, front: FakeFront) -> None:
    texts(client, prompt="a")
    texts(client, prompt="a", speculate=False)
    assert [generation.config.speculate for generation, _ in front.submitted] == [True, False]
