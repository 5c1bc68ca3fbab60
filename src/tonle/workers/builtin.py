"""The kinds that come with Tonle by their short names, and which handler answers which path.

Does: name classes and functions, import them when they are needed. Does not: import a kind in the HTTP process: only
workers do.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec

from tonle.errors import ConfigError
from tonle.protocol.embeddings import RERANK_PATHS, SCORE_PATHS
from tonle.workers.import_path import load_object

if TYPE_CHECKING:  # a worker parses no HTTP
    from tonle.edge.client_connection import Sink
    from tonle.workers.pool import WorkerPool
    from tonle.workers.worker_request import WorkerRequest

OWN_PREFIX = "/v1/workers/"  # where a kind that is given by its import path is served, then its pool's name
OWN_HANDLER = "tonle.workers.endpoints.own_kind:own_kind"

Handler = Callable[["WorkerRequest", "WorkerPool", "Sink"], Awaitable[None]]


class BuiltinKind(msgspec.Struct, frozen=True):
    kind: str  # import path of the class
    handlers: dict[str, str]  # by path; import paths of functions
    others: dict[str, str] = {}  # the same of paths that it answers after the kinds that are made for them


_RANKING = {
    **dict.fromkeys(RERANK_PATHS, "tonle.workers.endpoints.rerank:rerank"),
    **dict.fromkeys(SCORE_PATHS, "tonle.workers.endpoints.rerank:score"),
}

BUILTIN = {
    "embeddings": BuiltinKind(
        kind="tonle.workers.kinds.embeddings:Embeddings",
        handlers={"/v1/embeddings": "tonle.workers.endpoints.embeddings:embeddings"},
        others=_RANKING,  # by the cosine of vectors
    ),
    "rerank": BuiltinKind(
        kind="tonle.workers.kinds.rerank:Rerank",
        handlers=_RANKING,
    ),
    "asr": BuiltinKind(
        kind="tonle.workers.kinds.asr:Asr",
        handlers={
            "/v1/audio/transcriptions": "tonle.workers.endpoints.transcriptions:transcriptions",
            "/v1/audio/translations": "tonle.workers.endpoints.transcriptions:translations",
        },
    ),
    "tts": BuiltinKind(
        kind="tonle.workers.kinds.tts:Tts",
        handlers={"/v1/audio/speech": "tonle.workers.endpoints.speech:speech"},
    ),
    "images": BuiltinKind(
        kind="tonle.workers.kinds.images:Images",
        handlers={"/v1/images/generations": "tonle.workers.endpoints.images:images"},
    ),
}  # fmt: skip


def kind_path(kind: str) -> str:
    """The import path of a kind that is named, or given by its import path. Raises `ConfigError`."""
    if kind in BUILTIN:
        return BUILTIN[kind].kind
    module, _, name = kind.partition(":")
    if not module or not name.isidentifier():
        raise ConfigError(
            f"there is no kind of worker {kind!r}; it is one of {', '.join(BUILTIN)}, or an import path such as "
            "package.module:Class",
            param="kind",
        )
    return kind


def handlers_of(kind: str, name: str) -> dict[str, str]:
    """Import paths of handlers by path, of a pool with this name."""
    return BUILTIN[kind].handlers if kind in BUILTIN else {f"{OWN_PREFIX}{name}": OWN_HANDLER}


def other_handlers_of(kind: str) -> dict[str, str]:
    """The same of paths that other kinds are made for."""
    return BUILTIN[kind].others if kind in BUILTIN else {}


@functools.cache
def load_handler(path: str) -> Handler:
    handler: Handler = load_object(path)
    return handler
