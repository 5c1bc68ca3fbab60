"""Asking a server for the usage of a stream although the caller did not.

Does: add `stream_options.include_usage` to a request body. Does not: take the extra chunk out of the reply again;
`Collector(..., swallow_usage=True)` does.
"""

from __future__ import annotations

from typing import Any

import msgspec


def ask_for_usage(body: bytes, request: Any = None) -> bytes | None:
    """The body to send instead, or None if it can stay: no stream, no JSON object, or the caller asks already.

    `request` is the parsed body, if there is one. The caller's own bytes are kept: the option is spliced in at the
    end, unless there are `stream_options` to change.
    """
    if request is None:
        try:
            request = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
    if not isinstance(request, dict) or request.get("stream") is not True:
        return None
    options = request.get("stream_options")
    if options is None and "stream_options" not in request:
        head = body.rstrip()
        return head[:-1] + b',"stream_options":{"include_usage":true}}'
    if options is not None and (not isinstance(options, dict) or options.get("include_usage")):
        return None  # asked for, or wrong: the server will say so
    return msgspec.json.encode({**request, "stream_options": {**(options or {}), "include_usage": True}})
