"""The routes of a replica, and nothing else.

Does: say which handler answers which path. Does not: handle.
"""

from __future__ import annotations

from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from tonle.replica import service
from tonle.replica.chat import chat
from tonle.replica.completions import completions
from tonle.replica.endpoint import Endpoint, Handler
from tonle.replica.options import ReplicaOptions
from tonle.replica.replica import Replica
from tonle.replica.served import Served


class ReplicaApp:
    """The ASGI application. `replica.draining` closes it to new work."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica

        def route(path: str, *, id_prefix: str = "req", quiet: bool = False, **methods: Handler) -> Route:
            return Route(path, Endpoint(replica, path, methods, id_prefix=id_prefix, quiet=quiet))

        self.routes = [
            route("/v1/chat/completions", POST=chat, id_prefix="chatcmpl"),
            route("/v1/completions", POST=completions, id_prefix="cmpl"),
            route("/v1/models", GET=service.models),
            route("/v1/models/{id:path}", GET=service.model),
            route("/tokenize", POST=service.tokenize),
            route("/detokenize", POST=service.detokenize),
            route("/health", GET=service.health, quiet=True),
            route("/health/live", GET=service.live, quiet=True),
            route("/health/ready", GET=service.ready, quiet=True),
            route("/metrics", GET=service.metrics, quiet=True),
            route("/version", GET=service.version, quiet=True),
            route("/docs", GET=service.docs, quiet=True),
            route("/openapi.json", GET=service.openapi_json, quiet=True),
        ]
        nothing_here = Endpoint(replica, "other", {})
        self._router = Router(self.routes, redirect_slashes=False, default=nothing_here)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._router(scope, receive, send)


def build_app(front: Served, options: ReplicaOptions | None = None) -> ReplicaApp:
    """The ASGI application that serves `front`."""
    return ReplicaApp(Replica(front, options or ReplicaOptions()))
