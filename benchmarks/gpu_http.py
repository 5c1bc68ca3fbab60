"""`tonle serve` with random weights over loopback, alone and behind `tonle gateway`: the users of `benchmarks.gpu`.

Does: make a model folder with a tokenizer, start the servers, drive them, say what each process cost per token.
Does not: measure the engine alone (`gpu.py`).

The tokenizer is made up: byte-level, with as many tokens as the model has; the first 256 are bytes and the others words of
one to eight letters behind a space. Prompts are token ids. Detokenizing, events and HTTP are what they are in service;
tokenizing is not measured.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import string
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.closed_loop import summarize
from benchmarks.http_users import Outcome, Users
from benchmarks.needs import development_tool
from benchmarks.workload import SHAPES, Job, serving, write_config

httpx = development_tool("httpx")
psutil = development_tool("psutil")

KEY = "sk-benchmark"
READY_S = 600.0
STOP_S = 40.0
BEYOND = 10**12  # a limit that is checked and never met

# What a process is for, and the word of its command line that says so; the first that fits.
PARTS = {"engine": "tonle.engine.process", "front ends": "tonle.replica.frontend", "audit": "tonle.audit.writer_process",
         "server": "serve", "gateway": "gateway"}  # fmt: skip


def write_model(name: str, root: Path) -> Path:
    """A model folder without weights."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder = write_config(name, root)
    shape, rng = SHAPES[name], random.Random(0)
    vocab = {char: token for token, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    while len(vocab) < shape["vocab_size"]:
        word = "Ġ" + "".join(rng.choices(string.ascii_lowercase, k=rng.randint(1, 8)))
        vocab.setdefault(word, len(vocab))
    words = {token: word for word, token in vocab.items()}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [words[shape[role]] for role in ("bos_token_id", "eos_token_id")]
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


class Served:
    """A server process and its children."""

    def __init__(self, command: list[str], log: Path, *, key: str | None = None) -> None:
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=_environment())
        self.url = f"http://127.0.0.1:{command[command.index('--port') + 1]}"
        self._log = log
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        for _ in range(int(READY_S / 0.1)):
            if self.process.poll() is not None:
                break
            try:
                if httpx.get(f"{self.url}/v1/models", headers=headers, timeout=READY_S).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        self.stop()
        raise SystemExit(f"{' '.join(command)} did not start:\n{log.read_text()[-4000:]}")

    def cpu_s(self) -> dict[str, float]:
        """Seconds of CPU so far, by what the process is for."""
        own = psutil.Process(self.process.pid)
        spent: dict[str, float] = {}
        for process in [own, *own.children(recursive=True)]:
            words = process.cmdline()
            part = next((part for part in PARTS if PARTS[part] in words), "other")
            times = process.cpu_times()
            spent[part] = spent.get(part, 0.0) + times.user + times.system
        return spent

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _environment() -> dict[str, str]:
    """Ours, with this tree's package found by the processes we start."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@contextmanager
def served(folder: Path, options: argparse.Namespace, log: Path) -> Iterator[Served]:
    command = [
        sys.executable, "-m", "tonle", "serve", str(folder), "--port", _free_port(), "--load-format", "random",
        "--device", options.device, "--dtype", options.dtype, "--max-model-len", "4096",
        "--max-num-seqs", str(options.max_batch_size), "--max-num-batched-tokens", str(options.max_num_batched_tokens),
        "--long-prefill-token-threshold", str(options.max_num_batched_tokens), "--kv-cache-dtype",
        options.kv_cache_dtype, "--frontends", str(options.frontends), "--log-level", "WARNING",
    ]  # fmt: skip
    server = Served(command, log)
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def behind_gateway(upstream: str, folder: Path, options: argparse.Namespace, log: Path) -> Iterator[Served]:
    """With a key, limits and the audit trail."""
    command = [
        sys.executable, "-m", "tonle", "gateway", "--backend", upstream, "--port", _free_port(), "--api-key", KEY,
        "--state-db", str(folder / "state.db"), "--audit-dir", str(folder / "audit"),
        "--requests-per-minute", str(BEYOND), "--tokens-per-minute", str(BEYOND),
        "--max-concurrent", str(max(options.http_users)), "--log-level", "WARNING",
    ]  # fmt: skip
    server = Served(command, log, key=KEY)
    try:
        yield server
    finally:
        server.stop()


def http_rows(name: str, root: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per number of users, and one more behind the gateway if asked for."""
    folder = write_model(name, root)
    rows = []
    users = Users(options.clients)
    with served(folder, options, root / "serve.log") as server:
        users.drive(server.url, name, serving(64, seed=77), 32)  # warm
        rows += [_row("http", server, [server], users, name, count) for count in options.http_users]
        if options.gateway:
            with behind_gateway(server.url, root, options, root / "gateway.log") as gateway:
                users.drive(gateway.url, name, serving(64, seed=78), 32, api_key=KEY)
                rows += [
                    _row("gateway", gateway, [server, gateway], users, name, count, KEY) for count in options.http_users
                ]
    return rows


def _row(
    label: str, entry: Served, servers: list[Served], users: Users, name: str, count: int, key: str | None = None
) -> dict[str, Any]:
    before = _cpu_s(servers)
    outcome = users.drive(entry.url, name, jobs_for(count, again=key is not None), count, api_key=key)
    after = _cpu_s(servers)
    spent = {part: after[part] - before.get(part, 0.0) for part in after} | {"clients": outcome.cpu_s}
    return {"model": name, "workload": label, **summarize(outcome.samples, outcome.seconds, count),
            "cpu_us_per_token": _per_token(spent, outcome)}  # fmt: skip


def jobs_for(users: int, *, again: bool = False) -> list[Job]:
    """What `gpu.py` asks of the engine alone; `again`: as much of other prompts, which the server has not cached."""
    return serving(max(10, 8 * users), seed=users + (10_000 if again else 0))


def _cpu_s(servers: list[Served]) -> dict[str, float]:
    return {part: spent for server in servers for part, spent in server.cpu_s().items()}


def _per_token(spent: dict[str, float], outcome: Outcome) -> dict[str, float]:
    tokens = sum(sample.tokens for sample in outcome.samples)
    return {part: cpu_s / tokens * 1e6 for part, cpu_s in spent.items()}
