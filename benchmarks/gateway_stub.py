"""A server that answers at once, so that what is measured is the way to it: 64 tokens, whole or streamed.

    python -m benchmarks.gateway_stub PORT [GAP_MS]

With a gap the chunks of a stream come one by one, so that no proxy can send several at a time.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import msgspec

NUM_TOKENS = 64
USAGE = {"prompt_tokens": 10, "completion_tokens": NUM_TOKENS, "total_tokens": 10 + NUM_TOKENS}
_HEAD = {"id": "chatcmpl-1", "created": 1, "model": "stub"}


def _chunk(**fields: Any) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode({**_HEAD, "object": "chat.completion.chunk", **fields})


CHUNKS = [
    _chunk(choices=[{"index": 0, "delta": {"content": f"word{index} "}, "finish_reason": None}])
    for index in range(NUM_TOKENS)
]
END = (
    _chunk(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
    + _chunk(choices=[], usage=USAGE)
    + b"data: [DONE]\n\n"
)
WHOLE = msgspec.json.encode({
    **_HEAD, "object": "chat.completion", "usage": USAGE,
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "word " * NUM_TOKENS},
                 "finish_reason": "stop"}],
})  # fmt: skip
MODELS = msgspec.json.encode({"object": "list", "data": [{"id": "stub", "object": "model", "owned_by": "stub"}]})


def application(gap_s: float) -> Any:
    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        body = (await receive()).get("body", b"")
        stream = scope["path"] != "/v1/models" and msgspec.json.decode(body).get("stream")
        kind = b"text/event-stream" if stream else b"application/json"
        answer = MODELS if scope["path"] == "/v1/models" else WHOLE
        length = [] if stream else [(b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind), *length]})
        if not stream:
            await send({"type": "http.response.body", "body": answer})
            return
        for chunk in CHUNKS:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            if gap_s:
                await asyncio.sleep(gap_s)
        await send({"type": "http.response.body", "body": END})

    return app


if __name__ == "__main__":
    from benchmarks.needs import development_tool

    gap_s = float(sys.argv[2]) / 1000 if len(sys.argv) > 2 else 0.0
    development_tool("uvicorn").run(
        application(gap_s), port=int(sys.argv[1]), log_level="warning", access_log=False, lifespan="off"
    )
