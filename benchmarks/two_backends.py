"""The gateway in front of two real servers, one of which dies in the middle of the load.

    python -m benchmarks.two_backends                                          # two Tonle replicas
    python -m benchmarks.two_backends --vllm-python ~/peers/vllm/bin/python    # a replica and vLLM, which runs our middleware

Starts both servers (the default model) and a gateway, asks so that each kind of routing has a reason, lets two tenants
ask the same, puts load on both and kills one with SIGKILL. Then it reads the audit trail and prints what it shows. Exit
status 1 if a request was lost that had not begun to stream, if a record is missing, or if a trail does not verify.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

import tonle
from benchmarks.needs import development_tool
from benchmarks.peers import files
from benchmarks.peers.process import RunningServer, end_cleanly_when_terminated, free_port
from benchmarks.peers.servers import VLLM_PYTHON
from tonle.audit.chain import Chain
from tonle.audit.recover import recover
from tonle.audit.signing_keys import load_key
from tonle.audit.verify import verify

httpx = development_tool("httpx")

MODEL, PUBLIC = "smol", "smol-ab"
KEYS = ("key-of-one-tenant", "key-of-another")
ADMIN = "key-of-the-operator"
LENGTH_THRESHOLD = 600  # tokens; the default, 5000, would take a CPU half a minute each
NUM_PREFIXES, NUM_USERS, NUM_LOAD = 3, 8, 24
READY_POLL_S = 0.05
FIRST, SECOND = "first", "second"

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass
class Tally:
    """What the callers saw."""

    num_asked: int = 0
    num_whole: int = 0  # answered in full
    num_cut: int = 0  # streams that had begun and ended with an error event
    lost: list[str] = field(default_factory=list)  # neither


# -- servers


def tonle_server(port: int) -> tuple[list[str], dict[str, str]]:
    flags = ["--served-model-name", MODEL, "--trust-salt", "--max-num-seqs", "8"]
    return [sys.executable, "-m", "tonle", "serve", "--port", str(port), "--history-db", "memory", *flags], {}


def vllm_server(python: Path, port: int, audit: Path) -> tuple[list[str], dict[str, str]]:
    serve = [str(python.with_name("vllm")), "serve", str(files.hf_folder(python)), "--served-model-name", MODEL]
    sizes = ["--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "8", "--enable-prompt-tokens-details"]
    sizes.append("--enforce-eager")  # no minutes of compiling: nothing here measures speed
    place = ["--host", "127.0.0.1", "--port", str(port), "--middleware", "tonle.audit.AuditMiddleware"]
    key_file = audit.with_suffix(".key")
    key_file.write_text(f"hmac-sha256 {secrets.token_hex(32)}\n")  # one that needs no package to verify
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "TONLE_AUDIT_DIR": str(audit),
        "TONLE_AUDIT_KEY_FILE": str(key_file),
        "PYTHONPATH": str(Path(tonle.__file__).parents[1]),  # instead of installing it there
    }
    return [*serve, *sizes, *place], env


def gateway_settings(folder: Path, first: str, second: str, port: int) -> Path:
    """Short prompts may go to both, long ones to the second only; half of the users of PUBLIC to each."""
    settings = {
        "port": port, "api_key": list(KEYS), "admin_key": [ADMIN], "audit_dir": str(folder / "audit"),
        "state_db": str(folder / "state.db"), "length_threshold": LENGTH_THRESHOLD, "probe_interval": "1s",
        "log_level": "WARNING", "aliases": {PUBLIC: MODEL},
        "backends": [{"url": first, "name": FIRST, "length": "short"}, {"url": second, "name": SECOND}],
        "experiments": [{"name": "ab", "model": PUBLIC, "arms": [
            {"name": "control", "weight": 1, "backend": FIRST}, {"name": "canary", "weight": 1, "backend": SECOND}]}],
    }  # fmt: skip
    file = folder / "tonle.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


# -- callers


class Callers:
    def __init__(self, url: str) -> None:
        self.tally = Tally()
        self.num_begun = 0  # streams that have sent something
        self._client = httpx.AsyncClient(base_url=url, timeout=600, trust_env=False)

    async def close(self) -> None:
        await self._client.aclose()

    async def ask(self, text: str, *, key: str = KEYS[0], model: str = MODEL, **fields: Any) -> httpx.Response:
        """A whole answer."""
        body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 8, **fields}
        self.tally.num_asked += 1
        reply = await self._client.post(CHAT, json=body, headers=_bearer(key))
        if reply.status_code == 200:
            self.tally.num_whole += 1
        else:
            self.tally.lost.append(f"{reply.status_code} {reply.text[:200]}")
        return reply

    async def stream(self, text: str, **fields: Any) -> None:
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "stream": True, **fields}
        self.tally.num_asked += 1
        seen = ""
        async with self._client.stream("POST", CHAT, json=body, headers=_bearer(KEYS[0])) as reply:
            async for piece in reply.aiter_text():
                self.num_begun += '"choices"' in piece and '"choices"' not in seen
                seen += piece
        if seen.endswith("data: [DONE]\n\n"):
            self.tally.num_whole += 1
        elif '"choices"' in seen and '"error"' in seen:
            self.tally.num_cut += 1
        else:
            self.tally.lost.append(f"{reply.status_code} {seen[:200]}")

    async def busy(self, name: str) -> int:
        """Requests that backend works on."""
        listed = (await self._client.get("/admin/backends", headers=_bearer(ADMIN))).json()["backends"]
        return int(next(entry["running"] for entry in listed if entry["name"] == name))


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def give_reasons(callers: Callers) -> None:
    """One reason after the other, so that the record of each is about it."""
    for index in range(NUM_PREFIXES * 2):
        await callers.ask(f"Topic {index % NUM_PREFIXES}. " * 40 + f"Question {index}?", temperature=1.0)
    await callers.ask("A long story. " * (LENGTH_THRESHOLD * 4 // 14 + 1), max_tokens=2)  # 4 letters count as a token
    for index in range(NUM_USERS * 2):
        await callers.ask("Hello!", model=PUBLIC, user=f"user-{index // 2}", temperature=1.0)


async def share_nothing(callers: Callers) -> None:
    """Two tenants, one prompt, each of them twice; not from the response cache. Long enough for a block of vLLM (128)."""
    for key in KEYS:
        for _ in range(2):
            await callers.ask("The secret of this company is " + "very well kept. " * 60, key=key, use_cache=False,
                              model=PUBLIC, user="the-same")  # fmt: skip


async def lose_one(callers: Callers, victim: RunningServer, name: str) -> None:
    """Half of the load streams; the victim dies when it works and streams have begun."""
    tasks = []
    for index in range(NUM_LOAD):
        text, fields = f"Story {secrets.token_hex(4)}.", {"max_tokens": 48, "ignore_eos": True, "temperature": 1.0}
        tasks.append(asyncio.create_task(callers.stream(text, **fields) if index % 2 else callers.ask(text, **fields)))
    for _ in range(12_000):
        if callers.num_begun >= 2 and await callers.busy(name) >= 4:
            break
        await asyncio.sleep(READY_POLL_S)
    victim.kill()
    await asyncio.gather(*tasks)


async def stream_beside_the_gateway(url: str) -> dict[str, Any]:
    """Straight to a server with our middleware, without asking for usage: what the caller sees must not show any."""
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as client:
        counted = (await client.post(COMPLETIONS, json=body)).json()["usage"]
        text = (await client.post(COMPLETIONS, json=body | {"stream": True}, headers={"x-request-id": "no-usage"})).text
    return {"usage": counted, "shown": '"usage"' in text, "done": text.endswith("data: [DONE]\n\n")}


# -- what the trail shows


def records_of(audit: Path) -> Iterator[dict[str, Any]]:
    found = (json.loads(path.read_text(encoding="utf-8")) for path in audit.glob("*/*_*.json"))
    yield from sorted(found, key=lambda record: record["time"])


def report(tally: Tally, records: list[dict[str, Any]], victim: str) -> list[str]:
    """Prints, and returns what is wrong."""
    routes = Counter((record["route"]["why"], record["route"]["backend"]) for record in records if record["route"])
    arms = Counter(
        (record["experiment"]["arm"], record["route"]["backend"]) for record in records if record["experiment"]
    )
    retried = sum(victim in (record["route"] or {}).get("failed", ()) for record in records)
    tenants = [record for record in records if "secret of this company" in str(record["user_input"])]
    cached = [[each["usage"]["cached_tokens"] for each in tenants if each["key_id"] == key]
              for key in dict.fromkeys(each["key_id"] for each in tenants)]  # fmt: skip
    print(f"\ncallers:  {tally.num_asked} asked, {tally.num_whole} answered in full, {tally.num_cut} streams cut off "
          f"after they had begun, {len(tally.lost)} lost")  # fmt: skip
    print(f"records:  {len(records)}, {dict(Counter(record['status'] for record in records))}")
    print("routes:   " + ", ".join(f"{why} → {backend}: {count}" for (why, backend), count in sorted(routes.items())))
    print("arms:     " + ", ".join(f"{arm} → {backend}: {count}" for (arm, backend), count in sorted(arms.items())))
    print(f"retried:  {retried} had been sent to {victim} and were answered by the other")
    print(f"tenants:  cached tokens of the same prompt, first and second time, per tenant: {cached}")
    problems = [f"lost: {what}" for what in tally.lost]
    if len(records) != tally.num_asked:
        problems.append(f"{tally.num_asked} requests left {len(records)} records")
    problems += [
        f"no request was routed by {why}"
        for why in ("length", "prefix", "experiment")
        if not any(w == why for w, _ in routes)
    ]
    if len({arm for arm, _ in arms}) != 2:
        problems.append("one arm got no requests")
    if not retried:
        problems.append("nothing was retried: the victim died idle")
    if any(len(times) != 2 or times[0] != 0 for times in cached):
        problems.append("a tenant found another's prompt in the prefix cache")
    if any(times[1] == 0 for times in cached):
        problems.append("a tenant did not find its own prompt in the prefix cache")
    return problems


def check_trail(name: str, audit: Path, key_file: Path | None = None, *, killed: bool = False) -> list[str]:
    if killed:  # what a server does when it starts again
        recover(Chain(audit, load_key(key_file or audit / "audit.key")))
    found = verify(audit, key_file=key_file)
    print(f"verify:   {name}: {found.num_records} records, {'in order' if found.ok else found.findings}")
    return [str(finding) for finding in found.findings]


def check_middleware(audit: Path, beside: dict[str, Any]) -> list[str]:
    """What our middleware inside vLLM recorded."""
    problems = check_trail("middleware", audit, audit.with_suffix(".key"), killed=True)
    records = list(records_of(audit))
    (own,) = [record for record in records if record["request_id"] == "no-usage"]
    expected = beside["usage"]["completion_tokens"], beside["usage"]["prompt_tokens"]
    print(f"          {dict(Counter(record['status'] for record in records))}; a stream without include_usage: "
          f"{own['usage']}, shown to the caller: {beside['shown']}")  # fmt: skip
    if (own["usage"]["completion_tokens"], own["usage"]["prompt_tokens"]) != expected:
        problems.append(f"the usage of a stream is {own['usage']}, not {beside['usage']}")
    if beside["shown"] or not beside["done"]:
        problems.append("the stream was not what the caller asked for")
    unknown = [record["id"] for record in records if record["status"] == "ok" and not record["usage"]]
    return problems + [f"record {name} has no usage" for name in unknown]


# -- the run


async def drive(gateway: RunningServer, second: RunningServer, victim: RunningServer, name: str, *, vllm: bool) -> Any:
    callers = Callers(gateway.url)
    try:
        beside = await stream_beside_the_gateway(second.url) if vllm else None
        for what, step in (("tenants", share_nothing(callers)), ("routes", give_reasons(callers)),
                           (f"load, and the death of {name}", lose_one(callers, victim, name))):  # fmt: skip
            print(f"running:  {what}", flush=True)
            await step
        return callers.tally, beside
    finally:
        await callers.close()


def run(folder: Path, vllm_python: Path | None, victim_name: str) -> list[str]:
    ports = [free_port() for _ in range(3)]
    commands = [tonle_server(ports[0]), tonle_server(ports[1])]
    if vllm_python is not None:
        commands[1] = vllm_server(vllm_python, ports[1], folder / "vllm")
    with ExitStack() as stack:
        servers = []
        for (command, env), port, name in zip(commands, ports, (FIRST, SECOND), strict=False):
            server = RunningServer(command, env=env, port=port, health="/v1/models", log=folder / f"{name}.log")
            servers.append(stack.enter_context(server))
        for server, name in zip(servers, (FIRST, SECOND), strict=True):
            print(f"started:  {name} in {server.wait_ready():.0f} s", flush=True)
        file = gateway_settings(folder, servers[0].url, servers[1].url, ports[2])
        command = [sys.executable, "-m", "tonle", "gateway", "--config", str(file)]
        with RunningServer(
            command, env={}, port=ports[2], health="/health/ready", log=folder / "gateway.log"
        ) as gateway:
            gateway.wait_ready()
            victim = servers[(FIRST, SECOND).index(victim_name)]
            tally, beside = asyncio.run(drive(gateway, servers[1], victim, victim_name, vllm=vllm_python is not None))
    problems = report(tally, list(records_of(folder / "audit")), victim_name)
    problems += check_trail("gateway", folder / "audit")
    return problems + (check_middleware(folder / "vllm", beside) if beside is not None else [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = os.environ.get(VLLM_PYTHON)
    parser.add_argument(
        "--vllm-python", type=Path, default=None, help=f"make the second server vLLM (also {VLLM_PYTHON})"
    )
    parser.add_argument("--kill", choices=(FIRST, SECOND), default=SECOND, help="which one dies (default: second)")
    parser.add_argument("--keep", type=Path, help="leave logs and trails in this folder")
    args = parser.parse_args()
    end_cleanly_when_terminated()
    python = args.vllm_python or (Path(known) if known else None)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        problems = run(folder, python.expanduser().absolute() if python else None, args.kill)
    for problem in problems:
        print(f"PROBLEM:  {problem}")
    print("\nnothing was lost" if not problems else f"\n{len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
