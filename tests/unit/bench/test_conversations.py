"""Conversations: each turn follows the answer before it, which is in its history; prefixes that are drawn with a skew."""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.unit.bench.scripted import Asked, Behaviour, Script, json_reply, serving
from tonle.bench import BenchOptions, BenchReport, Span, run_bench
from tonle.bench.options import Pause
from tonle.bench.synthetic import PromptScale, SyntheticWorkload, planned_requests
from tonle.bench.words import WORDS

WORD_SCALE = PromptScale("words", WORDS)


def converse(behaviour: Behaviour | None = None, **options: Any) -> tuple[BenchReport, list[Asked]]:
    """The report, and what was asked after the two probes."""
    fields: dict[str, Any] = {
        "input_tokens": Span(8, 8), "output_tokens": Span(3, 5), "warmup": 0, "turns": Span(3, 3), "keep_requests": True,
    }  # fmt: skip
    with serving(behaviour or Behaviour()) as server:
        report = run_bench(BenchOptions(url=server.url, **(fields | options)))
        return report, server.completions[2:]


def test_a_turn_has_the_real_answer_before_it() -> None:
    report, asked = converse(concurrency=(2,), requests=4)
    level = report.levels[0]
    assert report.ok
    assert (level.requests, len(asked)) == (12, 12)
    by_opening: dict[str, list[list[dict[str, str]]]] = defaultdict(list)
    for each in asked:
        assert each.path == "/v1/chat/completions"
        by_opening[each.body["messages"][0]["content"]].append(each.body["messages"])
    assert len(by_opening) == 4
    for turns in by_opening.values():
        assert [len(messages) for messages in turns] == [1, 3, 5]
        for before, after in itertools.pairwise(turns):
            assert after[: len(before)] == before
            answer = after[len(before)]
            assert answer["role"] == "assistant"
            assert answer["content"].split() in (["word"] * 3, ["word"] * 4, ["word"] * 5)
    assert level.rows is not None
    assert sorted(row.index for row in level.rows) == list(range(12))
    assert {(row.conversation, row.turn) for row in level.rows} == set(itertools.product(range(4), range(3)))


def test_each_user_has_one_conversation_at_a_time() -> None:
    """Turns of one user never interleave: with one user, all turns of a conversation come before the next one."""
    _, asked = converse(requests=3)
    assert [len(each.body["messages"]) for each in asked] == [1, 3, 5] * 3


def test_in_an_open_loop_conversations_arrive_at_the_rate() -> None:
    report, asked = converse(rates=(200.0,), requests=5, think_time=Pause(0.01, 0.02))
    level = report.levels[0]
    assert report.ok
    assert (level.requests, len(asked)) == (15, 15)
    assert level.rows is not None
    by_place = {(row.conversation, row.turn): row for row in level.rows}
    for conversation, turn in itertools.product(range(5), (1, 2)):
        before, row = by_place[conversation, turn - 1], by_place[conversation, turn]
        assert before.e2el_ms is not None
        # Due after the answer and the pause; both are rounded to a microsecond.
        assert row.start_s >= before.start_s + before.e2el_ms / 1e3 + 0.01 - 1e-4


def test_a_failed_turn_ends_its_conversation() -> None:
    def script(asked: Asked) -> Script | None:
        return [json_reply(500, {"error": {"message": "no"}})] if len(asked.body["messages"]) == 3 else None

    report, asked = converse(Behaviour(script=script), requests=2)
    assert [len(each.body["messages"]) for each in asked] == [1, 3, 1, 3]
    assert report.levels[0].failed == 2


def test_a_file_of_conversations_is_held(tmp_path: Path) -> None:
    said = [{"from": "human", "value": "One?"}, {"from": "gpt", "value": "x" * 12}, {"from": "human", "value": "Two?"}]
    path = tmp_path / "shared.json"
    path.write_text(json.dumps([{"conversations": said}]))
    with serving() as server:
        report = run_bench(BenchOptions(url=server.url, file=path, requests=1, warmup=0, output_tokens=Span(2, 2)))
        first, second = server.completions
    assert (report.ok, report.prompt_kind, report.levels[0].requests) == (True, "sharegpt", 2)
    assert first.body["messages"] == [{"role": "user", "content": "One?"}]
    assert [message["content"] for message in second.body["messages"]] == ["One?", " word word word", "Two?"]
    assert [first.body["max_tokens"], second.body["max_tokens"]] == [3, 2]


def test_graphemes_of_answers_are_counted() -> None:
    with serving() as server:
        options = BenchOptions(url=server.url, requests=2, warmup=0, output_tokens=Span(4, 4), graphemes=True)
        level = run_bench(options).levels[0]
    assert level.graphemes_per_s == pytest.approx(2 * len(" word" * 4) / level.duration_s)
    assert level.ms_per_grapheme is not None and level.tpot_ms is not None
    assert level.ms_per_grapheme.mean == pytest.approx(level.tpot_ms.mean * 3 / 19)


def test_a_simulation_has_the_lengths_of_a_run() -> None:
    """Without a server: the same lengths in the same order, for single requests and for turns."""
    for turns in (None, Span(1, 4)):
        options = BenchOptions(input_tokens=Span(5, 50), output_tokens=Span(1, 90), turns=turns, seed=3)
        planned = list(itertools.islice(planned_requests(options, level=1), 20))
        jobs = SyntheticWorkload(options, "m", WORD_SCALE).jobs(1, "run")
        firsts = [plan for plan in planned if plan.turn == 0]
        for plan, job in zip(firsts, jobs, strict=False):
            body = json.loads(job.body)
            prompt = body["prompt"] if turns is None else body["messages"][0]["content"]
            assert (plan.index, plan.output_tokens) == (job.index, body["max_tokens"])
            assert len(plan.prompt) == len(prompt.split())
        assert [plan.index for plan in planned] == list(range(20))


def prefixes_of(**options: Any) -> Counter[tuple[int, ...]]:
    drawn = planned_requests(BenchOptions(shared_prefix_tokens=6, input_tokens=Span(2, 2), **options))
    return Counter(tuple(plan.prompt[:6]) for plan in itertools.islice(drawn, 2000))


def test_prefixes_are_drawn_evenly_or_with_a_skew() -> None:
    even = prefixes_of(prefixes=4)
    assert len(even) == 4
    assert all(400 < count < 600 for count in even.values())
    ranked = [count for _, count in prefixes_of(prefixes=4, prefix_skew=1.0).most_common()]
    assert ranked[0] == pytest.approx(2000 * 12 / 25, rel=0.1)  # 1 / (1 + 1/2 + 1/3 + 1/4)
    assert ranked[0] / ranked[3] == pytest.approx(4, rel=0.25)
    assert prefixes_of(prefixes=4) == even, "the same seed gives the same prefixes"


def test_more_prefixes_leave_the_rest_of_a_prompt_as_it_is() -> None:
    one, many = (
        list(itertools.islice(planned_requests(BenchOptions(shared_prefix_tokens=6, prefixes=count)), 5)) for count in (1, 9)
    )  # fmt: skip
    assert [plan.prompt[6:] for plan in one] == [plan.prompt[6:] for plan in many]
    assert [plan.prompt[:6] for plan in one] != [plan.prompt[:6] for plan in many]
