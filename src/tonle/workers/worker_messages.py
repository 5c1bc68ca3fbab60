"""Messages between a pool and its workers, as msgpack in frames (`child/frames.py`).

Does: define them, and carry errors over as the classes they are. Does not: send (`instance.py`, `worker.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from tonle import errors
from tonle.errors import CapacityError, InternalError, TonleError
from tonle.workers.shared_media import Carried


class WorkerSettings(msgspec.Struct):
    """The first message to a worker."""

    kind: str  # import path
    pool: str
    model: str | None
    device: str
    options: dict[str, Any]
    log_level: str
    log_json: bool


class JobMessage(msgspec.Struct, array_like=True):
    fields: msgspec.Raw
    media: list[Carried]
    size: int


class ResultMessage(msgspec.Struct, array_like=True, tag=True):
    fields: msgspec.Raw
    media: list[Carried]


class ErrorMessage(msgspec.Struct, array_like=True, tag=True):
    """A `TonleError`."""

    name: str  # of its class in `tonle.errors`
    message: str
    param: str | None = None
    retry_after_s: float | None = None


# -- to a worker


class Work(msgspec.Struct, array_like=True, tag=True):
    """A batch, or one job whose results are wanted as they are made. No other comes before it is answered."""

    id: int
    jobs: list[JobMessage]
    is_stream: bool
    segment_bytes: int  # of media that come beside this message; 0: none do


class Cancel(msgspec.Struct, array_like=True, tag=True):
    """Of a stream."""

    id: int


# -- from a worker


class Ready(msgspec.Struct, array_like=True, tag=True):
    facts: dict[str, Any]
    batches: bool
    memory_mb: float  # resident, after loading and warm-up
    load_s: float


class CannotLoad(msgspec.Struct, array_like=True, tag=True):
    error: ErrorMessage


class Done(msgspec.Struct, array_like=True, tag=True):
    """Of a batch."""

    id: int
    results: list[ResultMessage | ErrorMessage]
    segment_bytes: int
    memory_mb: float


class Piece(msgspec.Struct, array_like=True, tag=True):
    """Of a stream."""

    id: int
    result: ResultMessage
    segment_bytes: int


class End(msgspec.Struct, array_like=True, tag=True):
    """Of a stream."""

    id: int
    error: ErrorMessage | None
    memory_mb: float


ToWorker = Work | Cancel
FromWorker = Ready | CannotLoad | Done | Piece | End


# -- errors


def _classes(root: type[TonleError]) -> Iterator[type[TonleError]]:
    yield root
    for found in root.__subclasses__():
        yield from _classes(found)


_BY_NAME = {found.__name__: found for found in _classes(TonleError) if found.__module__ == errors.__name__}


def error_message(error: TonleError) -> ErrorMessage:
    """A class of someone else's travels as the nearest of ours that it is."""
    name = next(found.__name__ for found in type(error).__mro__ if _BY_NAME.get(found.__name__) is found)
    retry_after_s = error.retry_after_s if isinstance(error, CapacityError) else None
    return ErrorMessage(name, error.message, error.param, retry_after_s)


def error_of(message: ErrorMessage) -> TonleError:
    found = _BY_NAME.get(message.name, InternalError)
    if issubclass(found, CapacityError) and message.retry_after_s is not None:
        return found(message.message, param=message.param, retry_after_s=message.retry_after_s)
    return found(message.message, param=message.param)
