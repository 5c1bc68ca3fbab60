"""What HTTP costs per token and per request, with the engine's part left out: CPU of the serving process.

    python -m benchmarks.front_end                 # streams and whole answers, `tonle serve` alone and behind `tonle gateway`

The engine is a stand-in in a process of its own: it speaks the engine's messages over the engine's socket and gives
every request the next words of an English text, one step at a time, as many steps per second as asked for. Everything
in front of it is what ships: text, events, HTTP, the gateway with a key and limits. Clients are processes of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.needs import development_tool

psutil = development_tool("psutil")

USERS, TOKENS, STEP_S = 50, 256, 0.010
KEY = "sk-benchmark"
TEXT = (
    "The river rises in the mountains and runs south for four thousand kilometres. In the wet season its water turns "
    "around: the lake grows to five times its size, and fish come into the flooded forest to breed. When the rain "
    "ends, the current turns again, and the whole country celebrates with boat races. Farmers plant rice behind the "
    "falling water, and the soil it leaves is the best of the year. "
)


# -- the stand-in for an engine


def engine(address: str) -> None:
    import select

    import msgspec

    from tonle.engine.messages import Cancel, ModelCard, Step, Submit, ToEngine
    from tonle.engine.text import load_text
    from tonle.models.source import resolve

    text = load_text(resolve(None))
    words = text.encode(TEXT, add_special_tokens=False)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(8)
    line, _ = listener.accept()
    encode, decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(ToEngine).decode

    def send(message: Any) -> None:
        body = encode(message)
        line.sendall(len(body).to_bytes(4, "little") + body)

    send(ModelCard(
        architecture="StandIn", context_length=8192, vocab_size=text.vocab_size, eos_ids=sorted(text.eos_ids),
        device="none", dtype="none", block_size=16, num_blocks=4096, max_num_seqs=256, max_num_batched_tokens=512,
        load_s=0.0,
    ))  # fmt: skip
    rows: dict[int, list[int]] = {}  # handle -> [tokens given, tokens wanted]
    buffer, due = b"", time.monotonic()
    while True:
        now = time.monotonic()
        while select.select([line], [], [], max(0.0, due - now) if rows else None)[0]:
            data = line.recv(1 << 20)
            if not data:
                return
            buffer += data
            while len(buffer) >= 4 and len(buffer) >= 4 + (size := int.from_bytes(buffer[:4], "little")):
                message, buffer = decode(buffer[4 : 4 + size]), buffer[4 + size :]
                if isinstance(message, Submit):
                    rows.update({request.handle: [0, request.config.max_length] for request in message.requests})
                elif isinstance(message, Cancel):
                    for handle in message.handles:
                        rows.pop(handle, None)
            now = time.monotonic()
            if rows and now >= due:
                break
        if not rows:
            continue
        step = Step(list(rows), [1] * len(rows), [])
        for handle, row in list(rows.items()):
            step.tokens.append(words[row[0] % len(words)])
            if row[0] == 0:
                step.started[handle] = (now, 0)
            row[0] += 1
            if row[0] >= row[1]:
                step.finished[handle] = ("length", None)
                del rows[handle]
        send(step)
        due = max(due + STEP_S, time.monotonic() - STEP_S)


# -- the server: everything but the engine


def server(address: str, port: int) -> None:
    from tonle.config.serve import ServeConfig
    from tonle.edge.listening import bind, run
    from tonle.engine.front import Front
    from tonle.engine.link import EngineLink
    from tonle.engine.text import load_text
    from tonle.models.source import resolve
    from tonle.replica.serve import serve
    from tonle.telemetry import logs

    logs.configure("WARNING")

    async def main() -> None:
        link = EngineLink(address)
        front = Front(load_text(resolve(None)), "stand-in", link.send)
        link.start(front)
        await serve(front, ServeConfig(), listener=bind("127.0.0.1", port))

    run(main())


# -- clients, in a process of their own


class Arrivals:
    def __init__(self) -> None:
        self.status = 0
        self.num_reads = 0
        self.tail = b""

    def attach(self, press: Any) -> None:
        pass

    def know(self, answer: Any) -> None:
        pass

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.status = status

    def data(self, piece: bytes) -> None:
        self.num_reads += 1
        self.tail = (self.tail + piece)[-200:]


def client(url: str, stream: int, tokens: int, total: int) -> None:
    from tonle.edge.client import Address, HttpClient
    from tonle.edge.listening import run

    async def main() -> None:
        http = HttpClient(Address.parse(url), api_key=KEY)
        body = {"messages": [{"role": "user", "content": "Tell me about the river."}], "max_tokens": tokens,
                "stream": bool(stream), "temperature": 1}  # fmt: skip
        request = http.request("POST", "/v1/chat/completions", json.dumps(body).encode(), {})
        left = total

        async def user() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                arrivals, connection = Arrivals(), await http.take()
                await connection.exchange(request, arrivals, first_s=120, silence_s=120)
                http.put(connection)
                assert arrivals.status == 200, (arrivals.status, arrivals.tail)
                assert not stream or b"[DONE]" in arrivals.tail, arrivals.tail

        await asyncio.gather(*(user() for _ in range(USERS)))

    began = time.monotonic()
    run(main())
    print(time.monotonic() - began)


# -- the measurement


def cpu_s(process: Any) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextmanager
def role(*words: str) -> Iterator[Any]:
    process = subprocess.Popen([sys.executable, __file__, *words], env={**os.environ, "TONLE_LOG_LEVEL": "WARNING"})
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(20)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_ready(url: str) -> None:
    import http.client
    from urllib.parse import urlsplit

    for _ in range(600):
        try:
            connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=5)
            connection.request("GET", "/health/ready")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.05)
    raise SystemExit(f"{url} did not become ready")


def load(url: str, *, stream: bool, tokens: int, total: int) -> float:
    command = [sys.executable, __file__, "client", url, str(int(stream)), str(tokens), str(total)]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def measure(name: str, url: str, process: Any, repeats: int) -> None:
    load(url, stream=True, tokens=16, total=USERS)
    per_token, per_request, rates = [], [], []
    for _ in range(repeats):
        before, total = cpu_s(process), 3 * USERS
        load(url, stream=True, tokens=TOKENS, total=total)
        per_token.append((cpu_s(process) - before) / (total * TOKENS) * 1e6)
        before, total = cpu_s(process), 2000
        took_s = load(url, stream=False, tokens=1, total=total)
        per_request.append((cpu_s(process) - before) / total * 1e6)
        rates.append(total / took_s)
    spread = f"{min(per_token):.1f} to {max(per_token):.1f}"
    print(f"{name:<10} {statistics.median(per_token):8.1f} µs per streamed token ({spread}), "
          f"{statistics.median(per_request):8.1f} µs per whole answer, {statistics.median(rates):7.0f} answers/s",
          flush=True)  # fmt: skip


@contextmanager
def gateway(backend: str) -> Iterator[tuple[str, Any]]:
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tonle", "gateway", "--backend", backend, "--api-key", KEY, "--port", str(port),
                   "--state-db", str(Path(folder) / "state.db"), "--max-concurrent", "1000",
                   "--tokens-per-minute", str(10**12), "--log-level", "WARNING"]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        url = f"http://127.0.0.1:{port}"
        try:
            wait_ready(url)
            yield url, psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-gateway", action="store_true")
    arguments = parser.parse_args()
    print(f"{USERS} users, {TOKENS} tokens per stream, {1 / STEP_S:.0f} steps per second")
    with tempfile.TemporaryDirectory() as folder:
        address, port = str(Path(folder) / "engine"), free_port()
        with role("engine", address):
            while not Path(address).exists():
                time.sleep(0.05)
            with role("server", address, str(port)) as process:
                url = f"http://127.0.0.1:{port}"
                wait_ready(url)
                measure("serve", url, process, arguments.repeats)
                if not arguments.no_gateway:
                    with gateway(url) as (front, process):
                        measure("gateway", front, process, arguments.repeats)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    match sys.argv[1:]:
        case ["engine", address]:
            engine(address)
        case ["server", address, port]:
            server(address, int(port))
        case ["client", url, stream, tokens, total]:
            client(url, int(stream), int(tokens), int(total))
        case _:
            main()
