"""`tonle explain` and servers that are not what it hopes for; with a real one it is tested in tests/gateway."""

from __future__ import annotations

from tests.unit.bench.scripted import Behaviour, serving
from tests.unit.cli.terminal import tonle
from tonle.cli.explain import _bar


def test_a_server_that_explains_nothing() -> None:
    with serving() as server:
        done = tonle("explain", "req-1", "--url", server.url)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "does not explain requests; `tonle serve` and `tonle gateway` do" in done.stderr
    assert server.asked[0].path == "/v1/requests/req-1/explain"


def test_the_key_is_sent() -> None:
    with serving(Behaviour(key="secret")) as server:
        without = tonle("explain", "req-1", "--url", server.url)
        tonle("explain", "req-1", "--url", server.url, OPENAI_API_KEY="secret")
    assert without.returncode == 1 and "needs an API key" in without.stderr
    assert server.asked[-1].headers["authorization"] == "Bearer secret"


def test_no_server() -> None:
    done = tonle("explain", "req-1", "--url", "http://127.0.0.1:1")
    assert done.returncode == 1 and "no server answers at http://127.0.0.1:1" in done.stderr


def test_bars_lie_where_their_spans_do() -> None:
    assert _bar(0.0, 0.5, 1.0, 8) == "████    "
    assert _bar(0.5, 0.25, 1.0, 8) == "    ██  "
    assert _bar(0.999, 0.001, 1.0, 8) == "       ▏", "never nothing, and never beyond the end"
    assert _bar(0.0, 0.0, 0.0, 4) == "    "
