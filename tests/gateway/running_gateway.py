"""A gateway with servers behind it, all on one event loop and real loopback sockets.

`Upstream` is a scripted OpenAI-compatible server: tests turn its screws (`status`, `hang`, `break_after`, …) and read
what it was sent. `running_gateway` runs one gateway in front of several of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import msgspec

from tonle.config.gateway import GatewayConfig
from tonle.config.routing import BackendConfig
from tonle.edge import listening
from tonle.edge.exchange import Exchange
from tonle.edge.listening import bind, local_url
from tonle.edge.server import HttpServer, ServerLimits
from tonle.gateway.gateway import Gateway

KEY, ADMIN = "key-for-tests", "admin-for-tests"
CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


class Upstream:
    def __init__(self, *models: str, owned_by: str = "unknown") -> None:
        self.models = list(models)
        self.owned_by = owned_by
        self.words = ["Phnom", " Penh", "."]
        self.status = 200
        self.locked = False  # needs a key that no caller has
        self.hang = asyncio.Event()  # while not set, nothing is answered
        self.hang.set()
        self.pause_after: int | None = None  # words of a stream, then `resume` is awaited
        self.resume = asyncio.Event()
        self.break_after: int | None = None  # words of a stream, then the connection is cut
        self.stream_error = ""  # what a stream ends with, after its first word
        self.poison = ""  # what becomes of requests that say "poison": an answer "500", a "cut" connection, a "hang"
        self.kv_params: dict[str, Any] | None = None  # of a prefill server's answer
        self.extra_headers: list[tuple[str, str]] = []  # of whole answers and of the list of models
        self.warnings: list[dict[str, str]] = []  # of its answers, as a Tonle replica gives them
        self.adapters: dict[str, str] = {}  # name -> folder, loaded with vLLM's endpoints
        self.digests: dict[str, str] | None = None  # of a Tonle replica: folder -> digest of what it holds
        self.changes: list[dict[str, Any]] = []  # bodies of loads, and of unloads
        self.refuse_change = ""  # the path of changes that it refuses
        self.refuse_status, self.refuse_words = 400, "layers.3.mlp.up_proj.lora_B.weight has the wrong shape"
        self.metrics: str | None = None  # the text of /metrics; None: there is none
        self.metrics_keys: list[str] = []  # with which it was asked for
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.num_hangups = 0
        self.server = HttpServer(self._handle, ServerLimits())
        self.url = ""

    async def start(self) -> None:
        listener = bind("127.0.0.1", 0)
        await self.server.start(listener)
        self.url = local_url(*listener.getsockname()[:2])

    async def stop(self) -> None:
        await self.server.stop(drain_s=0)

    async def kill(self) -> None:
        """As if its process had died: connections are cut, new ones refused."""
        for connection in list(self.server.connections):
            connection.abort()
        await self.server.stop(drain_s=0)

    async def _handle(self, exchange: Exchange) -> None:
        if exchange.path == "/v1/models" and self.locked:
            exchange.reply(b"{}", status=401)
            return
        if exchange.path == "/v1/models":
            data: list[dict[str, Any]] = [
                {"id": name, "object": "model", "owned_by": self.owned_by} for name in self.models
            ]
            data += [self._listed(name) for name in self.adapters]
            exchange.reply(msgspec.json.encode({"object": "list", "data": data}), headers=self.extra_headers)
            return
        if exchange.path == "/metrics":
            self.metrics_keys.append(exchange.header("authorization"))
            exchange.reply((self.metrics or "").encode(), content_type="text/plain",
                           status=404 if self.metrics is None else 200)  # fmt: skip
            return
        body = json.loads(exchange.body)
        if exchange.path.endswith("_lora_adapter"):
            self._change(exchange, body)
            return
        if self.changes and body["model"] not in (*self.models, *self.adapters):
            exchange.reply(b'{"error": {"message": "The model does not exist."}}', status=404)
            return
        self.requests.append(body)
        self.headers.append(exchange.headers)
        poisoned = self.poison if b"poison" in exchange.body else ""
        try:
            await (asyncio.Event().wait() if poisoned == "hang" else self.hang.wait())
            if poisoned == "cut":
                exchange._line.abort()  # type: ignore[attr-defined]
            elif self.status != 200 or poisoned:
                error = {"error": {"message": "broken on purpose", "type": "server_error"}}
                exchange.reply(msgspec.json.encode(error), status=500 if poisoned else self.status)
            elif body.get("stream"):
                await self._stream(exchange, body)
            else:
                headers = [*self._warning_headers(), *self._adapter_headers(body), *self.extra_headers]
                exchange.reply(msgspec.json.encode(self._whole(body)), headers=headers)
        except asyncio.CancelledError:
            self.num_hangups += 1
            raise

    def _whole(self, body: dict[str, Any]) -> dict[str, Any]:
        reply = {
            "id": f"chatcmpl-{len(self.requests)}", "object": "chat.completion", "created": 1, "model": body["model"],
            "choices": [{"index": 0, "message": {"role": "assistant", "content": "".join(self.words)},
                         "finish_reason": "stop"}],
            "usage": self._usage(),
        }  # fmt: skip
        reply |= {"warnings": self.warnings} if self.warnings else {}
        return reply | ({"kv_transfer_params": self.kv_params} if self.kv_params else {})

    def _warning_headers(self) -> list[tuple[str, str]]:
        names = ", ".join(warning["param"] for warning in self.warnings)
        return [("x-tonle-warnings", f"{len(self.warnings)}; {names}")] if self.warnings else []

    def _listed(self, name: str) -> dict[str, Any]:
        folder = self.adapters[name]
        entry = {"id": name, "root": folder, "parent": self.models[0], "owned_by": self.owned_by}
        return entry if self.digests is None else entry | {"digest": self.digests[folder]}

    def _adapter_headers(self, body: dict[str, Any]) -> list[tuple[str, str]]:
        folder = self.adapters.get(body["model"])
        if folder is None or self.digests is None:
            return []
        return [("x-tonle-adapter", f"{body['model']}@sha256:{self.digests[folder]}")]

    def _change(self, exchange: Exchange, body: dict[str, Any]) -> None:
        """Load or unload, with vLLM's replies."""
        name, loads = body["lora_name"], exchange.path == "/v1/load_lora_adapter"
        self.changes.append(body)
        problem, status = "", 400
        if self.refuse_change == exchange.path:
            problem, status = self.refuse_words, self.refuse_status
        elif loads and name in self.adapters and not body.get("load_inplace"):
            problem = f"The lora adapter '{name}' has already been loaded."
        elif not loads and name not in self.adapters:
            problem, status = f"The lora adapter '{name}' cannot be found.", 404
        if problem:
            exchange.reply(msgspec.json.encode({"error": {"message": problem}}), status=status)
            return
        self.adapters.pop(name, None)
        if loads:
            self.adapters[name] = body["lora_path"]
        done = f"Success: LoRA adapter '{name}' {'added' if loads else 'removed'} successfully."
        exchange.reply(done.encode(), content_type="text/plain", headers=self._adapter_headers({"model": name}))

    def _usage(self) -> dict[str, int]:
        return {"prompt_tokens": 7, "completion_tokens": len(self.words), "total_tokens": 7 + len(self.words)}

    async def _stream(self, exchange: Exchange, body: dict[str, Any]) -> None:
        head = {"id": f"chatcmpl-{len(self.requests)}", "object": "chat.completion.chunk", "created": 1,
                "model": body["model"]}  # fmt: skip
        headers = [*self._warning_headers(), *self._adapter_headers(body)]
        exchange.start(content_type="text/event-stream", headers=headers)
        for index, word in enumerate(self.words):
            if index == self.pause_after:
                await self.resume.wait()
            if index == self.break_after:
                exchange._line.abort()  # type: ignore[attr-defined]
                return
            if index and self.stream_error:
                exchange.write(b"data: %b\n\n" % msgspec.json.encode({"error": {"message": self.stream_error}}))
                break
            done = "stop" if index == len(self.words) - 1 else None
            choice = {"index": 0, "delta": {"content": word}, "finish_reason": done}
            told = {"warnings": self.warnings} if self.warnings and not index else {}
            exchange.write(b"data: %b\n\n" % msgspec.json.encode(head | {"choices": [choice]} | told))
            await asyncio.sleep(0)
        if (body.get("stream_options") or {}).get("include_usage"):
            exchange.write(b"data: %b\n\n" % msgspec.json.encode(head | {"choices": [], "usage": self._usage()}))
        exchange.write(b"data: [DONE]\n\n")
        exchange.end()


class RunningGateway:
    def __init__(self, gateway: Gateway, client: httpx.AsyncClient, audit_dir: Path, listener_url: str) -> None:
        self.gateway = gateway
        self.client = client
        self.audit_dir = audit_dir
        self.url = listener_url

    async def ask(self, text: str = "What is the capital?", *, key: str = KEY, path: str = CHAT,
                  headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:  # fmt: skip
        body = {"model": "m", "messages": [{"role": "user", "content": text}], **fields}
        return await self.client.post(path, json={name: value for name, value in body.items() if value is not None},
                                      headers=({"authorization": f"Bearer {key}"} if key else {}) | (headers or {}))  # fmt: skip

    async def get(self, path: str, *, key: str = ADMIN) -> httpx.Response:
        return await self.client.get(path, headers={"authorization": f"Bearer {key}"})

    async def post(self, path: str, body: Any = None, *, key: str = ADMIN) -> httpx.Response:
        return await self.client.post(path, json=body, headers={"authorization": f"Bearer {key}"})

    def records(self) -> list[dict[str, Any]]:
        """By time of arrival; only after the gateway has stopped are all of them there."""
        return read_records(self.audit_dir)


def read_records(audit_dir: Path) -> list[dict[str, Any]]:
    files = [path for path in audit_dir.glob("*/*.json") if path.name != "head.json"]
    return sorted((json.loads(path.read_text()) for path in files), key=lambda record: record["time"])


def rows(*upstreams: Upstream, **fields: Any) -> tuple[BackendConfig, ...]:
    return tuple(
        BackendConfig(url=upstream.url, name=f"b{index}", **fields) for index, upstream in enumerate(upstreams)
    )


@contextlib.asynccontextmanager
async def running_gateway(folder: Path, *upstreams: Upstream, backends: Callable[[], tuple[BackendConfig, ...]] | None = None,
               **settings: Any) -> AsyncIterator[RunningGateway]:  # fmt: skip
    """Started upstreams and a gateway. Leaving stops all; then the records are complete."""
    for upstream in upstreams:
        await upstream.start()
    found = backends() if backends is not None else rows(*upstreams)
    config = GatewayConfig(**{
        "backends": found, "api_key": (KEY,), "admin_key": (ADMIN,), "audit_dir": str(folder / "audit"),
        "state_db": str(folder / "state.db"), "drain_s": 5.0, "probe_interval_s": 30.0, "port": 0, **settings,
    })  # fmt: skip
    config.validate()
    gateway = Gateway(config)
    listener = bind("127.0.0.1", 0)
    await gateway.start(listener)
    url = local_url(*listener.getsockname()[:2])
    try:
        async with httpx.AsyncClient(base_url=url, timeout=240) as client:
            yield RunningGateway(gateway, client, folder / "audit", url)
    finally:
        await gateway.stop()
        for upstream in upstreams:
            await upstream.stop()


def run(main: Awaitable[None], *, runner: Callable[[Coroutine[Any, Any, None]], None] = listening.run) -> None:
    """On uvloop, as in production, unless `runner` says otherwise."""

    async def bounded() -> None:
        async with asyncio.timeout(280):
            await main

    runner(bounded())


async def until(condition: Callable[[], object], what: str) -> None:
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(what)
