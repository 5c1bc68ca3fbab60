"""Prompts: right length, reproducible, different from each other; files with errors that name the line."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tonle.bench import BenchOptions, Span
from tonle.bench.datasets.data_workload import DataWorkload
from tonle.bench.datasets.read_data import read_data
from tonle.bench.synthetic import PromptScale, SyntheticWorkload
from tonle.bench.words import WORDS
from tonle.bench.workload import Job, Phase, Workload
from tonle.errors import ConfigError

IDS = PromptScale("ids", tuple(range(1000, 2000)))


def take(workload: Workload, count: int, level: int = 0, phase: Phase = "run") -> list[Job]:
    return list(itertools.islice(workload.jobs(level, phase), count))


def bodies(jobs: list[Job]) -> list[dict[str, Any]]:
    return [json.loads(job.body) for job in jobs]


def synthetic(scale: PromptScale = IDS, **options: Any) -> SyntheticWorkload:
    return SyntheticWorkload(BenchOptions(**options), "m", scale)


def test_words_are_different_and_plain() -> None:
    assert len(set(WORDS)) == len(WORDS) > 300
    assert all(word.isalpha() and word.islower() for word in WORDS)


def test_a_synthetic_body() -> None:
    job = take(synthetic(input_tokens=Span(12, 12), output_tokens=Span(7, 7)), 1)[0]
    body = json.loads(job.body)
    assert job.path == "/v1/completions"
    assert job.exact_tokens == 7
    assert len(body.pop("prompt")) == 12
    assert body == {
        "model": "m",
        "max_tokens": 7,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


def test_lengths_are_drawn_from_the_whole_range() -> None:
    drawn = bodies(take(synthetic(input_tokens=Span(3, 6), output_tokens=Span(1, 4)), 200))
    assert {len(body["prompt"]) for body in drawn} == {3, 4, 5, 6}
    assert {body["max_tokens"] for body in drawn} == {1, 2, 3, 4}


def test_same_seed_same_prompts_and_another_seed_others() -> None:
    assert take(synthetic(seed=3), 5) == take(synthetic(seed=3), 5)
    assert take(synthetic(seed=3), 5) != take(synthetic(seed=4), 5)


def test_no_two_requests_begin_alike() -> None:
    workload = synthetic(input_tokens=Span(32, 32))
    heads = {
        tuple(body["prompt"][:4])
        for level, phase in itertools.product((0, 1), ("warmup", "run"))
        for body in bodies(take(workload, 50, level, phase))  # type: ignore[arg-type]
    }
    assert len(heads) == 200


def test_the_shared_prefix_is_shared_and_the_rest_is_not() -> None:
    drawn = bodies(take(synthetic(shared_prefix_tokens=20, input_tokens=Span(8, 8)), 30))
    assert {len(body["prompt"]) for body in drawn} == {28}
    assert len({tuple(body["prompt"][:20]) for body in drawn}) == 1
    assert len({tuple(body["prompt"][20:24]) for body in drawn}) == 30


def test_words_are_fitted_to_the_servers_count() -> None:
    scale = PromptScale("words", WORDS, overhead=10, tokens_per_unit=2.0)
    plain = bodies(take(synthetic(scale, input_tokens=Span(50, 50)), 1))[0]["prompt"]
    assert 10 + 2 * len(plain.split()) == 50
    shared = bodies(take(synthetic(scale, input_tokens=Span(50, 50), shared_prefix_tokens=30), 1))[0]["prompt"]
    assert 10 + 2 * len(shared.split()) == 80


def test_a_prompt_is_never_empty() -> None:
    scale = PromptScale("words", WORDS, overhead=40)
    assert bodies(take(synthetic(scale, input_tokens=Span(5, 5)), 1))[0]["prompt"]


def test_chat_wraps_the_prompt() -> None:
    body = bodies(take(synthetic(PromptScale("words", WORDS), endpoint="chat", input_tokens=Span(3, 3)), 1))[0]
    assert body["messages"][0]["role"] == "user"
    assert len(body["messages"][0]["content"].split()) == 3
    assert "prompt" not in body


def test_extra_fields_are_merged_and_null_takes_away() -> None:
    workload = synthetic(extra_body={"top_k": 5, "stream_options": None, "max_tokens": None, "max_new": 4})
    job = take(workload, 1)[0]
    body = json.loads(job.body)
    assert (body["top_k"], body["max_new"]) == (5, 4)
    assert not {"stream_options", "max_tokens"} & body.keys()
    assert job.exact_tokens is None


def write(tmp_path: Path, *lines: Any) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_a_file_goes_round_in_its_order(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "តើ\u2028?"}]
    path = write(tmp_path, {"prompt": "a", "max_tokens": 3}, "", {"messages": messages}, {"prompt": [1, 2]})
    workload = DataWorkload(BenchOptions(file=path, output_tokens=Span(9, 9)), "m", read_data(path))
    warm = take(workload, 1, phase="warmup")
    assert not workload.notes()
    jobs = take(workload, 3)
    assert workload.notes()
    assert [job.path for job in jobs] == ["/v1/chat/completions", "/v1/completions", "/v1/completions"]
    drawn = bodies(warm + jobs)
    assert [body["max_tokens"] for body in drawn] == [3, 9, 9, 3]
    assert [body.get("prompt") for body in drawn] == ["a", None, [1, 2], "a"]
    assert drawn[1]["messages"] == messages
    assert "ignore_eos" not in drawn[0]
    assert [job.exact_tokens for job in jobs] == [None, None, None]
    assert [job.index for job in jobs] == [0, 1, 2]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("{", "truncated"),
        ('"text"', "object"),
        ({}, "either prompt or messages"),
        ({"prompt": "a", "messages": [{}]}, "either prompt or messages"),
        ({"prompt": ""}, "empty"),
        ({"messages": []}, "empty"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": "5"}, "max_tokens"),
        ({"prompt": "a", "max_toknes": 5}, "max_toknes"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, bad: Any, why: str) -> None:
    path = write(tmp_path, {"prompt": "fine"}, "", bad)
    with pytest.raises(ConfigError, match=why) as caught:
        read_data(path)
    assert "line 3" in caught.value.message


def test_a_line_must_suit_the_endpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="line 1: has messages"):
        read_data(write(tmp_path, {"messages": [{"role": "user", "content": "a"}]}), None, "completions")
    with pytest.raises(ConfigError, match="line 1: has token ids"):
        read_data(write(tmp_path, {"prompt": [1]}), None, "chat")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_data(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="has no lines"):
        read_data(write(tmp_path, ""))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(ConfigError, match="UTF-8"):
        read_data(tmp_path / "latin.jsonl")
