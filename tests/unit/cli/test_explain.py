"""`tonle explain` and servers that are not what it hopes for; with a real one it is tested in tests/gateway."""

from __future__ import annotations

import pytest

from tests.unit.bench.scripted import Behaviour, json_reply, serving
from tests.unit.cli.terminal import tonle
from tonle.cli.explain import _bar


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (json_reply(404, {"detail": "Not Found"}), "does not explain requests; `tonle serve` and `tonle gateway` do"),
        (json_reply(200, {"status": "ok"}), "does not explain requests"),
        (json_reply(401, {"error": {"message": "an API key is required"}}), "needs an API key"),
    ],
)  # fmt: skip
def test_other_replies(reply: bytes, said: str) -> None:
    with serving(Behaviour(script=lambda asked: [reply])) as server:
        done = tonle("explain", "req-1", "--url", server.url)
    assert done.returncode == 1 and said in done.stderr and done.stderr.count("\n") == 1


def test_no_server() -> None:
    done = tonle("explain", "req-1", "--url", "http://127.0.0.1:1")
    assert done.returncode == 1 and "no server answers at http://127.0.0.1:1" in done.stderr


def test_bars_lie_where_their_spans_do() -> None:
    assert _bar(0.0, 0.5, 1.0, 8) == "████    "
    assert _bar(0.5, 0.25, 1.0, 8) == "    ██  "
    assert _bar(0.999, 0.001, 1.0, 8) == "       ▏", "never nothing, and never beyond the end"
    assert _bar(0.0, 0.0, 0.0, 4) == "    "
