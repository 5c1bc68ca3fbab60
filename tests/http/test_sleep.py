"""/sleep, /wake_up and /is_sleeping of a real server: for an admin's key alone, and the engine's memory is given back.

The engine that wakes is another process: what it finds on disk is the caller's own, and nobody else's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.fakes.checkpoints import save_folder
from tests.fakes.server import Server, tonle_serve

BODY = {"prompt": list(range(3, 53)), "max_tokens": 3, "temperature": 0}
PROMPT = [150, *range(3, 102)]  # 6 whole blocks of 16
OTHERS = [[number, *range(3, 100)] for number in range(200, 206)]  # they evict it


def call(server: Server, method: str, path: str, key: str = "boss", **more: Any) -> httpx.Response:
    return httpx.request(method, f"{server.url}{path}", headers={"authorization": f"Bearer {key}"}, timeout=60, **more)


def cached_tokens(server: Server, key: str, prompt: list[int]) -> int:
    answer = call(server, "POST", "/v1/completions", key, json={"prompt": prompt, "max_tokens": 1})
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def engine_bytes(server: Server) -> int:
    """Of all processes of the server but its own."""
    return sum(child.memory_info().rss for child in psutil.Process(server.process.pid).children(recursive=True))


def test_an_admin_puts_the_engine_to_sleep_and_wakes_it(tmp_path: Path) -> None:
    save_folder("llama", tmp_path / "tiny")
    flags = ["--device", "cpu", "--dtype", "float32", "--api-key", "caller", "--admin-key", "boss",
             "--kv-cache-memory", "96KiB", "--kv-offload-dir", str(tmp_path / "blocks")]  # fmt: skip
    with tonle_serve(tmp_path / "tiny", *flags) as server:
        first = call(server, "POST", "/v1/completions", "caller", json=BODY).json()["choices"]
        for method, path in (("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping")):
            assert call(server, method, path, "caller").status_code == 403
        assert call(server, "GET", "/is_sleeping").json() == {"is_sleeping": False}
        assert call(server, "POST", "/sleep?level=3").status_code == 400
        assert call(server, "POST", "/sleep?level=1&mode=wait").status_code == 400
        awake = engine_bytes(server)
        for prompt in (PROMPT, *OTHERS):
            assert cached_tokens(server, "caller", prompt) == 0
        for level in (1, 2):
            assert call(server, "POST", f"/sleep?level={level}").status_code == 200
            assert call(server, "GET", "/is_sleeping").json() == {"is_sleeping": True}
            refused = call(server, "POST", "/v1/completions", "caller", json=BODY)
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
            assert "it sleeps" in refused.text
            assert call(server, "GET", "/health/ready").status_code == 503
            if level == 2:
                assert awake > 50 * 2**20 > engine_bytes(server), "the engine's memory was not given back"
            assert call(server, "POST", "/wake_up?tags=weights").status_code == 400
            assert call(server, "POST", "/wake_up").status_code == 200
            assert call(server, "POST", "/v1/completions", "caller", json=BODY).json()["choices"] == first
        assert cached_tokens(server, "boss", PROMPT) == 0, "it is another caller's"
        assert cached_tokens(server, "caller", PROMPT) == 96
