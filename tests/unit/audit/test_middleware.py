"""The middleware around a scripted server, and around our own replica: one record per request, nothing delayed."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.asgi import Call, replica_app
from tests.fakes.front import FakeFront
from tests.http.serving import events
from tests.unit.audit.test_collect import DONE, USAGE, USAGE_CHUNK, chunk
from tests.unit.audit.trails import records, wait_for
from tonle.audit import AuditMiddleware, AuditOptions
from tonle.audit.audit_options import from_environ
from tonle.audit.verify import verify
from tonle.errors import ConfigError

CHAT = "/v1/chat/completions"
ASK = {"model": "river", "messages": [{"role": "user", "content": "hi"}]}
App = Callable[..., Awaitable[None]]


def wrap(app: App, directory: Path, **options: Any) -> AuditMiddleware:
    defaults = {"linger_s": 0.0, "fsync": "never", "min_free_bytes": 0}
    return AuditMiddleware(app, AuditOptions(directory=directory, **(defaults | options)))


class Server:
    """A scripted server: what it sends, piece by piece, and what it was asked."""

    def __init__(self, *pieces: bytes, status: int = 200, content_type: str = "text/event-stream") -> None:
        self.pieces = pieces
        self.status = status
        self.content_type = content_type
        self.asked: list[Any] = []
        self.headers: list[dict[bytes, bytes]] = []
        self.fails_after: int | None = None
        self.models: Any = None
        self.num_listings = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            if not message.get("more_body"):
                break
        if scope["path"] == "/v1/models":
            self.num_listings += 1
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": json.dumps(self.models or {"data": []}).encode()})
            return
        self.asked.append(body)
        self.headers.append(dict(scope["headers"]))
        headers = [(b"content-type", self.content_type.encode())]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        for number, piece in enumerate(self.pieces):
            if number == self.fails_after:
                raise RuntimeError("the engine fell over")
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def call(app: Any, body: Any = ASK, path: str = CHAT, **more: Any) -> Call:
    exchange = Call(path, body, **more)

    async def run() -> None:
        await asyncio.wait_for(exchange.run(app), 120)

    asyncio.run(run())
    return exchange


def whole_reply(text: str = "hey") -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return json.dumps({"id": "c-1", "model": "river", "choices": [choice], "usage": USAGE}).encode()


def test_a_whole_answer(tmp_path: Path) -> None:
    server = Server(whole_reply(), content_type="application/json")
    app = wrap(server, tmp_path)
    reply = call(app, headers={"x-request-id": "mine"})
    assert reply.reply == whole_reply()
    app.close()
    [record] = records(tmp_path)
    assert (record["status"], record["http_status"], record["output"]) == ("ok", 200, "hey")
    assert (record["request_id"], record["response_id"], record["finish_reason"]) == ("mine", "c-1", "stop")
    assert record["usage"]["total_tokens"] == 8
    assert record["user_input"] == "hi"
    assert json.loads(server.asked[0]) == ASK
    assert verify(tmp_path).ok


@pytest.mark.parametrize("size", [1, 3, 50, 10_000])
def test_a_stream_whose_usage_the_caller_did_not_want(tmp_path: Path, size: int) -> None:
    plain = chunk("សួ") + chunk("ស្តី", finish="stop") + DONE
    told = chunk("សួ") + chunk("ស្តី", finish="stop") + USAGE_CHUNK + DONE
    server = Server(*[told[start : start + size] for start in range(0, len(told), size)])
    app = wrap(server, tmp_path)
    reply = call(app, ASK | {"stream": True})
    assert reply.reply == plain
    app.close()
    assert json.loads(server.asked[0])["stream_options"] == {"include_usage": True}
    assert int(server.headers[0][b"content-length"]) == len(server.asked[0])
    [record] = records(tmp_path)
    assert record["output"] == "សួស្តី"
    assert record["usage"]["completion_tokens"] == 3
    assert record["stream"] is True
    assert "stream_options" not in (record["parameters"] or {}), (
        "what the caller sent is on record, not what we made of it"
    )


@pytest.mark.parametrize("options", [{"inject_usage": False}, {}])
def test_a_stream_passes_untouched(tmp_path: Path, options: dict[str, Any]) -> None:
    told = chunk("a") + chunk("b", finish="stop") + USAGE_CHUNK + DONE
    body = ASK | {"stream": True} | ({} if options else {"stream_options": {"include_usage": True}})
    server = Server(*[told[start : start + 5] for start in range(0, len(told), 5)])
    app = wrap(server, tmp_path, **options)
    assert call(app, body).reply == told
    app.close()
    assert json.loads(server.asked[0]) == body
    assert records(tmp_path)[0]["usage"]["total_tokens"] == 8


def test_each_piece_is_passed_on_before_the_next_is_made(tmp_path: Path) -> None:
    seen: list[bytes] = []

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for text in "abc":
            await send({"type": "http.response.body", "body": chunk(text), "more_body": True})
            assert seen[-1] == chunk(text)
        await send({"type": "http.response.body", "body": DONE})

    async def main() -> None:
        exchange = Call(CHAT, ASK | {"stream": True})

        async def send(message: Any) -> None:
            seen.append(message.get("body", b""))

        scope = {"type": "http", "method": "POST", "path": CHAT, "headers": []}
        await app(scope, exchange.receive, send)

    app = wrap(slow, tmp_path)
    asyncio.run(main())
    app.close()
    assert records(tmp_path)[0]["output"] == "abc"


@pytest.mark.parametrize(
    ("http_status", "status"), [(401, "refused"), (400, "refused"), (503, "refused"), (500, "failed")]
)
def test_refusals_and_failures_are_on_record(tmp_path: Path, http_status: int, status: str) -> None:
    server = Server(b'{"error": {"message": "no"}}', status=http_status, content_type="application/json")
    app = wrap(server, tmp_path)
    call(app)
    app.close()
    [record] = records(tmp_path)
    assert (record["status"], record["http_status"], record["error"]) == (status, http_status, {"message": "no"})
    assert record["messages"] == ASK["messages"], "also of a caller without a key"


def test_a_server_that_raises(tmp_path: Path) -> None:
    server = Server(chunk("par"), chunk("tial"))
    server.fails_after = 1
    app = wrap(server, tmp_path)
    with pytest.raises(RuntimeError, match="fell over"):
        call(app, ASK | {"stream": True})
    app.close()
    [record] = records(tmp_path)
    assert (record["status"], record["output"]) == ("failed", "par")
    assert record["error"]["type"] == "RuntimeError"


def test_an_error_told_in_a_stream_is_a_failure(tmp_path: Path) -> None:
    app = wrap(Server(chunk("par"), b'data: {"error": {"message": "gone"}}\n\n', DONE), tmp_path)
    call(app, ASK | {"stream": True})
    app.close()
    assert records(tmp_path)[0]["status"] == "failed"


@pytest.mark.parametrize("how", ["disconnect", "send fails", "before the body"])
def test_a_caller_who_leaves(tmp_path: Path, how: str) -> None:
    async def server(scope: Any, receive: Any, send: Any) -> None:
        if (await receive())["type"] == "http.disconnect":
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": chunk("partial"), "more_body": True})
        if how == "send fails":
            await send({"type": "http.response.body", "body": chunk("more"), "more_body": True})
        assert (await receive())["type"] == "http.disconnect"

    class Leaving(Call):
        async def send(self, message: Any) -> None:
            await super().send(message)
            if how == "send fails" and len(self.sent) == 3:
                raise OSError("the socket is closed")

    async def main() -> None:
        exchange = Leaving(CHAT, None if how == "before the body" else ASK | {"stream": True})
        exchange.hangup.set()
        try:
            await exchange.run(app)
        except OSError:
            assert how == "send fails"

    app = wrap(server, tmp_path)
    asyncio.run(main())
    app.close()
    [record] = records(tmp_path)
    assert record["status"] == "cancelled"
    assert (
        record["output"] == {"disconnect": "partial", "send fails": "partial", "before the body": None}[how]
        or how == "send fails"
    )
    assert verify(tmp_path).ok


def test_a_server_that_is_shut_down(tmp_path: Path) -> None:
    async def server(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        task = asyncio.create_task(Call(CHAT, ASK).run(app))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    app = wrap(server, tmp_path)
    asyncio.run(main())
    app.close()
    assert [record["status"] for record in records(tmp_path)] == ["interrupted"]


@pytest.mark.parametrize(("method", "path"), [("GET", CHAT), ("POST", "/tokenize"), ("POST", "/v1/embeddings")])
def test_what_generates_nothing_is_not_recorded(tmp_path: Path, method: str, path: str) -> None:
    app = wrap(Server(b"{}"), tmp_path)
    call(app, path=path, method=method)
    app.close()
    assert not (tmp_path / "open").exists()
    assert records(tmp_path) == []


def test_a_body_that_is_too_large_is_passed_on_and_not_recorded_whole(tmp_path: Path) -> None:
    server = Server(whole_reply(), content_type="application/json")
    app = wrap(server, tmp_path, max_body_bytes=10)
    body = b'{"messages": [' + b" " * 100 + b"]}"
    call(app, body)
    app.close()
    assert server.asked == [body]
    [record] = records(tmp_path)
    assert record["messages"] is None
    assert "only its beginning is recorded" in record["warnings"][0]


def test_model_configuration_and_adapter_come_from_the_server(tmp_path: Path) -> None:
    server = Server(whole_reply(), content_type="application/json")
    entry = {"id": "river", "root": "/models/river", "parent": "base", "max_model_len": 512}
    server.models = {"data": [entry]}
    app = wrap(server, tmp_path)
    call(app)
    call(app)
    app.close()
    assert server.num_listings == 1
    for record in records(tmp_path):
        assert record["model_config"] == {"root": "/models/river", "parent": "base", "max_model_len": 512}
        assert record["adapter"] == "river"


def test_a_disk_that_is_full_is_told_to_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tonle.audit.trail.CHECK_S", 0.01)
    server = Server(whole_reply(), content_type="application/json")
    app = wrap(server, tmp_path, min_free_bytes=1 << 62)  # no disk has that much
    call(app)  # not checked yet
    wait_for(lambda: app.trail.stats.failing)
    reply = call(app)
    assert reply.status == 503
    assert json.loads(reply.reply)["error"]["code"] == "overloaded"
    assert len(server.asked) == 1
    app.close()


def test_the_environment_configures_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TONLE_AUDIT_DIR", str(tmp_path / "audit"))
    monkeypatch.setenv("TONLE_AUDIT_REDACT", "email, phone")
    monkeypatch.setenv("TONLE_AUDIT_FSYNC", "always")
    monkeypatch.setenv("TONLE_AUDIT_MIN_FREE", "0")
    monkeypatch.setenv("TONLE_AUDIT_KEY_FILE", str(tmp_path / "key"))
    app = AuditMiddleware(Server(whole_reply("I am x@y.org"), content_type="application/json"))
    call(app)
    app.close()
    assert records(tmp_path / "audit")[0]["output"] == "I am [email]"
    assert verify(tmp_path / "audit", key_file=tmp_path / "key").ok


@pytest.mark.parametrize(
    "wrong", [{"TONLE_AUDIT_DIRECTORY": "x"}, {"TONLE_AUDIT_FSYNC": "often"}, {"TONLE_AUDIT_MAX_QUEUE": "0"}]
)
def test_a_wrong_environment_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="TONLE_AUDIT_"):
        from_environ(wrong)


def test_it_begins_and_ends_with_the_server(tmp_path: Path) -> None:
    sent: list[str] = []

    async def server(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "lifespan.startup.complete"})
        assert (tmp_path / "open").exists()
        await send({"type": "lifespan.shutdown.complete"})

    async def send(message: Any) -> None:
        sent.append(message["type"])

    app = wrap(server, tmp_path)
    asyncio.run(app({"type": "lifespan"}, None, send))  # type: ignore[arg-type]
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert not list((tmp_path / "open").iterdir())


# -- around our own replica


def test_around_a_replica(tmp_path: Path) -> None:
    front = FakeFront(lambda prompt, index: "សួស្តី!")
    app = wrap(replica_app(front), tmp_path)
    body = {
        "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}],
        "max_tokens": 64,
    }
    with_stream = call(app, body | {"stream": True})
    chunks = events(with_stream.reply.decode())
    assert all("usage" not in chunk for chunk in chunks[:-1]), "as if usage had not been asked for"
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1]) == "សួស្តី!"
    call(app, body)
    call(app, {"prompt": "hi", "max_tokens": 8}, path="/v1/completions")
    call(app, {"messages": "wrong"})
    front.die_after = 3
    call(app, body | {"stream": True})
    app.close()
    found = records(tmp_path)
    assert [record["status"] for record in found] == ["ok", "ok", "ok", "refused", "failed"]
    assert [record["http_status"] for record in found] == [200, 200, 200, 400, 200]
    assert found[0]["output"] == found[1]["output"] == "សួស្តី!"
    assert found[0]["usage"] == found[1]["usage"]
    assert found[0]["usage"]["completion_tokens"] > 0
    assert found[0]["latency_ms"]["ttft"] is not None
    assert found[2]["endpoint"] == "/v1/completions"
    assert verify(tmp_path).ok


def test_a_caller_who_hangs_up_on_a_replica(tmp_path: Path) -> None:
    class Impatient(Call):
        async def send(self, message: Any) -> None:
            await super().send(message)
            if len(self.sent) == 4:
                self.hangup.set()

    front = FakeFront(lambda prompt, index: "a long story")
    front.stall_after = 8
    app = wrap(replica_app(front), tmp_path)

    async def main() -> None:
        exchange = Impatient(CHAT, {"messages": [{"role": "user", "content": "hi"}], "stream": True})
        await asyncio.wait_for(exchange.run(app), 120)

    asyncio.run(main())
    app.close()
    [record] = records(tmp_path)
    assert record["status"] == "cancelled"
    assert record["output"], "what was written until then"


class Doorman:
    """A server that refuses by the head alone, as vLLM's own check of keys does."""

    def __init__(self, status: int = 401) -> None:
        self.status = status

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


def test_a_body_the_server_does_not_read_is_not_held(tmp_path: Path) -> None:
    asked = 0

    async def receive() -> dict[str, Any]:
        nonlocal asked
        asked += 1
        return {"type": "http.request", "body": b"x" * 1000, "more_body": True}

    async def send(message: Any) -> None:
        pass

    app = wrap(Doorman(), tmp_path)
    headers = [(b"content-length", b"8000000")]
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": headers, "client": ("10.0.0.7", 1)}
    asyncio.run(app(scope, receive, send))
    app.close()
    assert asked == 0
    [record] = records(tmp_path)
    told = record["parameters"]["body"]
    assert (record["status"], told["declared_bytes"], told["received_bytes"]) == ("refused", 8_000_000, 0)


def test_a_body_that_is_too_large_passes_and_is_summarized(tmp_path: Path) -> None:
    server = Server(whole_reply(), content_type="application/json")
    app = wrap(server, tmp_path, max_body_bytes=10_000)
    pieces = [bytes([65 + number]) * 4000 for number in range(10)]
    sent = list(pieces)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": sent.pop(0), "more_body": bool(sent)}

    async def send(message: Any) -> None:
        pass

    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "client": ("10.0.0.7", 1)}
    asyncio.run(app(scope, receive, send))
    app.close()
    body = b"".join(pieces)
    assert server.asked == [body]
    [record] = records(tmp_path)
    assert record["parameters"]["body"] == {
        "declared_bytes": None,
        "received_bytes": len(body),
        "sha256": hashlib.sha256(body).hexdigest(),
        "first": "A" * 2048,
    }


def test_callers_that_are_not_admitted_are_counted_beyond_the_cap(tmp_path: Path) -> None:
    app = wrap(Doorman(), tmp_path, refused_per_address=0)
    for _ in range(3):
        call(app)
    app.close()
    assert not records(tmp_path)
    assert "3 refused requests" in verify(tmp_path).notes[0]


@pytest.mark.parametrize("depth", [900, 985, 990, 5000])
def test_a_deep_body_is_on_record(tmp_path: Path, depth: int) -> None:
    app = wrap(Server(whole_reply(), content_type="application/json"), tmp_path)
    deep = b'{"model":"m","x":' + b"[" * depth + b"]" * depth + b"}"

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": deep, "more_body": False}

    async def send(message: Any) -> None:
        pass

    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "client": ("10.0.0.7", 1)}
    asyncio.run(app(scope, receive, send))
    app.close()
    [record] = records(tmp_path)
    assert (record["status"], record["output"]) == ("ok", "hey")
