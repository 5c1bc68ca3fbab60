"""Do three clients measure the same? `tonle bench`, `vllm bench serve` and guidellm take turns on one server.

    python -m benchmarks.clients --vllm ~/peers/vllm/bin/vllm --guidellm ~/peers/guidellm/bin/guidellm --pin
    python -m benchmarks.clients --users 1,4 --rate 0.5 --server vllm …

Does: start a server, let every client put the same load on it in each round, and compare TTFT, TPOT and throughput. Each
round has two turns of `tonle bench`: how far they are apart is what this machine can resolve.
Does not: correct a client's latencies. A client that is not installed is left out, with a message.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.client_programs import ClientFailedError, ClientProgram, Guidellm, Task, TonleBench, Turn, VllmBench
from benchmarks.cpu_seconds import CpuWatch, cpu_seconds
from benchmarks.needs import development_tool
from benchmarks.peers.files import PreparationFailedError, hf_folder
from benchmarks.peers.process import RunningServer, ServerFailedError, end_cleanly_when_terminated, free_port
from benchmarks.peers.servers import ours
from benchmarks.tables import print_wide
from tonle.bench.words import WORDS

httpx = development_tool("httpx")

QUANTITIES = {
    "ttft_ms": "TTFT, ms",
    "tpot_ms": "TPOT, ms",
    "output_tokens_per_s": "output tok/s",
    "requests_per_s": "req/s",
}
TOLERANCE = 0.05
AGAIN = "tonle bench, again"
AGREES = "[green]agrees[/]"
MAX_DRAWS = 200
LOG_LINES = 12


@dataclass(frozen=True, slots=True)
class Load:
    """What all clients put on the server."""

    kind: str  # "users" or "rate"
    value: float
    requests: int  # in one turn

    def __str__(self) -> str:
        return (
            f"{self.value:g} {'users' if self.value != 1 else 'user'}" if self.kind == "users" else f"{self.value:g}/s"
        )


@dataclass(frozen=True, slots=True)
class Row:
    """One turn, as it is saved."""

    load: str
    round: int
    client: str
    turn: Turn
    server_cpu_s: float | None  # None: not a server that we started


class Prompts:
    """Draws texts of random words that the server counts as exactly so many tokens. None comes twice."""

    def __init__(self, url: str, model: str, num_tokens: int, rng: random.Random) -> None:
        self._client = httpx.Client(base_url=url, timeout=60.0, trust_env=False)
        self._model = model
        self._num_tokens = num_tokens
        self._rng = rng

    def draw(self, count: int) -> list[str]:
        return [self._draw_one() for _ in range(count)]

    def _draw_one(self) -> str:
        words = self._rng.choices(WORDS, k=self._num_tokens)
        for _ in range(MAX_DRAWS):
            excess = self._count(" ".join(words)) - self._num_tokens
            if excess == 0:
                return " ".join(words)
            # Most words are one token. Taking back one more than needed ends a back and forth between two lengths.
            words = words[: -excess - 1] if excess > 0 else words + self._rng.choices(WORDS, k=-excess)
        raise ClientFailedError(f"found no text that the server counts as {self._num_tokens} tokens")

    def _count(self, text: str) -> int:
        body = {"model": self._model, "prompt": text, "add_special_tokens": True}
        return len(self._client.post("/tokenize", json=body).raise_for_status().json()["tokens"])


class Stage:
    """One server, and the clients that take turns on it."""

    def __init__(self, url: str, server_pid: int | None, prompts: Prompts, model: str, tokenizer: Path) -> None:
        self._url = url
        self._server_pid = server_pid
        self._prompts = prompts
        self._model = model
        self._tokenizer = tokenizer

    def run(self, client: ClientProgram, load: Load, sizes: tuple[int, int]) -> tuple[Turn, float | None]:
        """One turn: what the client says, and CPU seconds of the server."""
        kind: Any = load.kind
        prompts = self._prompts.draw(load.requests)
        task = Task(self._url, self._model, self._tokenizer, kind, load.value, prompts, *sizes)
        before_s = None if self._server_pid is None else cpu_seconds(self._server_pid)
        with tempfile.TemporaryDirectory(prefix="tonle-clients-") as name:
            folder = Path(name)
            watch = run_program(client, client.command(task, folder), folder)
            try:
                turn = client.read(task, folder)
            except (OSError, ValueError, LookupError, TypeError) as error:
                raise ClientFailedError(f"{client.name}: no result that can be read ({error!r})") from None
        if turn.begin is not None and turn.end is not None:
            turn = replace(turn, client_cpu_s=watch.between(turn.begin, turn.end))
        after_s = None if self._server_pid is None else cpu_seconds(self._server_pid)
        return turn, None if before_s is None or after_s is None else after_s - before_s


def run_program(client: ClientProgram, command: Sequence[str], folder: Path) -> CpuWatch:
    """Run a client to its end; the watch knows what CPU time it took, and when."""
    env = {**os.environ, **client.env}
    log = folder / "output.log"
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        except OSError as error:
            raise ClientFailedError(f"{client.name}: cannot run {command[0]}: {error.strerror}") from None
        try:
            with CpuWatch(process.pid) as watch:
                status = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if status != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
        raise ClientFailedError("\n    ".join([f"{client.name} ended with status {status}:", *lines]))
    return watch


def take_turns(
    stage: Stage, clients: Sequence[ClientProgram], load: Load, rounds: int, sizes: tuple[int, int], console: Console
) -> Iterator[Row]:
    """Every client once per round, `tonle bench` twice, in an order that rotates. Round 0 is not counted."""
    names = [clients[0].name, *(client.name for client in clients[1:]), AGAIN]
    by_name = {client.name: client for client in clients} | {AGAIN: clients[0]}
    for number in range(rounds + 1):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            if number == 0 and name == AGAIN:
                continue
            turn, server_cpu_s = stage.run(by_name[name], load, sizes)
            if number:
                yield Row(str(load), number, name, turn, server_cpu_s)
            figures = ", ".join(f"{title} {getattr(turn, field):.2f}" for field, title in QUANTITIES.items())
            what = f"round {number}" if number else "not counted"
            console.print(f"{load}, {what}, {name}: {figures}", highlight=False, soft_wrap=True)


def ratios(rows: Sequence[Row], client: str, quantity: str) -> list[float]:
    """By round: this client's value over `tonle bench`'s: of the mean of its two turns, or for the second, the first's."""
    found = []
    for number in sorted({row.round for row in rows}):
        of_round = {row.client: float(getattr(row.turn, quantity)) for row in rows if row.round == number}
        first, again = of_round.get("tonle bench"), of_round.get(AGAIN)
        if client in of_round and first and again:  # a round that Ctrl-C cut short is left out
            found.append(of_round[client] / (first if client == AGAIN else fmean((first, again))))
    return found


def report(rows: Sequence[Row], console: Console) -> bool:
    """One line per load and client. True if every peer is within the tolerance of `tonle bench` in every quantity.

    Also False where there was no whole round to judge by.
    """
    table = Table(box=box.MARKDOWN)
    for title in ("load", "client", *QUANTITIES.values(), "client CPU s", "server CPU s", ""):
        table.add_column(title)
    agreed = True
    for load in dict.fromkeys(row.load for row in rows):
        of_load = [row for row in rows if row.load == load]
        for client in dict.fromkeys(sorted((row.client for row in of_load), key=lambda name: name != "tonle bench")):
            cells, verdict = _line(of_load, client)
            agreed &= client in ("tonle bench", AGAIN) or verdict == AGREES
            table.add_row(load, client, *cells, verdict)
    print_wide(table, console)
    return agreed


def _line(rows: Sequence[Row], client: str) -> tuple[list[str], str]:
    """Medians over rounds; for all but the first client also the median ratio and its range."""
    turns = [row for row in rows if row.client == client]
    cells, far = [], []
    for quantity, title in QUANTITIES.items():
        value = f"{median(getattr(row.turn, quantity) for row in turns):.2f}"
        found = ratios(rows, client, quantity)
        if client != "tonle bench" and found:
            ratio = median(found)
            value += f" · {ratio:.3f} ({min(found):.2f}–{max(found):.2f})"
            if abs(ratio - 1) > TOLERANCE:
                far.append(f"{title.split(',')[0]} {ratio - 1:+.0%}")
        cells.append(value)
    for seconds in ([row.turn.client_cpu_s for row in turns], [row.server_cpu_s for row in turns]):
        there = [value for value in seconds if value is not None]
        cells.append(f"{median(there):.2f}" if there else "–")
    if client == "tonle bench":
        return cells, ""
    if not ratios(rows, client, "ttft_ms"):
        return cells, "[yellow]no whole round[/]"
    if client == AGAIN:
        return cells, f"[yellow]too noisy: {', '.join(far)}[/]" if far else "noise"
    return cells, f"[red]differs: {', '.join(far)}[/]" if far else AGREES


@contextmanager
def running_server(arguments: argparse.Namespace, vllm: Path | None) -> Iterator[tuple[str, int | None]]:
    """URL of the server, and the id of its process if we start it."""
    if arguments.url is not None:
        yield arguments.url, None
        return
    port = free_port()
    cores = sorted(os.sched_getaffinity(0))
    theirs = cores[:-1] if arguments.pin and len(cores) > 1 else cores
    env: dict[str, str] = {}
    if arguments.server == "vllm":
        if vllm is None:
            raise ServerFailedError("--server vllm needs --vllm PATH")
        env = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, theirs))}
        serve = [str(vllm), "serve", str(hf_folder(Path(sys.executable))), "--dtype", "float32"]
        command = [*serve, "--max-model-len", "2048", "--host", "127.0.0.1", "--port", str(port)]
    else:
        # Without guesses: each turn has other texts, and some have more in them to guess than others.
        command = next(each for each in ours() if each.name == "tonle-no-guesses").command(port)
    os.sched_setaffinity(0, theirs)  # what is started now inherits it
    with tempfile.TemporaryDirectory(prefix="tonle-clients-") as folder:
        log = Path(folder) / "server.log"
        with RunningServer(command, env=env, port=port, health="/health", log=log) as server:
            os.sched_setaffinity(0, cores[-1:] if arguments.pin else cores)
            server.wait_ready()
            server.ask()
            yield server.url, server.pid


def installed(flag: Path | None, variable: str, program: str, console: Console) -> Path | None:
    """Where a peer is: the flag, else the environment, else the search path; None: said, and left out."""
    found = flag or os.environ.get(variable) or shutil.which(program)
    if found is None:
        console.print(f"{program} is left out: give --{program} PATH or {variable}", style="yellow", highlight=False)
        return None
    path = Path(found).expanduser().absolute()
    if not os.access(path, os.X_OK) or path.is_dir():
        sys.exit(f"--{program}: {path} is no program that can be run")
    return path


def loads(arguments: argparse.Namespace) -> list[Load]:
    users = [float(part) for part in arguments.users.split(",") if part]
    rates = [float(part) for part in arguments.rate.split(",") if part]
    found = [Load("users", value, arguments.requests or 4 * max(2, int(value))) for value in users]
    return found + [Load("rate", value, arguments.requests or 16) for value in rates]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vllm", type=Path, help="the program `vllm` (default: PEER_VLLM)")
    parser.add_argument("--guidellm", type=Path, help="the program `guidellm` (default: PEER_GUIDELLM)")
    parser.add_argument("--server", choices=("tonle", "vllm"), default="tonle", help="what to start (default tonle)")
    parser.add_argument("--url", help="a server that already runs, instead")
    parser.add_argument("--tokenizer", type=Path, help="folder with its tokenizer (default: the default model's)")
    parser.add_argument("--users", default="1,4", help='closed loops, with commas (default 1,4; "" for none)')
    parser.add_argument("--rate", default="", help="open loops, requests per second at even intervals, with commas")
    parser.add_argument("--requests", type=int, help="in one turn (default: 4 per user and at least 8; with --rate 16)")
    parser.add_argument("--rounds", type=int, default=6, help="(default 6; one more is not counted)")
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--pin", action="store_true", help="clients on the last core, the server on the others")
    parser.add_argument("--seed", type=int, help="of the prompts (default: another one each time)")
    parser.add_argument("--json", type=Path, help="save every turn to this file")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    end_cleanly_when_terminated()
    console = Console()
    vllm = installed(arguments.vllm, "PEER_VLLM", "vllm", console)
    guidellm = installed(arguments.guidellm, "PEER_GUIDELLM", "guidellm", console)
    clients: list[ClientProgram] = [TonleBench()]
    if vllm is not None:
        clients.append(VllmBench(vllm))
    if guidellm is not None:
        clients.append(Guidellm(guidellm))
    seed = random.SystemRandom().randrange(2**32) if arguments.seed is None else arguments.seed
    sizes = (arguments.input_tokens, arguments.output_tokens)
    rows: list[Row] = []
    try:
        tokenizer = arguments.tokenizer or hf_folder(Path(sys.executable))
        with running_server(arguments, vllm) as (url, pid):
            model = httpx.get(f"{url}/v1/models", trust_env=False).raise_for_status().json()["data"][0]["id"]
            prompts = Prompts(url, model, sizes[0], random.Random(seed))
            stage = Stage(url, pid, prompts, model, tokenizer.absolute())
            for load in loads(arguments):
                for row in take_turns(stage, clients, load, arguments.rounds, sizes, console):
                    rows.append(row)
                    if arguments.json is not None:
                        arguments.json.write_text(json.dumps([asdict(each) for each in rows], indent=1) + "\n")
    except KeyboardInterrupt:
        console.print("interrupted", style="yellow")
    except (ClientFailedError, PreparationFailedError, ServerFailedError, httpx.HTTPError) as error:
        console.print(str(error), style="red", highlight=False, markup=False, soft_wrap=True)
        return 2
    agreed = report(rows, console)
    console.print(f"seed {seed}", highlight=False)
    return 0 if agreed and len(clients) > 1 else 1


if __name__ == "__main__":
    sys.exit(main())
