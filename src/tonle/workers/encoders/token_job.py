"""Token ids as jobs of a pool, and back in its worker. Jobs are small, so the ids are a field: int32, as bytes.

Does: `token_job` in the process that serves HTTP, `read_tokens` in the worker. Does not: check ids against a model.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tonle.errors import InvalidRequest
from tonle.workers.encoders.text import Tokens
from tonle.workers.kind import Job

DESCRIBE = Job({"describe": True})  # asks a worker for its `TextFacts`


def token_job(tokens: Tokens, **fields: Any) -> Job:
    """Its size is its number of tokens, which is what batches are made by."""
    given = {"ids": tokens.ids.tobytes(), **fields}
    if tokens.types is not None:
        given["types"] = tokens.types.tobytes()
    return Job(given, size=len(tokens.ids))


def read_tokens(job: Job) -> Tokens:
    """Raises `InvalidRequest`."""
    try:
        ids = np.frombuffer(job.fields["ids"], np.int32)
        types = np.frombuffer(job.fields["types"], np.uint8) if "types" in job.fields else None
    except (KeyError, TypeError, ValueError):
        raise InvalidRequest("a job of an encoder needs ids: int32, as bytes", param="ids") from None
    if types is not None and (len(types) != len(ids) or types.max(initial=0) > 1):
        raise InvalidRequest("types of a job must be as many as its ids, and 0 or 1", param="types")
    return Tokens(ids, types)
