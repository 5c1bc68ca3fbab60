"""Memory and time per update of the dashboard in Chromium, under a steady load.

Does: put a gateway in front of a stub, fill its list of requests, keep a rate, open the page, and ask the browser's own
instruments. Does not: judge the server (`dashboard_server.py`).

The time of an update is what the page's main thread did from one event to the next (scripts, style, layout, painting
commands, collecting garbage); what other threads draw is not in it. It is told as processor time and as time that passed:
the two differ where the browser, the servers and the load share the cores. Memory is the private memory of the page's process,
as the browser's task manager shows it; its code, which all pages share, is in RSS only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from tests.browser import chromium
from tests.browser.signed_in import go_to, signed_in

from benchmarks.gateway_load import KEY, Arrival, body_of, drive
from benchmarks.gateway_servers import stub, tonle
from benchmarks.needs import development_tool
from benchmarks.tables import markdown_table, print_wide
from tonle.edge.client import Address, HttpClient, UpstreamError
from tonle.edge.listening import run

GAP_MS = 5.0  # between the tokens of a stream: requests overlap
ADMIN_KEY = "tonle-dashboard-benchmark"
MAX_MB, MAX_MS = 100.0, 16.0
PAGES = ("overview", "requests", "overview, 1400 x 4000", "keys")
TALL = 4000  # pixels: all charts are in view
PARTS = {"ScriptDuration": "script", "RecalcStyleDuration": "style", "LayoutDuration": "layout"}
PROFILED = 15  # functions


@dataclass
class Watched:
    """One page; an entry of each list is one update."""

    name: str
    task_ms: list[float] = field(default_factory=list)  # processor time
    passed_ms: list[float] = field(default_factory=list)
    parts_ms: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in PARTS.values()})
    heap_mb: float = 0.0  # after collecting garbage
    private_mb: list[float] = field(default_factory=list)
    rss_mb: list[float] = field(default_factory=list)
    top: list[tuple[str, float]] = field(default_factory=list)  # function, ms per update


@contextlib.contextmanager
def steady_load(url: str, per_s: float) -> Iterator[None]:
    """So many requests begin each second, half of them streams and one in fifty for a model that does not exist."""
    stop = threading.Event()

    async def keep() -> None:
        client = HttpClient(Address.parse(url), api_key=KEY)
        kinds = [body_of(stream=False), body_of(stream=True)] * 25
        kinds[-1] = body_of(stream=True, model="no-such-model")
        requests = [client.request("POST", "/v1/chat/completions", body, {}) for body in kinds]
        under_way: set[asyncio.Task[None]] = set()
        loop = asyncio.get_running_loop()
        began_s, number = loop.time(), 0
        while not stop.is_set():
            task = loop.create_task(_send(client, requests[number % len(requests)]))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
            number += 1
            await asyncio.sleep(max(0.0, began_s + number / per_s - loop.time()))
        await asyncio.gather(*under_way)
        client.close()

    thread = threading.Thread(target=run, args=(keep(),), name="load")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


async def _send(client: HttpClient, request: Any) -> None:
    with contextlib.suppress(UpstreamError):
        await client.send(request, Arrival(), first_s=60, silence_s=60)


def renderer_memory(pid: int) -> tuple[float, float]:
    """Private and resident, MB."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    sizes = {name: int(fields[name].split()[0]) / 1e3 for name in ("RssAnon", "VmSwap", "VmRSS")}
    return sizes["RssAnon"] + sizes["VmSwap"], sizes["VmRSS"]


class Instruments:
    """The browser's own, over its debugging protocol."""

    def __init__(self, page: Any) -> None:
        self._page = page
        self._cdp = page.context.new_cdp_session(page)
        self._cdp.send("Performance.enable", {"timeDomain": "threadTicks"})
        self._clock = page.context.new_cdp_session(page)
        self._clock.send("Performance.enable", {"timeDomain": "timeTicks"})
        self._cdp.send("Network.enable")
        self._events = 0
        self._cdp.on("Network.eventSourceMessageReceived", self._count)
        self._browser = page.context.browser.new_browser_cdp_session()

    def _count(self, _: Any) -> None:
        self._events += 1

    def metrics(self) -> dict[str, float]:
        found = {each["name"]: each["value"] for each in self._cdp.send("Performance.getMetrics")["metrics"]}
        passed = {each["name"]: each["value"] for each in self._clock.send("Performance.getMetrics")["metrics"]}
        return {**found, "passed": passed["TaskDuration"]}

    def pid(self) -> int:
        """Of the renderer that computed most: the others are spare."""
        found = self._browser.send("SystemInfo.getProcessInfo")["processInfo"]
        return int(max((each for each in found if each["type"] == "renderer"), key=lambda each: each["cpuTime"])["id"])

    def next_update(self) -> None:
        """Until the page has taken the next event."""
        seen = self._events
        for _ in range(100):
            self._page.wait_for_timeout(100)
            if self._events > seen:
                self._page.wait_for_timeout(400)
                return
        raise SystemExit("the page gets no events: is its connection to the server lost?")

    def watch(self, name: str, seconds: int, *, profile: bool) -> Watched:
        watched, pid = Watched(name), self.pid()
        if profile:
            self._cdp.send("Profiler.enable")
            self._cdp.send("Profiler.start")
        self.next_update()
        before = self.metrics()
        for _ in range(seconds):
            self.next_update()
            after = self.metrics()
            watched.task_ms.append((after["TaskDuration"] - before["TaskDuration"]) * 1e3)
            watched.passed_ms.append((after["passed"] - before["passed"]) * 1e3)
            for metric, part in PARTS.items():
                watched.parts_ms[part].append((after[metric] - before[metric]) * 1e3)
            private_mb, rss_mb = renderer_memory(pid)
            watched.private_mb.append(private_mb)
            watched.rss_mb.append(rss_mb)
            before = after
        if profile:
            watched.top = top_functions(self._cdp.send("Profiler.stop")["profile"], seconds)
        self._cdp.send("HeapProfiler.collectGarbage")
        watched.heap_mb = self.metrics()["JSHeapUsedSize"] / 1e6
        return watched


def top_functions(profile: dict[str, Any], updates: int) -> list[tuple[str, float]]:
    """By time of their own."""
    nodes = {node["id"]: node["callFrame"] for node in profile["nodes"]}
    spent: dict[str, float] = {}
    for node, passed_us in zip(profile["samples"], profile["timeDeltas"], strict=True):
        frame = nodes[node]
        file = frame["url"].rpartition("/")[2]
        name = (
            f"{frame['functionName'] or '(unnamed)'} {file}:{frame['lineNumber'] + 1}"
            if file
            else frame["functionName"]
        )
        spent[name] = spent.get(name, 0.0) + passed_us / 1e3
    spent.pop("(idle)", None)
    ordered = sorted(spent.items(), key=lambda item: -item[1])[:PROFILED]
    return [(name, ms / updates) for name, ms in ordered]


def measure(url: str, seconds: int, *, profile: bool) -> list[Watched]:
    found = []
    with chromium.running() as browser, signed_in(browser, url, ADMIN_KEY, "requests") as page:
        page.wait_for_function("() => document.querySelectorAll('.open-row').length > 5")
        instruments = Instruments(page)
        for name in PAGES:
            is_tall = "x" in name.partition(",")[2]
            page.set_viewport_size({"width": 1400, "height": TALL if is_tall else 1000})
            go_to(page, name.partition(",")[0])
            instruments.next_update()
            found.append(instruments.watch(name, seconds, profile=profile))
    return found


def row_of(watched: Watched) -> list[str]:
    ordered = sorted(watched.task_ms)
    return [
        watched.name, f"{watched.heap_mb:.1f}", f"{max(watched.private_mb):.0f}", f"{max(watched.rss_mb):.0f}",
        f"{mean(ordered):.1f}", f"{ordered[int(len(ordered) * 0.95)]:.1f}",
        *(f"{mean(values):.1f}" for values in watched.parts_ms.values()), f"{mean(watched.passed_ms):.1f}",
    ]  # fmt: skip


def main(folder: Path, arguments: argparse.Namespace) -> int:
    development_tool("playwright.sync_api")
    if chromium.find() is None:
        raise SystemExit(chromium.MISSING)
    with (
        stub(folder, GAP_MS) as upstream,
        tonle(folder, upstream.url, "--admin-key", ADMIN_KEY, audit=False) as gateway,
    ):
        level = run(drive(gateway.url, 20, arguments.kept, stream=False))
        if level.num_failed:
            raise SystemExit(f"{level.num_failed} of the first requests failed")
        with steady_load(gateway.url, arguments.per_s):
            pages = measure(gateway.url, arguments.seconds, profile=arguments.profile)
    console = Console()
    titles = ["page", "JS heap, MB", "private, MB", "RSS, MB", "update: CPU ms", "p95", *PARTS.values(), "passed, ms"]
    print_wide(markdown_table(titles, [row_of(watched) for watched in pages]), console)
    most_mb = max(max(watched.private_mb) for watched in pages)
    most_ms = max(mean(watched.task_ms) for watched in pages)
    console.print(f"memory {most_mb:.0f} MB of {MAX_MB:.0f}: {_verdict(most_mb < MAX_MB)}", highlight=False)
    console.print(f"time per update {most_ms:.1f} ms of {MAX_MS:.0f}: {_verdict(most_ms < MAX_MS)}", highlight=False)
    for watched in pages:
        if watched.top:
            console.print(f"{watched.name}: ms per update by function", highlight=False)
        for name, ms in watched.top:
            console.print(f"  {ms:6.2f}  {name}", highlight=False, markup=False)
    return 0 if most_mb < MAX_MB and most_ms < MAX_MS else 1


def _verdict(holds: bool) -> str:
    return "PASS" if holds else "MISS"
