"""`tonle top`: the figures of a running server in the terminal, from its /metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from tonle.cli import screen
from tonle.errors import TonleError

if TYPE_CHECKING:
    from tonle.cli.metrics_page import MetricsPage, Reading
    from tonle.cli.top_figures import Figures

DEFAULT_URL = "http://127.0.0.1:8000"
_INTERVAL_S = 1.0
_ONCE_S = 5.0
_RATES_S = 3.0  # rates are over at least this long, so that a second without a request is not a zero
_LATENCIES_S = 60.0
_KEPT = 300  # figures for sparklines
_HINT = "q to leave"
_QUIT_KEYS = (b"q", b"Q", b"\x1b", b"\x04", b"")  # also Escape, Ctrl-D, and a terminal that is gone


def top(
    url: Annotated[
        str, typer.Argument(metavar="URL", help=f"The server. Default: {DEFAULT_URL}.", show_default=False)
    ] = DEFAULT_URL,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            metavar="KEY",
            envvar="OPENAI_API_KEY",
            show_default=False,
            help="API key, if the server needs one for /metrics.",
        ),
    ] = None,
    interval: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            min=0.1,
            max=3600,
            show_default=False,
            help="Seconds between two readings. Default: 1; with --once 5.",
        ),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", metavar="", help="Print the figures of one interval and exit.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", metavar="", help="Print JSON: one line per interval, or one object with --once.")
    ] = False,
) -> None:
    """Watch a running server: load, latencies, caches, GPU, backends.

    Works with any Tonle server or gateway, and with vLLM. Press q to leave. If output is not a terminal, it prints once.

    [dim]Example:[/dim]  tonle top http://127.0.0.1:8000
    [dim]Example:[/dim]  tonle top --once --json | jq .latencies
    """
    from tonle.cli.metrics_page import MetricsPage

    console = screen.stdout()
    live = not once and not as_json and console.is_terminal and not console.is_dumb_terminal
    pause_s = interval or (_INTERVAL_S if live or (as_json and not once) else _ONCE_S)
    page = MetricsPage(url, api_key=api_key)
    asyncio.run(_run(page, pause_s, live=live, as_json=as_json, once=once or not as_json))


async def _run(page: MetricsPage, interval_s: float, *, live: bool, as_json: bool, once: bool) -> None:
    try:
        await (_watch(page, interval_s) if live else _print(page, interval_s, as_json=as_json, once=once))
    finally:
        page.close()


class Watched:
    """Readings of the last minute, and the figures that came of them."""

    def __init__(self) -> None:
        self._readings: deque[Reading] = deque()
        self.figures: deque[Figures] = deque(maxlen=_KEPT)

    def add(self, reading: Reading) -> None:
        from tonle.cli.top_figures import figures

        readings = self._readings
        readings.append(reading)
        while len(readings) > 2 and readings[1].at_s <= reading.at_s - _LATENCIES_S:
            readings.popleft()
        if len(readings) > 1:
            recent = next(each for each in reversed(readings) if _is_before(each, reading) or each is readings[0])
            self.figures.append(figures(readings[0], recent, reading))


def _is_before(reading: Reading, newest: Reading) -> bool:
    return reading.at_s <= newest.at_s - _RATES_S


async def _print(page: MetricsPage, interval_s: float, *, as_json: bool, once: bool) -> None:
    watched = Watched()
    watched.add(await page.read())
    while True:
        await asyncio.sleep(interval_s)
        watched.add(await page.read())
        now = watched.figures[-1]
        if as_json:
            typer.echo(json.dumps(now.as_json(), indent=2 if once else None))
        else:
            from tonle.cli.top_view import draw

            console = screen.stdout()
            columns = console.size.width
            console.print(draw(str(page.address), [now], columns=columns), soft_wrap=False)
        if once:
            return


async def _watch(page: MetricsPage, interval_s: float) -> None:
    """Until q or Ctrl-C. A server that goes away is waited for; one that never answered is an error."""
    from rich.live import Live

    from tonle.cli.top_view import draw

    watched, problem = Watched(), None
    watched.add(await page.read())
    quit_asked = asyncio.Event()
    console = screen.stdout()
    with _keys(quit_asked), Live(console=console, screen=True, auto_refresh=False) as view:
        view.update(f"[dim]{page.address}: first reading[/dim]", refresh=True)
        due_s = time.monotonic()
        while not quit_asked.is_set():
            due_s = max(due_s + interval_s, time.monotonic())
            if await _asked_within(quit_asked, due_s - time.monotonic()):
                return
            try:
                watched.add(await page.read())
                problem = None
            except TonleError as error:
                problem = error.message
            if watched.figures:
                shown = draw(
                    str(page.address), watched.figures, columns=console.size.width, problem=problem, hint=_HINT
                )
                view.update(shown, refresh=True)


async def _asked_within(event: asyncio.Event, seconds: float) -> bool:
    """Not with `asyncio.timeout`: one that has passed as it begins takes a Ctrl-C pressed before, while the screen was
    drawn, for its own, and swallows it. A slow machine is in that state at each interval."""
    asked = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([asked], timeout=seconds)
    finally:
        asked.cancel()
    return event.is_set()


@contextlib.contextmanager
def _keys(quit_asked: asyncio.Event) -> Iterator[None]:
    """Sets the event when q is pressed. Keys are not echoed meanwhile."""
    with screen.keys_not_echoed() as is_terminal:
        if not is_terminal:
            yield
            return
        loop, number = asyncio.get_running_loop(), sys.stdin.fileno()

        def on_key() -> None:
            if os.read(number, 64) in _QUIT_KEYS:
                quit_asked.set()

        loop.add_reader(number, on_key)
        try:
            yield
        finally:
            loop.remove_reader(number)
