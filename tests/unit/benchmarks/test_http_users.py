"""The users of the GPU's benchmarks, in several processes."""

from __future__ import annotations

import pytest
from benchmarks.http_users import Users
from tests.unit.bench.scripted import Behaviour, json_reply, serving


def test_every_job_is_sent_once_and_its_answer_is_told() -> None:
    jobs = [([5000 + number] * (number + 1), 2 + number % 3) for number in range(9)]
    with serving(Behaviour(key="k")) as server:
        outcome = Users(2).drive(server.url, "scripted", jobs, 4, api_key="k")
        sent = [asked.body["prompt"] for asked in server.completions]
    assert sorted(sent) == [prompt for prompt, _ in jobs]
    assert sorted(sample.tokens for sample in outcome.samples) == sorted(count for _, count in jobs)
    assert outcome.seconds > 0 and outcome.cpu_s > 0


def test_a_failure_is_an_error() -> None:
    full = json_reply(503, {"error": {"message": "full"}})
    with serving(Behaviour(script=lambda asked: [full])) as server, pytest.raises(RuntimeError, match="HTTP 503: full"):
        Users(1).drive(server.url, "scripted", [([5000], 2)], 1)
