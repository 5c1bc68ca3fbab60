"""`GatewayAdmin`: the admin API of one gateway, typed.

Does: ask, and say in plain words what went wrong. Does not: decide what to ask, or try again.
"""

from __future__ import annotations

from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from tonle.edge.buffered_reply import fetch
from tonle.edge.client import Address, HttpClient, UpstreamError
from tonle.errors import CallerError, NotFound
from tonle.observe.backend_figures import Figures
from tonle.protocol.replies import body_message

TIMEOUT_S = 15.0  # a probe of a server that hangs takes five

AnswerT = TypeVar("AnswerT")


class GatewayBackend(msgspec.Struct, frozen=True):
    """A backend as its gateway shows it; further fields are passed over."""

    name: str
    url: str
    models: tuple[str, ...] = ()
    available: bool = False
    unhealthy_reason: str | None = None
    draining: bool = False
    leaving: bool = False
    breaker: str = "closed"
    share: float | None = None
    running: int = 0
    waiting: int = 0

    @property
    def is_idle(self) -> bool:
        return self.running + self.waiting == 0

    @property
    def trouble(self) -> str | None:
        """Why it gets no requests, or None."""
        if self.unhealthy_reason is not None:
            return self.unhealthy_reason
        return "it failed several times in a row and is paused" if self.breaker == "open" else None


class _Backends(msgspec.Struct):
    backends: list[GatewayBackend]


class _AllFigures(msgspec.Struct):
    backends: dict[str, Figures]


class GatewayAdmin:
    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        """`url` with or without http://."""
        self.address = Address.parse(url, scheme="http")
        self._client = HttpClient(self.address, api_key=api_key)

    def close(self) -> None:
        self._client.close()

    async def backends(self) -> list[GatewayBackend]:
        return (await self._ask("GET", "/admin/backends", _Backends)).backends

    async def figures(self) -> dict[str, Figures]:
        """By backend, since the gateway's start."""
        return (await self._ask("GET", "/admin/backends/figures", _AllFigures)).backends

    async def drain(self, name: str) -> GatewayBackend:
        return await self._act(name, "drain")

    async def resume(self, name: str) -> GatewayBackend:
        return await self._act(name, "resume")

    async def probe(self, name: str) -> GatewayBackend:
        """Have the gateway ask it now."""
        return await self._act(name, "probe")

    async def set_share(self, name: str, share: float | None) -> GatewayBackend:
        return await self._ask("PATCH", _path(name), GatewayBackend, {"share": share})

    async def add(self, url: str, name: str, *, like: str, share: float | None) -> GatewayBackend:
        """What is not said is as the backend `like` has it, its key too."""
        body = {"url": url, "name": name, "share": share}
        return await self._ask("POST", f"/admin/backends?like={quote(like, safe='')}", GatewayBackend, body)

    async def remove(self, name: str) -> GatewayBackend:
        """It is gone when what runs there has ended."""
        return await self._ask("DELETE", _path(name), GatewayBackend)

    async def _act(self, name: str, action: str) -> GatewayBackend:
        return await self._ask("POST", f"{_path(name)}/{action}", GatewayBackend)

    async def _ask(
        self, method: str, path: str, answer_type: type[AnswerT], body: dict[str, Any] | None = None
    ) -> AnswerT:
        """Raises `CallerError`, or `NotFound` for a backend that is not there."""
        content = b"" if body is None else msgspec.json.encode(body)
        try:
            request = self._client.request(method, path, content, {})
            reply = await fetch(self._client, request, timeout_s=TIMEOUT_S)
        except UpstreamError as error:
            raise CallerError(f"no gateway answers at {self.address}: {error}") from error
        if reply.status in (401, 403):
            raise CallerError(
                f"{self.address} refuses the key ({body_message(reply.body) or reply.status}); give one with scope admin: "
                "--api-key, or the variable TONLE_ADMIN_KEY"
            )
        if reply.status == 404:
            raise NotFound(f"{self.address}: {body_message(reply.body) or 'not found'}")
        if not 200 <= reply.status < 300:
            raise CallerError(
                f"{self.address} answered {reply.status}: {body_message(reply.body) or 'no reason given'}"
            )
        try:
            return msgspec.json.decode(reply.body or b"null", type=answer_type)
        except msgspec.MsgspecError as error:
            raise CallerError(f"{self.address} is no gateway of this version: {path}: {error}") from None


def _path(name: str) -> str:
    return f"/admin/backends/{quote(name, safe=':/')}"
