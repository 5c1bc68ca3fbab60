"""`Webhook`: one address that takes signed posts (Standard Webhooks).

Does: sign, post once, tell whether it was taken and whether to try again. Does not: retry, limit, or decide what to post.
The address is the operator's own setting; redirects are not followed.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import quote, urlsplit

from tonle.edge.buffered_reply import fetch
from tonle.edge.client import Address, HttpClient, UpstreamError
from tonle.errors import ConfigError

TIMEOUT_S = 10.0
MIN_KEY_BYTES = 8
_ENCODED_SECRET = "whsec_"
_RETRY = (408, 425, 429)  # besides 5xx
_URL_CHARACTERS = "/%:@!$&'()*+,;=~-._?"


class Delivery(NamedTuple):
    delivered: bool
    may_retry: bool = False
    problem: str = ""


class Webhook:
    """Use from one event loop."""

    def __init__(self, url: str, secret: str | None = None, *, now: Callable[[], float] = time.time) -> None:
        """Raises `ConfigError`."""
        try:
            address = Address.parse(url)
        except ConfigError as error:
            raise ConfigError(f"alert_webhook: {error.message}", param="alert_webhook") from None
        parts = urlsplit(url)
        self._path = quote(parts.path or "/", safe=_URL_CHARACTERS)
        if parts.query:
            self._path += "?" + quote(parts.query, safe=_URL_CHARACTERS)
        self._key = None if secret is None else signing_key(secret)
        self._client = HttpClient(dataclasses.replace(address, prefix=""))
        self._now = now
        self.place = address.netloc  # for the log: the rest of the address may be a secret

    def new_id(self) -> str:
        return f"msg_{secrets.token_hex(16)}"

    async def post(self, message_id: str, body: bytes) -> Delivery:
        """One try."""
        moment = int(self._now())
        headers = {"Webhook-Id": message_id, "Webhook-Timestamp": str(moment)}
        if self._key is not None:
            headers["Webhook-Signature"] = signature(self._key, message_id, moment, body)
        request = self._client.request("POST", self._path, body, headers)
        try:
            reply = await fetch(self._client, request, timeout_s=TIMEOUT_S)
        except UpstreamError as error:
            return Delivery(delivered=False, may_retry=True, problem=str(error))
        if 200 <= reply.status < 300:
            return Delivery(delivered=True)
        may_retry = reply.status >= 500 or reply.status in _RETRY
        where = "; redirects are not followed" if 300 <= reply.status < 400 else ""
        return Delivery(delivered=False, may_retry=may_retry, problem=f"it answers {reply.status}{where}")

    def close(self) -> None:
        self._client.close()


def signing_key(secret: str) -> bytes:
    """`whsec_` and base64, as many services print it, or any other text as it is. Raises `ConfigError`."""
    key = _decoded(secret)
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(f"alert_secret gives a key of {len(key)} bytes, which others can guess: it needs at least "
                          f"{MIN_KEY_BYTES} bytes, better 32", param="alert_secret")  # fmt: skip
    return key


def _decoded(secret: str) -> bytes:
    if not secret.startswith(_ENCODED_SECRET):
        return secret.encode()
    try:
        return base64.b64decode(secret.removeprefix(_ENCODED_SECRET), validate=True)
    except binascii.Error:
        raise ConfigError(
            "alert_secret begins with whsec_, but what follows is not base64", param="alert_secret"
        ) from None


def signature(key: bytes, message_id: str, timestamp: int, body: bytes) -> str:
    signed = f"{message_id}.{timestamp}.".encode() + body
    return f"v1,{base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()}"
