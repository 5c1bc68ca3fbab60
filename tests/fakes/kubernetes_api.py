"""A small API server of Kubernetes: EndpointSlices with resource versions, watches, bookmarks and 410, and pods.

It answers as the real one does to the calls that discovery makes: lists carry the version they are of, a watch sends what changed
since, a version that was compacted away is answered with 410, and every call needs the bearer token.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from typing import Any
from urllib.parse import parse_qs

from tonle.edge.exchange import Exchange
from tonle.edge.listening import bind, local_url
from tonle.edge.server import HttpServer, ServerLimits

NAMESPACE, SERVICE = "models", "llm"
SLICES = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods/"


def endpoint(address: str, pod: str | None = None, **conditions: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"addresses": [address], "conditions": {"ready": True, "serving": True, **conditions}}
    if pod is not None:
        found["targetRef"] = {"kind": "Pod", "namespace": NAMESPACE, "name": pod, "uid": f"uid-{pod}-{address}"}
    return found


def slice_of(
    *endpoints: dict[str, Any], ports: tuple[tuple[str, int], ...] = (("http", 8000),), family: str = "IPv4"
) -> dict[str, Any]:
    return {
        "addressType": family,
        "endpoints": list(endpoints),
        "ports": [{"name": name, "port": port, "protocol": "TCP"} for name, port in ports],
    }


class FakeKubernetes:
    def __init__(self) -> None:
        self.token = "token-1"
        self.version = 100
        self.oldest = 0  # changes before it were compacted away
        self.slices: dict[str, dict[str, Any]] = {}
        self.history: list[tuple[int, str, dict[str, Any]]] = []
        self.pods: dict[str, dict[str, str]] = {}  # name -> labels
        self.pods_forbidden = False
        self.fail_with = 0  # the status of every list and watch
        self.calls: list[str] = []  # list, watch VERSION, pod NAME
        self._changed = asyncio.Event()
        self._cut = asyncio.Event()
        self.server = HttpServer(self._handle, ServerLimits())
        self.url = ""

    async def start(self, tls: ssl.SSLContext | None = None) -> None:
        listener = bind("127.0.0.1", 0)
        await self.server.start(listener, tls=tls)
        self.url = local_url(*listener.getsockname()[:2], tls=tls is not None)

    async def stop(self) -> None:
        self.end_watches()
        await self.server.stop(drain_s=0)

    # -- what happens in the cluster

    def put(self, name: str, content: dict[str, Any]) -> None:
        kind = "MODIFIED" if name in self.slices else "ADDED"
        self.slices[name] = content
        self._note(kind, name)

    def delete(self, name: str) -> None:
        self._note("DELETED", name)
        del self.slices[name]

    def compact(self) -> None:
        """Forget the history: a watch from before is answered with 410."""
        self.version += 10
        self.oldest = self.version
        self.history.clear()

    def bookmark(self) -> None:
        self.version += 7
        self.history.append(
            (self.version, "BOOKMARK", {"metadata": {"resourceVersion": str(self.version), "name": ""}})
        )
        self._wake()

    def error_event(self, code: int) -> None:
        self.version += 1
        self.history.append(
            (self.version, "ERROR", {"kind": "Status", "code": code, "message": "too old resource version"})
        )
        self._wake()

    def end_watches(self) -> None:
        """As the API server does after `timeoutSeconds`."""
        self._cut.set()
        self._cut = asyncio.Event()
        self._wake()

    def _note(self, kind: str, name: str) -> None:
        self.version += 1
        self.history.append((self.version, kind, self._document(name, self.version)))
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _document(self, name: str, version: int) -> dict[str, Any]:
        labels = {"kubernetes.io/service-name": SERVICE}
        meta = {"name": name, "namespace": NAMESPACE, "resourceVersion": str(version), "labels": labels}
        return {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "metadata": meta, **self.slices[name]}

    # -- HTTP

    async def _handle(self, exchange: Exchange) -> None:
        path, query = exchange.path, {name: values[0] for name, values in parse_qs(exchange.query).items()}
        if exchange.header("authorization") != f"Bearer {self.token}":
            _status(exchange, 401, "Unauthorized")
        elif path.startswith(PODS):
            self._pod(exchange, path.removeprefix(PODS))
        elif path != SLICES or query.get("labelSelector") != f"kubernetes.io/service-name={SERVICE}":
            _status(exchange, 404, f"nothing at {path}")
        elif self.fail_with:
            _status(exchange, self.fail_with, "on purpose")
        elif "watch" in query:
            await self._watch(exchange, int(query["resourceVersion"]))
        else:
            self.calls.append("list")
            items = [self._document(name, self.version) for name in self.slices]
            meta = {"resourceVersion": str(self.version)}
            exchange.reply(json.dumps({"kind": "EndpointSliceList", "metadata": meta, "items": items}).encode())

    def _pod(self, exchange: Exchange, name: str) -> None:
        self.calls.append(f"pod {name}")
        if self.pods_forbidden:
            _status(exchange, 403, f'pods "{name}" is forbidden')
        elif name not in self.pods:
            _status(exchange, 404, f'pods "{name}" not found')
        else:
            exchange.reply(json.dumps({"kind": "Pod", "metadata": {"name": name, "labels": self.pods[name]}}).encode())

    async def _watch(self, exchange: Exchange, version: int) -> None:
        self.calls.append(f"watch {version}")
        if version < self.oldest:
            _status(exchange, 410, f"too old resource version: {version} ({self.oldest})")
            return
        cut = self._cut
        exchange.start(content_type="application/json")
        while not cut.is_set():
            changed = self._changed
            for at, kind, document in self.history:
                if at > version:
                    line = json.dumps({"type": kind, "object": document}).encode() + b"\n"
                    exchange.write(line[: len(line) // 2])  # events come in any pieces
                    await asyncio.sleep(0)
                    exchange.write(line[len(line) // 2 :])
                    version = at
            await changed.wait()
        exchange.end()


def _status(exchange: Exchange, code: int, message: str) -> None:
    body = {"kind": "Status", "status": "Failure", "message": message, "code": code}
    exchange.reply(json.dumps(body).encode(), status=code)
