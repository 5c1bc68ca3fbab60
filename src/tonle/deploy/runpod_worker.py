"""A serverless worker of RunPod: takes jobs from an endpoint's queue and has a local `tonle serve` answer them.

Does: start the server, wait for it, hand RunPod's SDK a generator that streams, end with the server. Does not: load a model
in this process, or need the SDK to be imported (`run` does, it is the extra `runpod`).

A job's input is one of

    {"openai_route": "/v1/chat/completions", "openai_input": {…}}    what RunPod makes of requests to /openai/v1/…
    {"messages": […], "sampling_params": {…}, "stream": true}
    {"prompt": "…", "sampling_params": {…}}

and its output the server's JSON, or one event of the stream at a time.
"""

from __future__ import annotations

import asyncio
import codecs
import http.client
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tonle.config.cache_dir import VARIABLE as CACHE_VARIABLE
from tonle.deploy.runpod import MAX_CONCURRENCY
from tonle.edge.client import Address, HttpClient, UpstreamError
from tonle.errors import ConfigError, TonleError

log = logging.getLogger("tonle.runpod")

_ROUTE = re.compile(r"/(api/)?v1(/[\w-][\w.-]*)+")
_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_CONCURRENCY = "MAX_CONCURRENCY"  # the variable; RunPod's own worker for vLLM has the same
_SILENCE_S = 600.0  # the longest wait for the server's next byte
_POLL_S = 0.2
_STOP_S = 60  # SIGTERM to SIGKILL


class Jobs:
    """Turns jobs into requests to one server."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self._client = HttpClient(Address.parse(url), api_key=api_key)

    async def handle(self, job: dict[str, Any]) -> AsyncIterator[Any]:
        """What the SDK calls. A dictionary with `error` fails the job, with that text."""
        try:
            route, body = request_of(job.get("input"))
        except ValueError as error:
            yield {"error": str(error)}
            return
        method = "GET" if body is None else "POST"
        content = b"" if body is None else json.dumps(body).encode()
        answer = _Answer()
        sending = asyncio.create_task(self._send(self._client.request(method, route, content, {}), answer))
        try:
            async for piece in answer.pieces():
                yield piece
        finally:  # also if the job was cancelled: the connection closes, and the server stops generating
            sending.cancel()
            with suppress(asyncio.CancelledError):
                await sending

    async def _send(self, request: bytes, answer: _Answer) -> None:
        try:
            await self._client.send(request, answer, first_s=_SILENCE_S, silence_s=_SILENCE_S)
        except UpstreamError as error:
            answer.fail(f"the server did not answer: {error}")
        finally:
            answer.end()


class _Answer:
    """Takes an answer from the client, piece by piece."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._status = 0
        self._is_stream = False
        self._fault: str | None = None

    def attach(self, press: Any) -> None:
        """Nothing to hold back: an answer is no longer than the model's context."""

    def know(self, answer: Any) -> None:
        """The server is another process: its bytes are all there is."""

    def head(self, status: int, headers: dict[str, str]) -> None:
        self._status = status
        self._is_stream = status == 200 and headers.get("content-type", "").startswith("text/event-stream")

    def data(self, piece: bytes) -> None:
        self._queue.put_nowait(piece)

    def fail(self, why: str) -> None:
        self._fault = why

    def end(self) -> None:
        self._queue.put_nowait(None)

    async def pieces(self) -> AsyncIterator[Any]:
        """Whole events of a stream, each with the empty line at its end; else the JSON, once."""
        decoder, text = codecs.getincrementaldecoder("utf-8")("replace"), ""
        while (piece := await self._queue.get()) is not None:
            text += decoder.decode(piece)
            if self._is_stream:
                *events, text = text.split("\n\n")
                for event in events:
                    yield f"{event}\n\n"
        if self._fault is not None:
            yield {"error": self._fault}
        elif not self._is_stream:
            yield _output(self._status, text)


def _output(status: int, text: str) -> Any:
    try:
        content = json.loads(text)
    except ValueError:
        return {"error": f"HTTP {status}: {text[:1000]}"} if status >= 400 else text
    if status < 400:
        return content
    error = content.get("error") if isinstance(content, dict) else None
    return {"error": f"HTTP {status}: {error.get('message') if isinstance(error, dict) else text}"}


def request_of(job_input: Any) -> tuple[str, dict[str, Any] | None]:
    """Path and body; no body: GET. Raises `ValueError`."""
    if not isinstance(job_input, dict):
        raise ValueError("input must be an object")
    route = job_input.get("openai_route")
    if route is not None:
        if not isinstance(route, str) or not _ROUTE.fullmatch(route):
            raise ValueError(f"openai_route must be a path such as {_CHAT}, not {route!r}")
        return route, _object(job_input, "openai_input") or None
    if "openai_input" in job_input:
        return _CHAT, _object(job_input, "openai_input")
    for field, path in (("messages", _CHAT), ("prompt", _COMPLETIONS)):
        if field in job_input:
            own = {name: job_input[name] for name in ("model", "stream", field) if name in job_input}
            return path, _object(job_input, "sampling_params") | own
    raise ValueError('input must have "openai_route" and "openai_input", or "messages", or "prompt"')


def _object(job_input: dict[str, Any], name: str) -> dict[str, Any]:
    value = job_input.get(name)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{name} must be an object")
    return value or {}


# -- the process


def run(arguments: list[str]) -> None:
    """Serve jobs until RunPod ends the worker. `arguments`: those of `tonle serve`. Raises `TonleError`."""
    try:
        import runpod
    except ImportError as error:
        raise ConfigError("RunPod's SDK is not installed; pip install 'tonle[runpod]'") from error
    concurrency = _concurrency()
    _choose_cache()
    port = _free_port()
    command = [sys.executable, "-m", "tonle", "serve", *arguments, "--host=127.0.0.1", f"--port={port}"]
    server = subprocess.Popen(command)
    stopping = threading.Event()
    try:
        _wait_ready(server, port)
        threading.Thread(target=_end_with, args=(server, stopping), daemon=True).start()
        keys = os.environ.get("TONLE_API_KEY", "").split(",")
        jobs = Jobs(f"http://127.0.0.1:{port}", api_key=keys[0].strip() or None)
        runpod.serverless.start({
            "handler": jobs.handle,
            "concurrency_modifier": lambda current: concurrency,
            "return_aggregate_stream": True,
        })  # fmt: skip
    finally:
        stopping.set()
        _stop(server)


def _concurrency() -> int:
    text = os.environ.get(_CONCURRENCY) or str(MAX_CONCURRENCY)
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"the environment variable {_CONCURRENCY} must be a whole number from 1, not {text!r}")
    return int(text)


def _choose_cache() -> None:
    """A volume that belongs to another user is no reason to fail: what is fetched is then kept for this worker only."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen is None:
        return
    try:
        Path(chosen).mkdir(parents=True, exist_ok=True)
        if os.access(chosen, os.W_OK):
            return
        reason = "it cannot be written"
    except OSError as error:
        reason = str(error.strerror)
    log.warning("%s is not used: %s; models are fetched again by every worker", chosen, reason)
    del os.environ[CACHE_VARIABLE]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _wait_ready(server: subprocess.Popen[bytes], port: int) -> None:
    """As long as the server takes to load: it ends by itself if it cannot."""
    while server.poll() is None:
        with suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("GET", "/health/ready")
            if connection.getresponse().status == 200:
                return
        time.sleep(_POLL_S)
    raise TonleError(f"the server ended with status {server.returncode} before it was ready; its log says why")


def _end_with(server: subprocess.Popen[bytes], stopping: threading.Event) -> None:
    """A worker without a server would fail every job: end, and RunPod starts another."""
    status = server.wait()
    if stopping.is_set():
        return
    log.error("the server ended with status %d; so does this worker", status)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_STOP_S)
    os._exit(1)


def _stop(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        server.kill()
