"""What is sent: an endless, reproducible series of ready-made request bodies per level.

Does: draw synthetic prompts of a wanted number of tokens from a seed, or take a JSONL file's; build JSON bodies.
Does not: ask the server anything (`target.py` found out how its tokens are made) or send.

The same seed gives the same prompts, whatever the concurrency; levels, warm-up and requests never share a prompt.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from tonle.bench.options import BenchOptions, Endpoint
from tonle.errors import ConfigError

Phase = Literal["probe", "warmup", "run"]

PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass(frozen=True, slots=True)
class Job:
    """One request, ready to be sent."""

    index: int
    path: str
    body: bytes
    exact_tokens: int | None  # the answer must have this many; None = any number


@dataclass(frozen=True, slots=True)
class PromptScale:
    """How this server counts: a prompt of n units (words or token ids) has `overhead + n * tokens_per_unit` tokens."""

    kind: Literal["ids", "words"]
    units: tuple[str, ...] | tuple[int, ...]
    overhead: float = 0.0  # chat template, beginning-of-text
    tokens_per_unit: float = 1.0

    def num_units(self, tokens: int) -> int:
        """Units that make up `tokens` tokens when the overhead is counted elsewhere."""
        return max(1, round(tokens / self.tokens_per_unit))


class Workload(Protocol):
    """One series of requests per level and phase."""

    def jobs(self, level: int, phase: Phase) -> Iterator[Job]: ...


class SyntheticWorkload:
    """Random prompts: the shared prefix first, then tokens of their own."""

    def __init__(self, options: BenchOptions, model: str, scale: PromptScale) -> None:
        self._options = options
        self._model = model
        self._scale = scale
        self._endpoint: Endpoint = options.endpoint or "completions"
        # The overhead opens every prompt alike: it belongs to the shared prefix, if there is one.
        prefix = options.shared_prefix_tokens
        self._own_overhead = 0.0 if prefix else scale.overhead
        self._prefix: list[Any] = []
        if prefix:
            count = scale.num_units(max(1, round(prefix - scale.overhead)))
            self._prefix = random.Random(f"{options.seed}/prefix").choices(scale.units, k=count)

    def jobs(self, level: int, phase: Phase) -> Iterator[Job]:
        index = 0
        while True:
            yield self._job(index, random.Random(f"{self._options.seed}/{level}/{phase}/{index}"))
            index += 1

    def _job(self, index: int, rng: random.Random) -> Job:
        options = self._options
        input_tokens = options.input_tokens.draw(rng)
        output_tokens = options.output_tokens.draw(rng)
        count = self._scale.num_units(max(1, round(input_tokens - self._own_overhead)))
        units = self._prefix + rng.choices(self._scale.units, k=count)
        return build_job(options, self._model, self._endpoint, index, _prompt(units), output_tokens)


def _prompt(units: list[Any]) -> str | list[int]:
    """Token ids stay a list; words become text."""
    return " ".join(units) if isinstance(units[0], str) else units


class FileLine(msgspec.Struct, forbid_unknown_fields=True):
    """One line of a JSONL file."""

    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None


class FileWorkload:
    """A file's prompts in their order; phases and levels go on where the one before stopped, and around at the end."""

    def __init__(self, options: BenchOptions, model: str, lines: Sequence[FileLine]) -> None:
        self.num_sent = 0
        self._options = options
        self._model = model
        self._lines = lines

    @property
    def wrapped(self) -> bool:
        return self.num_sent > len(self._lines)

    def jobs(self, level: int, phase: Phase) -> Iterator[Job]:
        index = 0
        while True:
            line = self._lines[self.num_sent % len(self._lines)]
            self.num_sent += 1
            output_tokens = line.max_tokens
            if output_tokens is None:
                output_tokens = self._options.output_tokens.draw(
                    random.Random(f"{self._options.seed}/{level}/{phase}/{index}")
                )
            yield self._job(index, line, output_tokens)
            index += 1

    def _job(self, index: int, line: FileLine, output_tokens: int) -> Job:
        endpoint: Endpoint = self._options.endpoint or ("completions" if line.messages is None else "chat")
        content = line.prompt if line.messages is None else line.messages
        assert content is not None, "read_file lets no such line through"
        return build_job(self._options, self._model, endpoint, index, content, output_tokens)


def build_job(
    options: BenchOptions,
    model: str,
    endpoint: Endpoint,
    index: int,
    content: str | list[int] | list[dict[str, Any]],
    output_tokens: int,
) -> Job:
    """`content` is a prompt, or the messages of a chat; a prompt for the chat endpoint becomes the user's message."""
    fields: dict[str, Any] = {
        "model": model,
        "max_tokens": output_tokens,
        "temperature": options.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if endpoint == "completions":
        fields["prompt"] = content
    else:
        fields["messages"] = [{"role": "user", "content": content}] if isinstance(content, str) else content
    if options.ignores_eos:
        fields["ignore_eos"] = True
    fields.update(options.extra_body)
    body = msgspec.json.encode({name: value for name, value in fields.items() if value is not None})
    known_length = options.ignores_eos and "max_tokens" not in options.extra_body
    return Job(index, PATHS[endpoint], body, output_tokens if known_length else None)


def read_file(path: Path, endpoint: Endpoint | None) -> list[FileLine]:
    """Read a JSONL file; the first bad line is an error that names its number."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", param="file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}", param="file") from None
    lines = [
        _read_line(path, number, line, endpoint) for number, line in enumerate(text.split("\n"), 1) if line.strip()
    ]
    if not lines:
        raise ConfigError(f'{path} has no lines; each is {{"prompt": …}} or {{"messages": […]}}', param="file")
    return lines


def _read_line(path: Path, number: int, text: str, endpoint: Endpoint | None) -> FileLine:
    try:
        line = msgspec.json.decode(text, type=FileLine)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}, line {number}: {error}", param="file") from None
    problem = _line_problem(line, endpoint)
    if problem is not None:
        raise ConfigError(f"{path}, line {number}: {problem}", param="file")
    return line


def _line_problem(line: FileLine, endpoint: Endpoint | None) -> str | None:
    if (line.prompt is None) == (line.messages is None):
        return "needs either prompt or messages"
    if not line.prompt and not line.messages:
        return "the prompt is empty"
    if line.max_tokens is not None and line.max_tokens < 1:
        return f"max_tokens must be at least 1, not {line.max_tokens}"
    if endpoint == "completions" and line.messages is not None:
        return "has messages, which the completions endpoint does not take; use the chat endpoint"
    if endpoint == "chat" and isinstance(line.prompt, list):
        return "has token ids, which the chat endpoint does not take; use the completions endpoint"
    return None
