"""`RemoteBackend`: any OpenAI-compatible server, over HTTP."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import httpx

from tonle.cli.backends import AnswerOptions, AnswerStats, Prompt
from tonle.errors import CallerError, ContextOverflow, InternalError

_CONNECT_TIMEOUT_S = 10.0


class RemoteBackend:
    def __init__(self, url: str, *, model: str | None = None, api_key: str | None = None) -> None:
        """`url` with or without /v1. `model` None: the first one the server lists."""
        self._model = model
        self._base = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
        self._context_length: int | None = None  # if the server says
        # No limit on reading: a busy server may take long over a long prompt, and the user has Ctrl-C.
        with self._translated():
            self._client = httpx.AsyncClient(
                base_url=f"{self._base}/v1/",
                headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
                timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),
            )

    @property
    def name(self) -> str:
        return self._model or self._base

    async def start(self) -> None:
        """Ask which models there are, to learn that the server is there and what to call the model."""
        with self._translated():
            response = await self._client.get("models")
            await _check(response)
            listed = {str(entry["id"]): entry for entry in response.json()["data"]}
        if not listed:
            raise CallerError(f"{self._base} lists no model")
        if self._model is not None and self._model not in listed:
            raise CallerError(f"{self._base} has no model {self._model!r}; it has {', '.join(listed)}")
        self._model = self._model or next(iter(listed))
        context_length = listed[self._model].get("max_model_len")
        self._context_length = context_length if isinstance(context_length, int) else None

    async def close(self) -> None:
        await self._client.aclose()

    async def answer(self, prompt: Prompt, options: AnswerOptions, stats: AnswerStats) -> AsyncGenerator[str, None]:
        path, body = self._request(prompt, options)
        stats.max_tokens = body.get("max_tokens")
        stats.asked_s = time.monotonic()
        stats.context_length = self._context_length
        with self._translated():
            async with self._client.stream("POST", path, json=body) as response:
                await _check(response)
                told = response.headers.get("x-tonle-max-tokens", "")
                stats.max_tokens = int(told) if told.isdecimal() else options.max_tokens
                async for chunk in _events(response):
                    if text := _take(chunk, stats):
                        yield text
        if stats.finish_reason is None:
            raise InternalError(f"{self._base} ended its answer before it was complete")

    def _request(self, prompt: Prompt, options: AnswerOptions) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {"model": self._model, "stream": True, "stream_options": {"include_usage": True}}
        given = {
            "temperature": options.temperature,
            "top_p": options.top_p,
            "max_tokens": self._max_tokens(options.max_tokens),
            "seed": options.seed,
        }
        body |= {name: value for name, value in given.items() if value is not None}
        if isinstance(prompt, str):
            return "completions", body | {"prompt": prompt}
        return "chat/completions", body | {"messages": prompt}

    def _max_tokens(self, wanted: int | None) -> int | None:
        """A server refuses a prompt that leaves less room than this: ask for no more than the prompt can spare."""
        if self._context_length is None or wanted is None:
            return wanted
        return min(wanted, self._context_length // 2)

    @contextlib.contextmanager
    def _translated(self) -> Any:
        """Turn httpx's errors, and malformed replies, into ours."""
        try:
            yield
        except httpx.InvalidURL as error:
            raise CallerError(f"{self._base} is not a valid URL: {error}") from error
        except httpx.ConnectError as error:
            raise CallerError(f"no server answers at {self._base} ({error}). Is it running?") from error
        except httpx.HTTPError as error:
            raise InternalError(f"the connection to {self._base} broke: {error or type(error).__name__}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InternalError(f"{self._base} does not speak the OpenAI protocol: {error}") from error


async def _check(response: httpx.Response) -> None:
    """Raises the error that the server answered with."""
    if response.is_success:
        return
    body = await response.aread()
    try:
        error = json.loads(body)["error"]
        message, code = str(error["message"]), error.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        message, code = body.decode(errors="replace").strip()[:200] or response.reason_phrase, None
    if code == "context_length_exceeded" or "context length" in message:
        raise ContextOverflow(message)
    raise CallerError(f"the server answered {response.status_code}: {message}")


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each `data:` line. Only \\n ends one: JSON may hold the other characters that look like line ends."""
    tail = b""
    async for data in response.aiter_bytes():
        *lines, tail = (tail + data).split(b"\n")
        for line in lines:
            payload = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and payload != b"[DONE]":
                yield json.loads(payload)


def _take(chunk: dict[str, Any], stats: AnswerStats) -> str:
    """Count what a chunk brings, and return its text."""
    if error := chunk.get("error"):
        raise InternalError(
            f"the server reported an error: {error.get('message', error) if isinstance(error, dict) else error}"
        )
    text = ""
    for choice in chunk.get("choices") or ():
        text += (choice.get("delta") or {}).get("content") or choice.get("text") or ""
        stats.finish_reason = choice.get("finish_reason") or stats.finish_reason
    if text:
        stats.last_s = time.monotonic()
        stats.first_s = stats.first_s or stats.last_s
        stats.completion_tokens += 1
        stats.exact = False
    if usage := chunk.get("usage"):
        stats.prompt_tokens = usage.get("prompt_tokens") or 0
        stats.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        stats.completion_tokens = usage.get("completion_tokens") or stats.completion_tokens
        stats.exact = True
    return text
