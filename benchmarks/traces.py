"""What tracing costs a gateway: requests/s and CPU per request without it, with it, and while its collector is dead.

    python -m benchmarks.traces              # 50 callers, whole and streamed answers of 64 tokens
    python -m benchmarks.traces --quick

A stub that answers at once stands behind four gateways, which are measured in turn: without `otlp_endpoint`, with every
request traced, with one in ten, and with every request traced to an address where nothing listens. Figures are medians of
the rounds; the ratios are to the first gateway. Callers send no `traceparent`.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from pathlib import Path

from benchmarks.gateway import measure
from benchmarks.gateway_load import Level, middle
from benchmarks.gateway_servers import CORES, Running, collector, httpx, pin_self, stub, tonle
from benchmarks.peers.process import free_port

USERS = 50
SIZES = {False: 5000, True: 2000}  # requests per round, whole and streamed
OFF = "off"


def compare(folder: Path, scale: float, num_rounds: int) -> None:
    with contextlib.ExitStack() as stack:
        upstream = stack.enter_context(stub(folder))
        taker = stack.enter_context(collector(folder))
        flags = {
            OFF: (),
            "all": ("--otlp-endpoint", taker.url),
            "one in ten": ("--otlp-endpoint", taker.url, "--otlp-sample", "0.1"),
            "dead collector": ("--otlp-endpoint", f"http://127.0.0.1:{free_port()}"),
        }
        servers = {
            name: stack.enter_context(tonle(folder, upstream.url, *own, audit=False)) for name, own in flags.items()
        }
        found = measure_all(servers, scale, num_rounds)
        taken = httpx.get(taker.url).json()
    for stream in SIZES:
        show("streamed" if stream else "whole", {name: middle(found[name, stream]) for name in servers})
    print(f"the collector took {taken['posts']} posts, {taken['bytes'] / 1e6:.1f} MB")
    if not taken["posts"]:
        raise SystemExit("the collector was sent nothing: this was no measurement of tracing")


def measure_all(servers: dict[str, Running], scale: float, num_rounds: int) -> dict[tuple[str, bool], list[Level]]:
    found: dict[tuple[str, bool], list[Level]] = {}
    for _ in range(num_rounds):
        for stream, size in SIZES.items():
            for name, server in servers.items():
                level = measure(server, USERS, int(size * scale), stream=stream)
                found.setdefault((name, stream), []).append(level)
    return found


def show(kind: str, levels: dict[str, Level]) -> None:
    print(f"{kind}, {USERS} callers: requests/s · first byte p50 / p99 ms")
    for name, level in levels.items():
        per_s, cpu = level.per_s / levels[OFF].per_s, level.cpu_us / levels[OFF].cpu_us
        print(f"{name:>16} {level!s:>28}   requests/s x {per_s:.2f}, CPU {level.cpu_us:.0f} µs, x {cpu:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a quarter of the requests, one round")
    arguments = parser.parse_args()
    pin_self()
    print("cores are not divided" if len(CORES) < 2 else f"gateways on core {CORES[0]}, all else on {CORES[1]}")
    with tempfile.TemporaryDirectory() as name:
        compare(Path(name), 0.25 if arguments.quick else 1.0, 1 if arguments.quick else arguments.rounds)


if __name__ == "__main__":
    main()
