"""`RemoteServer`: the OpenAI-compatible server at --url, for `tonle chat`, `tonle backends` and others.

Does: send, and say in the words of the command line what went wrong and what to do about it. Does not: read answers; use
proxies: it connects directly, whatever HTTP_PROXY and HTTPS_PROXY say.
"""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

import msgspec

from tonle.edge.buffered_reply import BufferedReply, fetch
from tonle.edge.client import Address, HttpClient, UpstreamError
from tonle.edge.streamed_reply import StreamedReply, stream
from tonle.errors import CallerError, InternalError, InvalidRequest, TonleError
from tonle.protocol.replies import body_message

_CONNECT_TIMEOUT_S = 10.0
_PROXY_VARIABLES = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


class RemoteServer:
    """Use from one event loop, which need not run between two requests."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        """`url` with or without http:// and /v1."""
        self.address = Address.parse(url, scheme="http")
        self._has_key = bool(api_key)
        self._client = HttpClient(self.address, api_key=api_key, connect_timeout_s=_CONNECT_TIMEOUT_S)

    async def get(self, path: str, *, timeout_s: float) -> BufferedReply:
        """The answer, of any status. Raises `CallerError` if there is no server, `InternalError` if it breaks off."""
        return await self._fetch(self._client.request("GET", path, b"", {}), timeout_s)

    async def post(self, path: str, body: dict[str, Any], *, timeout_s: float) -> BufferedReply:
        """As `get`."""
        return await self._fetch(self._post(path, body), timeout_s)

    async def delete(self, path: str, *, timeout_s: float) -> BufferedReply:
        """As `get`."""
        return await self._fetch(self._client.request("DELETE", path, b"", {}), timeout_s)

    async def patch(self, path: str, body: dict[str, Any], *, timeout_s: float) -> BufferedReply:
        """As `get`."""
        return await self._fetch(self._client.request("PATCH", path, msgspec.json.encode(body), {}), timeout_s)

    async def _fetch(self, request: bytes, timeout_s: float) -> BufferedReply:
        try:
            return await fetch(self._client, request, timeout_s=timeout_s)
        except UpstreamError as error:
            raise self._explain(error) from error

    @asynccontextmanager
    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[StreamedReply]:
        """As `post`, to be read as it arrives. No limit on time: a long prompt takes long, and the user has Ctrl-C."""
        request = self._post(path, body)
        try:
            async with stream(self._client, request, first_s=math.inf, silence_s=math.inf) as reply:
                yield reply
        except UpstreamError as error:
            raise self._explain(error) from error

    def _post(self, path: str, body: dict[str, Any]) -> bytes:
        try:
            return self._client.request("POST", path, msgspec.json.encode(body), {})
        except UnicodeEncodeError:
            raise InvalidRequest("the message contains bytes that are not UTF-8") from None

    def close(self) -> None:
        self._client.close()

    def refusal(self, reply: BufferedReply | StreamedReply, body: bytes) -> CallerError:
        """What to tell the user about an answer that is not 200."""
        message = body_message(body) or _phrase(reply.status)
        if reply.status == HTTPStatus.UNAUTHORIZED:
            what = "refuses the API key" if self._has_key else "needs an API key"
            return CallerError(f"{self.address} {what} ({message}). Give one with --api-key or OPENAI_API_KEY.")
        if HTTPStatus.MULTIPLE_CHOICES <= reply.status < HTTPStatus.BAD_REQUEST and "location" in reply.headers:
            return CallerError(
                f"{self.address} redirects to {reply.headers['location']}; give that address with --url."
            )
        return CallerError(f"the server answered {reply.status}: {message}")

    def not_openai(self, detail: str) -> CallerError:
        return CallerError(f"{self.address} is not an OpenAI-compatible server: {detail}")

    def _explain(self, error: UpstreamError) -> TonleError:
        if error.kind == "unreadable answer":
            tls = "" if self.address.tls else f". If it uses TLS, give its address as https://{self.address.netloc}"
            return self.not_openai(f"{error}{tls}")
        if error.sent:
            return InternalError(f"the connection to {self.address} broke: {error}")
        return CallerError(f"no server answers at {self.address} ({error}). {self._advice(error)}")

    def _advice(self, error: UpstreamError) -> str:
        proxies = [name for name in _PROXY_VARIABLES if os.environ.get(name)]
        if error.kind == "host not found":
            advice = "Is the host name right?"
        elif error.kind == "TLS error" and "CERTIFICATE_VERIFY_FAILED" in str(error):
            advice = "If its certificate is signed by an authority of your own, name that one's file in SSL_CERT_FILE."
        elif error.kind == "TLS error":
            advice = f"Is it a server without TLS? Then use http://{self.address.netloc}"
        else:
            advice = "Is it running?"
        if proxies and error.kind != "TLS error":
            advice += f" {proxies[0]} is set, but tonle connects directly."
        return advice


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "no reason given"
