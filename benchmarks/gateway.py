"""What a gateway costs: a stub that answers at once, called directly, through Tonle's gateway, and through LiteLLM's proxy.

    python -m benchmarks.gateway                                     # ours, with records and without
    python -m benchmarks.gateway --litellm /path/to/venv/bin/litellm # and LiteLLM, in the same run
    python -m benchmarks.gateway --soak 100000                       # memory over many requests, then `tonle audit verify`

Keys, limits and metrics are always on. Each round measures all servers; figures are medians of the rounds. Compare within
a run, not between machines; `gateway_servers.py` says which program has which core. Records are written below `--folder`.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from pathlib import Path

from benchmarks.gateway_load import Level, drive, middle
from benchmarks.gateway_servers import CORES, MAX_CONCURRENT, Running, litellm, pin_self, stub, tonle
from benchmarks.gateway_soak import soak
from benchmarks.gateway_stub import NUM_TOKENS
from tonle.edge.listening import run

GAP_MS = 20.0  # between chunks of the paced stream
PACED_STREAMS = 50

# What LiteLLM's proxy is compared by, and what one caller must not notice.
MIN_WHOLE, MIN_STREAMED = 12.0, 30.0
MAX_ADDED_FIRST_MS, MAX_P99_RATIO, MAX_CHUNK_US, MAX_MB, MAX_AUDIT_SHARE = 2.0, 3.0, 25.0, 150.0, 0.1

Place = tuple[int, bool]  # callers, streamed
Table = dict[Place, Level]

SIZES: dict[Place, int] = {  # requests per round
    (1, False): 400, (50, False): 5000, (200, False): 5000, (1, True): 200, (50, True): 2000, (200, True): 2000,
}  # fmt: skip
SLOW_SIZES: dict[Place, int] = {
    (1, False): 20, (50, False): 150, (200, False): 200, (1, True): 5, (50, True): 50, (200, True): 200,
}  # fmt: skip


def measure(server: Running, users: int, size: int, *, stream: bool) -> Level:
    run(drive(server.url, users, min(users, size // 2), stream=stream))  # opens connections behind it, fills caches
    before_s = server.cpu_s
    level = run(drive(server.url, users, size, stream=stream))
    level.cpu_us, level.main_us = (
        (after - before) * 1e6 / size for after, before in zip(server.cpu_s, before_s, strict=True)
    )
    return level


def measure_all(servers: dict[str, Running], scale: float, num_rounds: int) -> dict[str, Table]:
    """Level by level, all servers in turn: what slows the machine for a moment slows all of them."""
    found: dict[str, dict[Place, list[Level]]] = {name: {} for name in servers}
    for _ in range(num_rounds):
        for (users, stream), size in SIZES.items():
            for name, server in servers.items():
                level = measure(server, users, max(users, int(size * scale)), stream=stream)
                found[name].setdefault((users, stream), []).append(level)
    return {name: {place: middle(levels) for place, levels in table.items()} for name, table in found.items()}


def paced_chunk_us(folder: Path) -> float:
    """CPU of the gateway per chunk, when chunks come one at a time."""
    with stub(folder, GAP_MS) as upstream, tonle(folder, upstream.url, audit=True) as gateway:
        run(drive(gateway.url, PACED_STREAMS, PACED_STREAMS, stream=True))
        before_s, total = gateway.cpu_s, PACED_STREAMS * 3
        level = run(drive(gateway.url, PACED_STREAMS, total, stream=True))
        assert not level.num_failed
        return (gateway.cpu_s[0] - before_s[0]) * 1e6 / (total * NUM_TOKENS)


def show(tables: dict[str, Table]) -> None:
    print("requests/s · first byte p50 / p99 ms")
    print(f"{'callers':>8} {'':9}" + "".join(f"{name:>34}" for name in tables))
    for level in SIZES:
        words = f"{level[0]:8} {'streamed' if level[1] else 'whole':9}"
        print(words + "".join(f"{table[level]!s:>34}" for table in tables.values()))
    print("CPU per request, µs, all processes of it")
    for level in SIZES:
        words = f"{level[0]:8} {'streamed' if level[1] else 'whole':9}"
        print(words + "".join(f"{table[level].cpu_us:34.0f}" for table in tables.values()))


def verdicts(tables: dict[str, Table], paced_us: float, memory_mb: float) -> None:
    ours, direct, theirs = tables["tonle"], tables["direct"], tables.get("litellm")
    checks: list[tuple[str, float, str, float]] = []
    for stream, word, least in ((False, "whole", MIN_WHOLE), (True, "streamed", MIN_STREAMED)):
        for users in (50, 200):
            if theirs is not None:
                ratio = ours[users, stream].per_s / theirs[users, stream].per_s
                checks.append((f"{word}, {users} callers: times LiteLLM", ratio, ">=", least))
            share = 1 - ours[users, stream].per_s / tables["no audit"][users, stream].per_s
            checks.append((f"{word}, {users} callers: throughput the records cost", share, "<=", MAX_AUDIT_SHARE))
        added_ms = ours[1, stream].first_p50_ms - direct[1, stream].first_p50_ms
        checks.append((f"{word}, one caller: first byte later by, ms", added_ms, "<=", MAX_ADDED_FIRST_MS))
        ratio = ours[200, stream].first_p99_ms / direct[200, stream].first_p99_ms
        checks.append((f"{word}, 200 callers: p99 of the first byte, times direct", ratio, "<=", MAX_P99_RATIO))
    checks.append(("CPU per streamed chunk, 50 callers, µs", ours[50, True].cpu_us / NUM_TOKENS, "<=", MAX_CHUNK_US))
    checks.append((f"the same, one chunk every {GAP_MS:g} ms", paced_us, "<=", MAX_CHUNK_US))
    checks.append(("memory of all its processes, MB", memory_mb, "<=", MAX_MB))
    print("\ntargets")
    for what, value, sign, limit in checks:
        good = value >= limit if sign == ">=" else value <= limit
        print(f"  {'ok  ' if good else 'MISS'} {what:58} {value:8.2f} {sign} {limit:g}")
    for users, stream in ((50, False), (200, False), (50, True), (200, True)):
        place = users, stream
        share = ours[place].main_us / tables["no audit"][place].main_us - 1
        what = f"{'streamed' if stream else 'whole'}, {users} callers: CPU records add to the process that serves"
        print(f"       {what:66} {share:8.2f}")


def compare(folder: Path, program: str | None, scale: float, num_rounds: int) -> None:
    with contextlib.ExitStack() as stack:
        upstream = stack.enter_context(stub(folder))
        audited = stack.enter_context(tonle(folder, upstream.url, audit=True))
        plain = stack.enter_context(tonle(folder, upstream.url, audit=False))
        tables = measure_all({"direct": upstream, "tonle": audited, "no audit": plain}, scale, num_rounds)
        memory_mb = audited.memory_mb
        print(f"tonle: {' + '.join(f'{each:.0f}' for each in memory_mb)} MB")
        if program:
            with litellm(folder, upstream.url, program) as proxy:
                tables["litellm"] = {
                    place: measure(proxy, place[0], size, stream=place[1]) for place, size in SLOW_SIZES.items()
                }
                print(f"litellm: {sum(proxy.memory_mb):.0f} MB")
    paced_us = paced_chunk_us(folder)
    show(tables)
    verdicts(tables, paced_us, sum(memory_mb))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--litellm", help="the program `litellm` of an environment that has its proxy")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a quarter of the requests, one round")
    parser.add_argument("--soak", type=int, metavar="N", help="send N requests, print memory ten times, verify")
    parser.add_argument("--folder", type=Path, help="where records are written (the system's temporary folder)")
    arguments = parser.parse_args()
    pin_self()
    shared = "cores are not divided" if len(CORES) < 2 else f"gateway on core {CORES[0]}, all else on {CORES[1]}"
    print(f"{shared}; at most {MAX_CONCURRENT} requests at a backend")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        if arguments.soak:
            soak(Path(name), arguments.soak)
        else:
            quick = arguments.quick
            compare(Path(name), arguments.litellm, 0.25 if quick else 1.0, 1 if quick else arguments.rounds)


if __name__ == "__main__":
    main()
