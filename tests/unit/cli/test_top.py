"""`tonle top`: figures from two readings, of Tonle's names and vLLM's; what it draws, and what it says if it cannot."""

from __future__ import annotations

import asyncio
import io
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.unit.cli.terminal import terminal as on_terminal
from tonle.cli import top
from tonle.cli.app import app
from tonle.cli.metrics_page import Reading, parse
from tonle.cli.top_figures import Difference, Figures, Target, figures
from tonle.cli.top_view import draw, sparkline
from tonle.telemetry.percentile import percentile

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="org/model"}} 7.0
vllm:num_requests_waiting{{engine="0",model_name="org/model"}} 2.0
vllm:kv_cache_usage_perc{{engine="0",model_name="org/model"}} 0.25
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="0",model_name="org/model"}} {tokens}
# TYPE vllm:request_success_total counter
vllm:request_success_total{{engine="0",finished_reason="stop",model_name="org/model"}} {done}
vllm:request_success_total{{engine="0",finished_reason="length",model_name="org/model"}} 10.0
vllm:prefix_cache_queries_total{{engine="0",model_name="org/model"}} {tokens}
vllm:prefix_cache_hits_total{{engine="0",model_name="org/model"}} {done}
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{engine="0",le="0.1",model_name="org/model"}} {done}
vllm:time_to_first_token_seconds_bucket{{engine="0",le="0.25",model_name="org/model"}} {done}
vllm:time_to_first_token_seconds_bucket{{engine="0",le="+Inf",model_name="org/model"}} {done}
vllm:time_to_first_token_seconds_count{{engine="0",model_name="org/model"}} {done}
vllm:time_to_first_token_seconds_sum{{engine="0",model_name="org/model"}} 1.0
"""

GATEWAY = """\
tonle:gateway_requests_total{{http_status="200",status="ok"}} {done}
tonle:gateway_requests_total{{http_status="502",status="failed"}} {failed}
tonle:gateway_requests_total{{http_status="429",status="refused"}} 1.0
tonle:gateway_tokens_total{{kind="completion"}} {tokens}
tonle:gateway_tokens_total{{kind="prompt"}} 0.0
tonle:backend_up{{backend="a"}} 1.0
tonle:backend_up{{backend="b"}} 0.0
tonle:backend_up{{backend="c"}} 0.0
tonle:backend_draining{{backend="a"}} 0.0
tonle:backend_draining{{backend="b"}} 1.0
tonle:backend_requests_running{{backend="a"}} 3.0
tonle:backend_requests_total{{backend="a"}} {done}
tonle:backend_failures_total{{backend="a"}} {failed}
tonle:cache_hits_total {done}
tonle:cache_misses_total {done}
tonle:sla_target_seconds{{target="ttft"}} 0.2
tonle:sla_p95_seconds{{target="ttft"}} 0.412
tonle:sla_met{{target="ttft"}} 0.0
tonle:sla_burn_rate{{target="ttft"}} 3.4
tonle:alerts_firing{{kind="sla"}} 1.0
"""


def two(text: str, seconds: float = 2.0, **after: float) -> Figures:
    """Of a page whose numbers were 100 before."""
    names = set(re.findall(r"(?<!{){(\w+)}", text))
    older = parse(text.format(**dict.fromkeys(names, 100.0)), 10.0)
    newer = parse(text.format(**dict.fromkeys(names, 100.0) | after), 10.0 + seconds)
    return figures(older, older, newer)


def test_vllm() -> None:
    shown = two(VLLM, tokens=500.0, done=110.0)
    assert (shown.kind, shown.models) == ("vLLM", ["org/model"])
    assert (shown.requests_per_s, shown.output_tokens_per_s) == (5.0, 200.0)
    assert (shown.running, shown.waiting, shown.kv_usage) == (7.0, 2.0, 0.25)
    assert shown.prefix_hit_rate == 10 / 400
    (ttft,) = shown.latencies
    assert (ttft.name, ttft.p50, ttft.p95) == ("TTFT", pytest.approx(0.05), pytest.approx(0.095))
    assert shown.backends == [] and shown.cache_hit_rate is None and shown.gpu_utilization is None


def test_a_gateway() -> None:
    shown = two(GATEWAY, done=104.0, failed=102.0, tokens=300.0)
    assert shown.kind == "Tonle gateway"
    assert (shown.requests_per_s, shown.failed_per_s, shown.refused_per_s) == (3.0, 1.0, 0.0)
    assert shown.output_tokens_per_s == 100.0 and shown.running == 3.0 and shown.cache_hit_rate == 0.5
    assert [(each.name, each.state) for each in shown.backends] == [("a", "up"), ("b", "draining"), ("c", "down")]
    assert (shown.backends[0].requests_per_s, shown.backends[0].failures_per_s) == (2.0, 1.0)
    (target,) = shown.targets
    assert (target.name, target.p95_s, target.meets, target.burn_rate) == ("ttft", 0.412, False, 3.4)


def test_a_server_that_was_started_again_has_no_negative_rates() -> None:
    shown = two(VLLM, tokens=30.0, done=4.0)
    assert (shown.requests_per_s, shown.output_tokens_per_s) == (7.0, 15.0)  # what it has counted since
    assert shown.latencies[0].p50 is not None and shown.latencies[0].p50 > 0


def test_percentiles_are_between_the_bounds_of_the_right_bucket() -> None:
    draw_from, bounds = random.Random(3), [0.01, 0.05, 0.1, 0.5, 1.0, 5.0, float("inf")]

    def page(values: list[float], at_s: float) -> Reading:
        lines = [
            f'vllm:x_bucket{{le="{bound}"}} {sum(value <= bound for value in values)}'.replace('"inf"', '"+Inf"')
            for bound in bounds
        ]
        return parse("\n".join(lines) + "\n", at_s)

    before = [draw_from.expovariate(2) for _ in range(50)]
    for size in (1, 2, 19, 400):
        since = [draw_from.lognormvariate(-2, 1) for _ in range(size)]
        difference = Difference(page(before, 0.0), page(before + since, 1.0))
        for percent in (50, 95, 99):
            found = difference.percentile("vllm:x", percent)
            exact = percentile(sorted(since), percent)
            assert found is not None
            place = [bound >= exact for bound in bounds].index(True)
            low = bounds[place - 2] if place > 1 else 0.0
            assert low <= found <= min(bounds[min(place + 1, 6)], 5.0), (size, percent)
    nothing = Difference(page(before, 0.0), page(before, 1.0))
    assert nothing.percentile("vllm:x", 95) is None and nothing.percentile("vllm:y", 95) is None


def test_rates_are_of_the_last_seconds_and_percentiles_of_the_last_minute() -> None:
    watched = top.Watched()
    for second in range(100):
        watched.add(parse(VLLM.format(tokens=100.0 * second, done=float(second)), 1000.0 + second))
    now = watched.figures[-1]
    assert (now.over_s, now.latency_over_s) == (3.0, 60.0)
    assert now.output_tokens_per_s == 100.0


def test_bars() -> None:
    assert sparkline([0, 1, 2, None, 4], 10) == "▁▃▅ █"
    assert sparkline([0.0, 0.0], 10) == "▁▁" and sparkline([1, 2, 3], 2) == "▆█" and sparkline([1.0], 0) == ""
    assert sparkline([0.5], 5, most=1.0) == "▅"


@pytest.mark.parametrize("columns", [60, 80, 140, 200])
def test_it_fits_the_terminal(columns: int) -> None:
    for shown in (two(VLLM, tokens=500.0, done=110.0), two(GATEWAY, done=104.0, failed=102.0, tokens=1e7)):
        console = Console(file=io.StringIO(), width=columns, force_terminal=True, color_system=None)
        console.print(draw("http://127.0.0.1:8000", [shown] * 300, columns=columns, problem="it went away"))
        text = console.file.getvalue()  # type: ignore[attr-defined]
        lines = text.splitlines()
        assert len(lines) <= 24 and max(map(len, lines)) <= columns
        assert "it went away" in text and "p95" in text


@pytest.mark.parametrize(
    ("p95_s", "meets", "burn_rate", "verdict"),
    [
        (1.5, True, 0.4, "met, 0.4×"),
        (6.37, False, 12.5, "missed, 12.5×"),
        (6.37, False, 0.9, "recovering, 0.9×"),
        (6.37, True, 1.1, "too few requests"),
        (None, True, 0.0, "no requests yet"),
    ],
)
def test_what_is_said_of_a_target_is_not_cut_off(
    p95_s: float | None, meets: bool, burn_rate: float, verdict: str
) -> None:
    target = Target("e2e", 2.0, p95_s, meets, burn_rate)
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    console.print(draw("http://h", [replace(two(VLLM, done=104.0, tokens=300.0), targets=[target])], columns=80))
    (line,) = [line for line in console.file.getvalue().splitlines() if "of 2.00 s" in line]  # type: ignore[attr-defined]
    assert line.rstrip().endswith(verdict)


def test_names_of_others_cannot_draw() -> None:
    page = GATEWAY.replace('backend="a"', 'backend="[red]a\x1b[2J"')
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    console.print(draw("http://h", [two(page, done=104.0, failed=102.0, tokens=300.0)], columns=100))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[red]a" in text and "\x1b[2J" not in text


# -- the command


@contextmanager
def server(status: int, body: str, headers: dict[str, str] | None = None) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body.encode())))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: Any) -> None:
            pass

    place = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=place.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{place.server_port}"
    finally:
        place.shutdown()


@pytest.mark.parametrize(
    ("status", "body", "headers", "words"),
    [
        (200, "<html><body>Welcome</body></html>", {}, "not in Prometheus' text format"),
        (200, "node_cpu_seconds_total 1.0\n", {}, "none with a name of vLLM's or Tonle's"),
        (401, '{"error": {"message": "no key"}}', {}, "needs an API key (no key). Give one with --api-key"),
        (403, "{}", {}, "the scope metrics or admin"),
        (404, "nothing here", {}, "/metrics answers 404"),
        (307, "", {"Location": "http://elsewhere/metrics"}, "redirects to http://elsewhere/metrics; give that address"),
        (500, "oops", {}, "the server answered 500"),
    ],
)
def test_what_is_wrong_is_said(status: int, body: str, headers: dict[str, str], words: str) -> None:
    with server(status, body, headers) as url:
        done = CliRunner().invoke(app, ["top", url, "--once"], env={"COLUMNS": "300", "OPENAI_API_KEY": None})
    assert done.exit_code == 1 and words in done.stderr, done.stderr
    assert "--url" not in done.stderr and "OpenAI-compatible" not in done.stderr


def test_no_server() -> None:
    done = CliRunner().invoke(app, ["top", "127.0.0.1:9"], env={"COLUMNS": "300"})
    assert (
        done.exit_code == 1
        and "no server answers at http://127.0.0.1:9" in done.stderr
        and "Is it running?" in done.stderr
    )


@pytest.mark.parametrize(("key", "status"), [("q", 0), ("\x03", 130)])
def test_it_draws_until_it_is_told_to_stop(key: str, status: int) -> None:
    with (
        server(200, VLLM.format(tokens=1.0, done=1.0)) as url,
        on_terminal("top", url, "--interval", "0.1") as terminal,
    ):
        terminal.expect("org/model")
        terminal.expect("p95")
        terminal.type(key)
        assert terminal.wait() == status
        assert "Traceback" not in terminal.seen
        assert terminal.raw.rindex(b"\x1b[?1049l") > terminal.raw.index(b"\x1b[?1049h"), "the screen is as it was"


@pytest.mark.parametrize("late", [False, True])
def test_ctrl_c_while_it_draws_ends_it(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`late`: drawing takes longer than an interval, so that the next reading is due at once."""
    num_drawn = 0

    class Page:
        address = "http://h"

        async def read(self) -> Reading:
            return parse(VLLM.format(tokens=1.0, done=1.0), time.monotonic())

        def close(self) -> None: ...

    def pressed(*args: Any, **options: Any) -> str:
        nonlocal num_drawn
        num_drawn += 1
        assert num_drawn < 10, "Ctrl-C did not end it"
        if num_drawn == 2:
            signal.raise_signal(signal.SIGINT)
        return ""

    monkeypatch.setattr("tonle.cli.top_view.draw", pressed)
    page: Any = Page()
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(top._run(page, -1.0 if late else 0.01, live=True, as_json=False, once=False))
    assert num_drawn == 2
