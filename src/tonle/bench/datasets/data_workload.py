"""`DataWorkload`: the jobs of a file's entries, in their order.

Phases and levels go on where the one before stopped, and around at the end. Does not: read files (`read_data.py`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from tonle.bench.datasets.items import ConversationItem, Item, RequestItem
from tonle.bench.datasets.read_data import Data
from tonle.bench.datasets.shipped import is_shipped
from tonle.bench.options import BenchOptions, Endpoint
from tonle.bench.workload import MAX_COUNTED_JOBS, Job, Phase, Question, build_job, conversation_job, encode_body
from tonle.errors import ConfigError


class DataWorkload:
    def __init__(self, options: BenchOptions, model: str, data: Data) -> None:
        self.kind = str(options.file) if is_shipped(options.file) else "file" if data.format == "jsonl" else data.format
        self.num_sent = 0
        self._options = options
        self._model = model
        self._data = data
        if options.turns is not None and data.format != "sharegpt":
            raise ConfigError("turns are for synthetic prompts and conversations (ShareGPT), not for single requests",
                              param="turns")  # fmt: skip

    def pass_over(self, num_jobs: int) -> None:
        self.num_sent += num_jobs

    def notes(self) -> list[str]:
        if self.num_sent <= len(self._data.items):
            return []
        return ["the file's prompts were sent more than once: caches of the server may have answered"]

    def num_requests(self, level: int, num_jobs: int | None) -> int | None:
        if self._data.format != "sharegpt" or num_jobs is None:
            return num_jobs
        if num_jobs > MAX_COUNTED_JOBS:
            return None
        items = [self._data.items[(self.num_sent + number) % len(self._data.items)] for number in range(num_jobs)]
        return sum(self._num_turns(item, self._rng(level, "run", number)) for number, item in enumerate(items))

    def jobs(self, level: int, phase: Phase) -> Iterator[Job]:
        index = number = 0
        while True:
            item = self._data.items[self.num_sent % len(self._data.items)]
            self.num_sent += 1
            job = self._job(index, number, item, phase, self._rng(level, phase, number))
            yield job
            index += job.num_requests
            number += 1

    def _rng(self, level: int, phase: Phase, number: int) -> random.Random:
        return random.Random(f"{self._options.seed}/{level}/{phase}/{number}")

    def _num_turns(self, item: Item, rng: random.Random) -> int:
        if not isinstance(item, ConversationItem):
            return 1
        most = len(item.questions)
        return most if self._options.turns is None else min(most, self._options.turns.draw(rng))

    def _job(self, index: int, number: int, item: Item, phase: Phase, rng: random.Random) -> Job:
        options = self._options
        if isinstance(item, RequestItem):
            return self._request(index, item)
        if isinstance(item, ConversationItem):
            questions = self._questions(item, rng)[: 1 if phase == "warmup" else None]
            return conversation_job(options, self._model, index, item.opening, questions, conversation=number)
        endpoint: Endpoint = options.endpoint or ("chat" if item.is_chat else "completions")
        output_tokens = options.output_tokens.draw(rng) if item.max_tokens is None else item.max_tokens
        return build_job(options, self._model, endpoint, index, item.content, output_tokens)

    def _questions(self, item: ConversationItem, rng: random.Random) -> list[Question]:
        options = self._options
        num_turns = self._num_turns(item, rng)
        questions: list[Question] = []
        for content, recorded in zip(item.questions[:num_turns], item.answer_tokens, strict=False):
            drawn = options.output_tokens.draw(rng)
            output_tokens = recorded if recorded is not None and options.answers_as_recorded else drawn
            questions.append(Question(content, output_tokens, options.think_time.draw(rng) if questions else 0.0))
        return questions

    def _request(self, index: int, item: RequestItem) -> Job:
        named = {} if self._options.model is None else {"model": self._options.model}
        body = encode_body(item.path, item.body | named, self._options.extra_body)
        return Job(index, item.path, body, None, counts_graphemes=self._options.counts_graphemes)
