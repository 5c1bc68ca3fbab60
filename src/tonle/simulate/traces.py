"""Traces of what a benchmark sends: synthetic prompts, a file, or an audit trail.

Does: give the requests of one level of `tonle bench` with the same options and seed: the same lengths, prefixes, turns and
moments of arrival, by the same draws. Does not: tokenize: texts become pseudo tokens (`pseudo_tokens.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from tonle.bench.arrivals import arrival_times
from tonle.bench.datasets.audit_trail import RecordedRequest, recorded_requests
from tonle.bench.datasets.data_workload import DataWorkload
from tonle.bench.datasets.read_data import read_data
from tonle.bench.load import Load
from tonle.bench.options import BenchOptions
from tonle.bench.synthetic import planned_requests
from tonle.bench.workload import ConversationJob, Job
from tonle.errors import ConfigError
from tonle.simulate.pseudo_tokens import RecordedPrompts, text_ids
from tonle.simulate.trace import Trace, TraceRequest, answer_ids

_DEFAULT_ANSWER = 128  # tokens, where a request of a file says nothing


class _Turn(msgspec.Struct, frozen=True):
    """A request as a data source gives it. `new`: the tokens of its prompt after the turn before and its answer."""

    new: list[int]
    output_tokens: int
    pause_s: float = 0.0


def trace_of_workload(
    options: BenchOptions, requests: int | None = None, *, level: int = 0, load: Load | None = None
) -> Trace:
    """What level number `level` of `tonle bench` sends. `requests`: so many (conversations count as one) instead of the
    options' number; `load`: instead of that level's own. Raises `ConfigError`."""
    if options.replay is not None:
        return trace_of_trail(
            options.replay, speed=options.speed, since=options.since, until=options.until, limit=requests
        )
    load = options.levels[level] if load is None else load
    count = options.num_requests(load) if requests is None else requests
    conversations = _file_conversations(options, level) if options.file is not None else _synthetic(options, level)
    if load.users is not None:
        if count is None:
            raise ConfigError("a closed loop for a time has no number of requests: give one", param="requests")
        chosen = ((turns, None) for turns in itertools.islice(conversations, count))
        return Trace(label=load.label, requests=list(_requests(chosen)), users=load.users, until_s=options.duration_s)
    moments = arrival_times(load, seed=options.seed, level=level, duration_s=options.duration_s)
    timed = zip(conversations, itertools.islice(moments, count), strict=False)
    return Trace(label=load.label, requests=list(_requests(timed)), rate=load.rate)


def trace_of_trail(
    trail: Path, *, speed: float = 1.0, since: str | None = None, until: str | None = None, limit: int | None = None
) -> Trace:
    """The requests of an audit trail at their recorded times, `speed` times as fast, with the counts of tokens that the server
    gave. Raises `ConfigError` if there are none."""
    recorded = list(itertools.islice(recorded_requests(trail, since, until), limit))
    if not recorded:
        raise ConfigError(f"nothing to simulate: {trail} has no answered requests in this period", param="replay")
    prompts = RecordedPrompts(_chars_per_token(recorded))
    found = [
        TraceRequest(
            index=index,
            arrival_s=each.arrival_s / speed,
            prompt=prompts.ids(each.text, each.prompt_tokens, each.owner, index, each.output_tokens),
            output_tokens=each.output_tokens,
            owner=each.owner,
        )
        for index, each in enumerate(recorded)
    ]
    return Trace(label=f"replay ×{speed:g}", requests=found)


def _chars_per_token(recorded: list[RecordedRequest]) -> float:
    known = [each for each in recorded if each.text]
    tokens = sum(each.prompt_tokens for each in known)
    return sum(len(each.text or "") for each in known) / tokens if tokens else 4.0


def _requests(conversations: Iterable[tuple[list[_Turn], float | None]]) -> Iterator[TraceRequest]:
    """Each with all of its prompt: what was said before in its conversation, answers included."""
    index = 0
    for turns, arrival_s in conversations:
        history: list[int] = []
        for place, turn in enumerate(turns):
            prompt = history + turn.new
            follows = index - 1 if place else None
            yield TraceRequest(
                index=index, arrival_s=arrival_s if follows is None else None, prompt=prompt,
                output_tokens=turn.output_tokens, follows=follows, pause_s=turn.pause_s,
            )  # fmt: skip
            history = prompt + answer_ids(index, turn.output_tokens)
            index += 1


def _synthetic(options: BenchOptions, level: int) -> Iterator[list[_Turn]]:
    requests = planned_requests(options, level)
    for _, turns in itertools.groupby(requests, key=lambda request: request.conversation):
        yield [_Turn(turn.prompt, turn.output_tokens, turn.pause_s) for turn in turns]


def _file_conversations(options: BenchOptions, level: int) -> Iterator[list[_Turn]]:
    assert options.file is not None
    workload = DataWorkload(options, "model", read_data(options.file, options.format, options.endpoint))
    for job in workload.jobs(level, "run"):
        yield _turns_of(job)


def _turns_of(job: Job) -> list[_Turn]:
    body = msgspec.json.decode(job.body)
    first = _Turn(_prompt_ids(body), _asked_tokens(body))
    if not isinstance(job, ConversationJob):
        return [first]
    later = [_Turn(text_ids(f"user: {each.content}\n"), each.output_tokens, each.pause_s) for each in job.rest]
    return [first, *later]


def _asked_tokens(body: dict[str, Any]) -> int:
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if isinstance(body.get(name), int) and body[name] > 0:
            return int(body[name])
    return _DEFAULT_ANSWER


def _prompt_ids(body: dict[str, Any]) -> list[int]:
    prompt = body.get("prompt", body.get("input"))
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return prompt
    if isinstance(prompt, str):
        return text_ids(prompt)
    messages = body.get("messages")
    if not isinstance(messages, list):
        return text_ids(msgspec.json.encode(prompt).decode())
    return text_ids("".join(f"{each.get('role')}: {_text_of(each.get('content'))}\n" for each in messages))


def _text_of(content: Any) -> str:
    return content if isinstance(content, str) else msgspec.json.encode(content).decode()
