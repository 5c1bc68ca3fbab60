"""`KubernetesApi`: two calls to the API server: get a document, and follow the changes of a list.

Does: send the token of the service account, read anew for each call because Kubernetes replaces it; say what to do when it is
refused. Does not: know what is watched, or try again.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec

from tonle.config.discovery import KubernetesAccess
from tonle.edge.buffered_reply import fetch
from tonle.edge.client import Address, HttpClient, UpstreamError
from tonle.edge.streamed_reply import stream
from tonle.errors import ConfigError
from tonle.gateway.discovery.source import SourceLost
from tonle.protocol.replies import body_message

TIMEOUT_S = 10.0
WATCH_S = 240  # the API server ends a watch after so long; then the next begins where it ended
SILENCE_S = WATCH_S + 30.0
MAX_LINE_BYTES = 4 * 1024**2  # of one event
GONE = 410  # the place in the history of changes is no longer known


class Refused(SourceLost):
    """It answered something else than 200."""

    def __init__(self, message: str, *, answered: int) -> None:
        super().__init__(message)
        self.answered = answered


class Event(msgspec.Struct, frozen=True):
    type: str  # ADDED, MODIFIED, DELETED, BOOKMARK, ERROR
    object: msgspec.Raw


class KubernetesApi:
    """For one event loop. Raises `SourceLost` when it cannot be made or used."""

    def __init__(self, access: KubernetesAccess) -> None:
        self._token_file = access.token_file
        try:
            ca_file = None if access.ca_file is None else str(access.ca_file)
            self._client = HttpClient(Address.parse(access.url), ca_file=ca_file)
        except (OSError, ConfigError) as error:
            raise SourceLost(f"cannot use {access.url} with {access.ca_file}: {error}") from None

    def close(self) -> None:
        self._client.close()

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> bytes:
        try:
            reply = await fetch(self._client, self._request(path, query), timeout_s=TIMEOUT_S)
        except UpstreamError as error:
            raise SourceLost(f"the API server {self._client.address} does not answer: {error}") from None
        if reply.status != 200:
            raise self._refused(path, reply.status, reply.body)
        return reply.body

    async def watch(self, path: str, query: Mapping[str, str]) -> AsyncGenerator[list[Event], None]:
        """Yields the events that came together. Ends when the API server ends it, as it does from time to time."""
        query = {**query, "watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_S)}
        request = self._request(path, query)
        try:
            async with stream(self._client, request, first_s=TIMEOUT_S, silence_s=SILENCE_S) as reply:
                if reply.status != 200:
                    raise self._refused(path, reply.status, await reply.read())
                rest = b""
                async for piece in reply:
                    *lines, rest = (rest + piece).split(b"\n")
                    if len(rest) > MAX_LINE_BYTES:
                        raise SourceLost("an event of the watch is too large")
                    if events := [_event(line) for line in lines if line.strip()]:
                        yield events
        except UpstreamError as error:
            raise SourceLost(f"the watch at {self._client.address} broke off: {error}") from None

    def _request(self, path: str, query: Mapping[str, str] | None) -> bytes:
        target = f"{path}?{urlencode(query)}" if query else path
        headers = {"Accept": "application/json", "Authorization": f"Bearer {_token(self._token_file)}"}
        return self._client.request("GET", target, b"", headers)

    def _refused(self, path: str, status: int, body: bytes) -> Refused:
        said = _status_message(body)
        if status == 401:
            advice = f"it does not accept the token in {self._token_file}"
        elif status == 403:
            advice = (
                "its service account may not: give it a Role that can get, list and watch endpointslices, and get pods"
            )
        else:
            advice = f"it answers {status}"
        return Refused(f"{path}: {advice}{f' ({said})' if said else ''}", answered=status)


def _token(file: Path) -> str:
    try:
        token = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SourceLost(f"cannot read the token of the service account in {file}: {error}") from None
    if not token.isprintable():
        raise SourceLost(f"{file} does not hold a token")
    return token


def _event(line: bytes) -> Event:
    try:
        return msgspec.json.decode(line, type=Event)
    except msgspec.MsgspecError as error:
        raise SourceLost(f"an event of the watch cannot be read: {error}") from None


def _status_message(body: bytes) -> str:
    """Of a `Status` document, which is how the API server says what is wrong."""
    with contextlib.suppress(msgspec.MsgspecError):
        document: Any = msgspec.json.decode(body)
        if isinstance(document, dict) and isinstance(document.get("message"), str):
            return str(document["message"])
    return body_message(body) or ""
