"""Which HTTP server and client a proxy should be built on: CPU per request and per streamed chunk.

    python -m benchmarks.http_choice                                       # ours, uvicorn, httpx
    python -m benchmarks.http_choice --other-python /path/to/venv/bin/python # and aiohttp and granian of that environment

Servers answer the stub's answer and are called by our client; clients call the stub. 50 requests at a time. Every
candidate is a process of its own, started from this file, which therefore imports nothing of ours at the top.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

USERS = 50
NUM_WHOLE, NUM_STREAMS = 3000, 600
PATH = "/v1/chat/completions"
SERVERS = {"tonle": False, "uvicorn": False, "aiohttp": True, "granian": True}  # True: of the other environment
CLIENTS = {"tonle": False, "httpx": False, "aiohttp": True}
sys.path.insert(0, str(Path(__file__).parents[1]))


# -- servers


def serve(name: str, port: int) -> None:
    from benchmarks.gateway_stub import CHUNKS, END, MODELS, WHOLE, application

    if name == "tonle":
        from tonle.edge.interpreter import shorten_thread_switches
        from tonle.edge.listening import bind, run
        from tonle.edge.server import HttpServer, ServerLimits

        async def handle(exchange: Any) -> None:
            if exchange.path != PATH or not json.loads(exchange.body).get("stream"):
                exchange.reply(WHOLE if exchange.path == PATH else MODELS)
                return
            exchange.start(content_type="text/event-stream")
            for chunk in CHUNKS:
                exchange.write(chunk)
                await asyncio.sleep(0)
            exchange.write(END)
            exchange.end()

        async def main() -> None:
            await HttpServer(handle, ServerLimits()).start(bind("127.0.0.1", port))
            await asyncio.Event().wait()

        shorten_thread_switches()
        run(main())
    elif name == "uvicorn":
        from benchmarks.needs import development_tool

        development_tool("uvicorn").run(
            application(0.0), port=port, log_level="warning", access_log=False, lifespan="off"
        )
    elif name == "granian":
        from granian import Granian

        Granian("benchmarks.http_choice:app", port=port, interface="asginl", log_enabled=False).serve()
    else:
        from aiohttp import web

        async def answer(request: Any) -> Any:
            if not (await request.json()).get("stream"):
                return web.Response(body=WHOLE, content_type="application/json")
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            for chunk in CHUNKS:
                await response.write(chunk)
            await response.write(END)
            return response

        async def models(request: Any) -> Any:
            return web.Response(body=MODELS, content_type="application/json")

        app = web.Application()
        app.add_routes([web.post(PATH, answer), web.get("/v1/models", models)])
        web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)


async def app(scope: Any, receive: Any, send: Any) -> None:
    """For servers that want a name to import."""
    from benchmarks.gateway_stub import application

    await application(0.0)(scope, receive, send)


# -- clients


async def call_many(name: str, url: str, num_requests: int, *, stream: bool) -> None:
    body = json.dumps({"model": "stub", "messages": [], "stream": stream}).encode()
    if name == "tonle":
        from benchmarks.gateway_load import drive

        assert not (await drive(url, USERS, num_requests, stream=stream)).num_failed
        return
    left = num_requests
    headers = {"content-type": "application/json"}
    if name == "httpx":
        from benchmarks.needs import development_tool

        httpx = development_tool("httpx")
        async with httpx.AsyncClient(limits=httpx.Limits(max_connections=USERS)) as client:

            async def one() -> None:
                async with client.stream("POST", url + PATH, content=body, headers=headers) as reply:
                    async for _ in reply.aiter_raw():
                        pass

            await _closed_loop(one, left)
    else:
        import aiohttp

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=USERS)) as session:

            async def one() -> None:
                async with session.post(url + PATH, data=body, headers=headers) as reply:
                    async for _ in reply.content.iter_any():
                        pass

            await _closed_loop(one, left)


async def _closed_loop(one: Any, num_requests: int) -> None:
    left = num_requests

    async def user() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await one()

    await asyncio.gather(*(user() for _ in range(USERS)))


def call(name: str, url: str) -> None:
    """Prints CPU seconds of whole answers and of streams; the first calls are not counted."""
    import time

    import uvloop

    took = []
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for stream, size in ((False, NUM_WHOLE), (True, NUM_STREAMS)):
            runner.run(call_many(name, url, USERS, stream=stream))
            before_s = time.process_time()
            runner.run(call_many(name, url, size, stream=stream))
            took.append(time.process_time() - before_s)
    print(*took)


# -- the comparison


def compare(other: str | None) -> None:
    import subprocess
    import tempfile

    from benchmarks.gateway_load import drive
    from benchmarks.gateway_servers import Running, pin_self, stub
    from benchmarks.gateway_stub import NUM_TOKENS
    from benchmarks.peers.process import free_port
    from tonle.edge.listening import run

    def programs(names: dict[str, bool]) -> dict[str, str]:
        chosen = {name: other if is_other else sys.executable for name, is_other in names.items()}
        return {name: python for name, python in chosen.items() if python}

    pin_self()
    print("CPU µs: per whole answer, per streamed chunk")
    with tempfile.TemporaryDirectory() as folder:
        for name, python in programs(SERVERS).items():
            port = free_port()
            command = [python, __file__, "--serve", name, "--port", str(port)]
            server = Running(command, f"http://127.0.0.1:{port}", Path(folder) / f"{name}.log", core=0)
            figures = []
            for stream, size in ((False, NUM_WHOLE), (True, NUM_STREAMS)):
                run(drive(server.url, USERS, USERS, stream=stream))
                before_s = server.cpu_s
                level = run(drive(server.url, USERS, size, stream=stream))
                figures.append((server.cpu_s[0] - before_s[0]) * 1e6 / size)
                assert not level.num_failed
            server.stop()
            print(f"  server {name:8} {figures[0]:7.0f} {figures[1] / NUM_TOKENS:7.1f}", flush=True)
        with stub(Path(folder)) as upstream:
            for name, python in programs(CLIENTS).items():
                command = [python, __file__, "--call", name, "--url", upstream.url]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                whole_s, streams_s = (float(word) for word in done.stdout.split())
                whole_us, chunk_us = whole_s * 1e6 / NUM_WHOLE, streams_s * 1e6 / NUM_STREAMS / NUM_TOKENS
                print(f"  client {name:8} {whole_us:7.0f} {chunk_us:7.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other-python", help="of an environment with aiohttp, granian, uvloop and msgspec")
    parser.add_argument("--serve", choices=SERVERS)
    parser.add_argument("--call", choices=CLIENTS)
    parser.add_argument("--port", type=int)
    parser.add_argument("--url")
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.port)
    elif arguments.call:
        call(arguments.call, arguments.url)
    else:
        compare(arguments.other_python)


if __name__ == "__main__":
    main()
