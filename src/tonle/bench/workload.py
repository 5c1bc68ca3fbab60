"""What is sent: `Job`, one ready-made request, and `Workload`, an endless, reproducible series of them per level.

Does: build JSON bodies; make the next turn of a conversation from the answer to the one before; count the letters of an answer.
Does not: draw prompts (`synthetic.py`), read files (`datasets/`), ask the server anything (`target.py`) or send (`drive.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from tonle.bench.answer_reader import AnswerReader
from tonle.bench.answer_stream import StreamedAnswer
from tonle.bench.graphemes import count_graphemes
from tonle.bench.options import BenchOptions, Endpoint
from tonle.edge.buffered_reply import MAX_BYTES

if TYPE_CHECKING:
    from tonle.bench.measure import Sample
    from tonle.protocol.answers import Answer

Phase = Literal["probe", "warmup", "run"]

MAX_COUNTED_JOBS = 10_000  # of which the turns are counted beforehand

PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
# Of these a stream of events can be read; any other path answers in one piece.
STREAMED_PATHS = (*PATHS.values(), "/v1/messages", "/v1/responses")

Content = str | list[int] | list[dict[str, Any]]  # a text, token ids, or the messages of a chat


@dataclass(slots=True)
class Job:
    """One request, ready to be sent. `following` is the next turn of its conversation, once this one is answered."""

    index: int
    path: str
    body: bytes
    exact_tokens: int | None  # the answer must have this many; None = any number
    due_s: float | None = None  # after the level's begin, where the data says when; None: the load says
    pause_s: float = 0.0  # of a later turn: how long after the answer before it
    num_requests: int = 1  # with the turns that are to follow
    counts_graphemes: bool = False
    content_type: str | None = None  # of the body; None: JSON
    max_reply_bytes: int = MAX_BYTES  # of an answer that is not streamed
    following: Job | None = field(default=None, compare=False)

    @property
    def is_streamed(self) -> bool:
        return self.path in STREAMED_PATHS

    @property
    def reads_answer(self) -> bool:
        """The text of the answer has to be kept for `answered`."""
        return self.counts_graphemes

    def new_answer(self) -> AnswerReader:
        """That its answer is read with."""
        return StreamedAnswer(keep_texts=self.reads_answer)

    def answered(self, sample: Sample, answer: Answer | None) -> None:
        """Called once, when the request is over, also if it failed. `answer` is there if `reads_answer`."""
        if self.counts_graphemes and answer is not None:
            sample.graphemes = count_graphemes(answer.text)
        self.look_at(sample, answer)

    def look_at(self, sample: Sample, answer: Answer | None) -> None:
        """What a special kind of job wants to know of its answer."""


class Workload(Protocol):
    """One series of requests per level and phase."""

    kind: str  # of prompts, for the report: ids, words, the format of a file, or replay

    def jobs(self, level: int, phase: Phase) -> Iterator[Job]: ...

    def num_requests(self, level: int, num_jobs: int | None) -> int | None:
        """Of so many jobs of a level, with all turns of conversations, before they are made. None: it is not known."""
        ...

    def pass_over(self, num_jobs: int) -> None:
        """A copy of this workload, in another process, has made so many jobs: the next level goes on after them."""
        ...

    def notes(self) -> list[str]:
        """For the reader of the report, when everything was sent."""
        ...


@dataclass(frozen=True, slots=True)
class Question:
    """What the user says in one turn of a conversation."""

    content: str
    output_tokens: int
    pause_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class ConversationJob(Job):
    """One turn. The next one has the real answer in its history; after a failure there is none."""

    options: BenchOptions
    model: str
    conversation: int
    turn: int
    messages: list[dict[str, Any]]  # with this turn's question
    rest: list[Question]

    @property
    def reads_answer(self) -> bool:
        return self.counts_graphemes or bool(self.rest)

    def look_at(self, sample: Sample, answer: Answer | None) -> None:
        sample.conversation, sample.turn = self.conversation, self.turn
        if sample.failure is None and answer is not None and self.rest:
            history = [*self.messages, {"role": "assistant", "content": answer.text}]
            self.following = conversation_job(
                self.options, self.model, self.index + 1, history, self.rest,
                conversation=self.conversation, turn=self.turn + 1,
            )  # fmt: skip


def conversation_job(
    options: BenchOptions,
    model: str,
    index: int,
    history: list[dict[str, Any]],
    questions: list[Question],
    *,
    conversation: int,
    turn: int = 0,
) -> Job:
    """The first of `questions`, asked after `history`. Each turn takes the next index."""
    question, *rest = questions
    messages = [*history, {"role": "user", "content": question.content}]
    plain = build_job(options, model, "chat", index, messages, question.output_tokens)
    return ConversationJob(
        index, plain.path, plain.body, plain.exact_tokens, pause_s=question.pause_s, num_requests=len(questions),
        counts_graphemes=plain.counts_graphemes, options=options, model=model, conversation=conversation, turn=turn,
        messages=messages, rest=rest,
    )  # fmt: skip


def build_job(
    options: BenchOptions, model: str, endpoint: Endpoint, index: int, content: Content, output_tokens: int
) -> Job:
    """`content` is a prompt, or the messages of a chat; a prompt for the chat endpoint becomes the user's message."""
    fields: dict[str, Any] = {"model": model, "max_tokens": output_tokens, "temperature": options.temperature}
    if endpoint == "completions":
        fields["prompt"] = content
    else:
        fields["messages"] = [{"role": "user", "content": content}] if isinstance(content, str) else content
    if options.ignores_eos:
        fields["ignore_eos"] = True
    body = encode_body(PATHS[endpoint], fields, options.extra_body)
    known_length = options.ignores_eos and "max_tokens" not in options.extra_body
    return Job(
        index, PATHS[endpoint], body, output_tokens if known_length else None, counts_graphemes=options.counts_graphemes
    )


def encode_body(path: str, fields: dict[str, Any], extra: dict[str, Any]) -> bytes:
    """The body as JSON, made to stream where the path can. `extra` goes over `fields`; None in it takes a field out."""
    if path in STREAMED_PATHS:
        fields = fields | {"stream": True}
        if path in PATHS.values():
            fields["stream_options"] = {"include_usage": True}
    elif path in ("/api/chat", "/api/generate"):
        fields = fields | {"stream": False}  # they stream unless told not to, in lines of JSON
    fields = fields | extra
    return msgspec.json.encode(
        {name: value for name, value in fields.items() if name not in extra or value is not None}
    )
