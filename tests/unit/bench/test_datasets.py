"""Files of every format, found by looking at them; errors that name the line; the Khmer set; presets."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tonle.bench import BenchOptions, Span
from tonle.bench.datasets.data_workload import DataWorkload
from tonle.bench.datasets.items import ConversationItem, PromptItem, RequestItem
from tonle.bench.datasets.presets import PRESETS, preset_list, preset_settings
from tonle.bench.datasets.read_data import read_data
from tonle.bench.graphemes import count_graphemes
from tonle.bench.options import DataFormat, Pause
from tonle.bench.workload import Job
from tonle.engine.text.graphemes import clusters
from tonle.errors import ConfigError

SHARED = {"id": "a", "conversations": [
    {"from": "system", "value": "Be kind."},
    {"from": "human", "value": "One?"}, {"from": "gpt", "value": "x" * 41},
    {"from": "human", "value": "Two?"}, {"from": "gpt", "value": ""},
]}  # fmt: skip
MESSAGES = {"messages": [
    {"role": "user", "content": "One?"}, {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": [{"type": "text", "text": "Two?"}]},
]}  # fmt: skip
BATCH = {"custom_id": "r-1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "gpt", "messages": [1]}}


def write(tmp_path: Path, content: str) -> Path:
    path = tmp_path / "data"
    path.write_text(content, encoding="utf-8")
    return path


def lines(*entries: Any) -> str:
    return "".join(json.dumps(entry) + "\n" for entry in entries)


def take(path: Path, count: int, **options: Any) -> list[Job]:
    workload = DataWorkload(BenchOptions(file=path, **options), "served", read_data(path))
    return list(itertools.islice(workload.jobs(0, "run"), count))


@pytest.mark.parametrize(
    ("content", "data_format", "kind"),
    [
        (lines({"prompt": "a"}), "jsonl", PromptItem),
        (lines(MESSAGES), "jsonl", PromptItem),
        (lines(BATCH), "openai-batch", RequestItem),
        (json.dumps([SHARED]), "sharegpt", ConversationItem),
        ("\ufeff \n" + json.dumps([MESSAGES], indent=1), "sharegpt", ConversationItem),
        (lines(SHARED), "sharegpt", ConversationItem),
    ],
)
def test_the_format_is_seen(tmp_path: Path, content: str, data_format: str, kind: type) -> None:
    data = read_data(write(tmp_path, content))
    assert data.format == data_format
    assert [type(item) for item in data.items] == [kind]


def test_sharegpt_has_questions_and_lengths_of_answers(tmp_path: Path) -> None:
    no_question = {"conversations": [{"from": "gpt", "value": "Hi"}, {"from": "human", "value": "?"}]}
    data = read_data(write(tmp_path, json.dumps([SHARED, no_question, {"conversations": []}, MESSAGES])))
    first, second = data.items
    assert isinstance(first, ConversationItem) and isinstance(second, ConversationItem)
    assert first.opening == [{"role": "system", "content": "Be kind."}]
    assert (first.questions, first.answer_tokens) == (["One?", "Two?"], [11, 1])
    assert (second.questions, second.answer_tokens) == (["One?", "Two?"], [1, None])
    assert data.notes == ["2 of 4 conversations do not begin with a question and are not sent"]


def test_turns_limit_a_files_conversations_and_output_tokens_replace_its_lengths(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps([SHARED, MESSAGES]))
    assert [job.num_requests for job in take(path, 2)] == [2, 2]
    assert [job.num_requests for job in take(path, 2, turns=Span(1, 1))] == [1, 1]
    assert [job.index for job in take(path, 3)] == [0, 2, 4]
    assert json.loads(take(path, 1)[0].body)["max_tokens"] == 11
    asked = take(path, 1, answers_as_recorded=False, output_tokens=Span(33, 33))
    assert json.loads(asked[0].body)["max_tokens"] == 33


def test_a_batch_file_is_sent_as_it_is_but_streaming(tmp_path: Path) -> None:
    embed = {"custom_id": "e", "url": "/v1/embeddings", "body": {"model": "gpt", "input": "a", "user": None}}
    chat, vectors = take(write(tmp_path, lines(BATCH, embed)), 2)
    assert (chat.path, chat.is_streamed, chat.exact_tokens) == ("/v1/chat/completions", True, None)
    assert json.loads(chat.body) == {
        "model": "gpt", "messages": [1], "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert (vectors.path, vectors.is_streamed) == ("/v1/embeddings", False)
    assert json.loads(vectors.body) == {"model": "gpt", "input": "a", "user": None}
    assert json.loads(take(write(tmp_path, lines(BATCH)), 1, model="mine")[0].body)["model"] == "mine"


@pytest.mark.parametrize(
    ("content", "data_format", "where", "why"),
    [
        ('[{"conversations": [],\n\n "x": }]', None, "line 3", "malformed"),
        ('[{"conversations": []}', None, "line 1", "truncated"),
        (json.dumps([SHARED, {"talks": []}]), None, "entry 2", "needs conversations"),
        (json.dumps([SHARED, {"conversations": [{"value": "a"}]}]), None, "entry 2", '"from"'),
        (json.dumps([SHARED, {"conversations": "a"}]), None, "entry 2", "array"),
        (lines(SHARED) + "{", None, "line 2", "truncated"),
        (lines(BATCH, {"url": "/v1/x"}), None, "line 2", "body"),
        (lines(BATCH, {**BATCH, "method": "GET"}), None, "line 2", "POST"),
        (lines(BATCH, {**BATCH, "url": "http://x"}), None, "line 2", "path"),
        (lines({"prompt": "a"}), "openai-batch", "line 1", "url"),
        (lines(BATCH), "jsonl", "line 1", "custom_id"),
        ('{\n "prompt": "a"\n}', None, "", "one JSON object over several lines"),
        ("\n\n{\n", None, "line 3", "truncated"),
        ("[]", None, "", "no conversation with a question"),
    ],
)
def test_what_is_wrong_is_named_by_its_place(
    tmp_path: Path, content: str, data_format: DataFormat | None, where: str, why: str
) -> None:
    path = write(tmp_path, content)
    with pytest.raises(ConfigError) as caught:
        read_data(path, data_format)
    assert str(path) in caught.value.message
    assert where in caught.value.message
    assert why in caught.value.message


def test_conversations_need_the_chat_endpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="chat endpoint"):
        read_data(write(tmp_path, json.dumps([SHARED])), None, "completions")


def test_turns_are_not_for_single_requests(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="turns"):
        take(write(tmp_path, lines({"prompt": "a"})), 1, turns=Span(2, 2))


def test_the_khmer_set() -> None:
    data = read_data(Path("khmer"))
    texts = [item.content[0]["content"] for item in data.items if isinstance(item, PromptItem) and item.is_chat]
    assert len(set(texts)) == len(data.items) >= 100
    lengths = [count_graphemes(text) for text in texts]
    assert min(lengths) < 20 and max(lengths) > 200
    khmer = sum("\u1780" <= letter <= "\u17ff" for text in texts for letter in text)
    assert khmer > 0.85 * sum(map(len, texts))
    assert BenchOptions(file=Path("khmer")).counts_graphemes
    assert not BenchOptions(file=Path("khmer"), graphemes=False).counts_graphemes
    assert not BenchOptions(file=Path("./mine.jsonl")).counts_graphemes


@pytest.mark.parametrize("text", ["", "ខ្ញុំស្រលាញ់ភាសាខ្មែរ", "plain", "a\r\nb", "e\u0301 👩‍👩‍👧 ok", "ស្ត្រី ម្ហូប ក្រុង"])
def test_letters_are_counted_as_the_engine_cuts_them(text: str) -> None:
    assert count_graphemes(text) == len(clusters(text))


def test_the_khmer_set_is_counted_as_the_engine_cuts_it() -> None:
    for item in read_data(Path("khmer")).items:
        assert isinstance(item, PromptItem) and item.is_chat
        text = item.content[0]["content"]  # type: ignore[index]
        assert count_graphemes(text) == len(clusters(text))


def test_presets_are_settings() -> None:
    chat = BenchOptions(**preset_settings("chat"), concurrency=(8,))
    assert (chat.input_tokens, chat.output_tokens, chat.turns) == (Span(32, 400), Span(128, 512), None)
    long = BenchOptions(**preset_settings("long"))
    assert (long.input_tokens, long.output_tokens) == (Span(1000, 20_000), Span(100, 2000))
    for name in PRESETS:
        BenchOptions(**preset_settings(name)).validate()
        assert f"\n{name} " in "\n" + preset_list()
    with pytest.raises(ConfigError, match="presets: chat, long"):
        preset_settings("chta")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"prefixes": 3}, "shared_prefix_tokens"),
        ({"prefixes": 0}, "at least 1"),
        ({"turns": Span(0, 2)}, "turns 0-2"),
        ({"turns": Span(2, 2), "endpoint": "completions"}, "chat endpoint"),
        ({"turns": Span(2, 2), "prompt_kind": "ids"}, "words"),
        ({"think_time": Pause(3, 1)}, "upwards"),
        ({"speed": 2.0}, "for a replay"),
        ({"since": "2025-01-01"}, "for a replay"),
        ({"format": "jsonl"}, "for a file"),
        ({"replay": Path("x"), "rates": (1.0,)}, "rate cannot be set"),
        ({"replay": Path("x"), "file": Path("y")}, "data cannot be set"),
        ({"replay": Path("x"), "speed": 0.0}, "speed must be more than 0"),
        ({"prefix_skew": -1.0}, "prefix_skew"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        BenchOptions(**settings).validate()
