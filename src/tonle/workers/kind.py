"""`Kind`: the model of a pool, inside a worker process. Subclass it, and name the class in the settings.

    class Shout(Kind):
        def load(self, model: str | None, device: str, options: dict[str, Any]) -> None:
            self.mark = options.get("mark", "!")

        def run(self, batch: list[Job]) -> list[Result | TonleError]:
            return [Result({"text": job.fields["text"].upper() + self.mark}) for job in batch]

Does: say what a pool hands over and expects back. Does not: know processes, queues or HTTP.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec

from tonle.errors import TonleError

Media = bytes | bytearray | memoryview  # sound, pictures, vectors: bytes that travel by shared memory


class Job(msgspec.Struct, frozen=True):
    """One piece of work. `fields` is small and becomes msgpack; `media` is not copied into messages."""

    fields: dict[str, Any]
    media: tuple[Media, ...] = ()  # in a worker read-only views, valid until `run` or `stream` returns
    size: int = 1  # what it costs, in the kind's own unit (tokens, samples, pixels): what batches are made by


class Result(msgspec.Struct, frozen=True):
    """What became of a job, or one piece of it if the kind streams."""

    fields: dict[str, Any]
    media: tuple[Media, ...] = ()


class Kind(abc.ABC):
    """One object per worker process; one job, or one batch of jobs, at a time."""

    batches: ClassVar[bool] = (
        True  # `run` takes several jobs at once; False: each instance of the pool works on one job
    )
    streams: ClassVar[bool] = False  # `stream` is there: results are handed on as they are made

    @abc.abstractmethod
    def load(self, model: str | None, device: str, options: dict[str, Any]) -> None:
        """Before the first job; `model` None: the kind's own default. Raises `ModelError` or `ConfigError` with what to do."""

    @abc.abstractmethod
    def run(self, batch: list[Job]) -> list[Result | TonleError]:
        """One result for each job, in order. An error in the place of a result is that job's alone; one that is raised is
        every job's."""

    def stream(self, job: Job) -> Iterator[Result]:
        """The results of one job as they are made, of a kind with `streams`. The pool closes it when the caller is gone."""
        raise TypeError(f"{type(self).__name__} does not stream")

    def warm_up(self) -> list[Job]:
        """Jobs that are run after `load`, before the worker is ready, so that the first caller need not wait."""
        return []

    def describe(self) -> dict[str, Any]:
        """Facts for the model's list entry and /metrics, after `load`: dimensions, sample rate, languages."""
        return {}
