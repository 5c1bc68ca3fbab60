"""`tonle serve --tensor-parallel-size 2`: what happens when a rank dies."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.fakes.checkpoints import save_folder
from tests.fakes.server import Server, tonle_serve
from tests.http.serving import events
from tests.http.test_frontends import CONTEXT, LONG, SHORT, wait_for


def rank_pids(server: Server) -> list[int]:
    found = []
    for child in psutil.Process(server.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended since
            if "tonle.engine.ranks.rank_process" in child.cmdline():
                found.append(child.pid)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    save_folder("llama", path, max_position_embeddings=CONTEXT)
    return path


def test_a_rank_is_killed(folder: Path) -> None:
    flags = ["-tp", "2", "--device", "cpu", "--kv-cache-memory", "64MiB", "--max-num-seqs", "4"]
    with tonle_serve(folder, *flags) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        text = client.post("/v1/completions", json=SHORT).json()["choices"][0]["text"]
        (old,) = rank_pids(server)
        engine = server.engine_pid()
        streaming = threading.Event()

        def stream() -> str:
            with client.stream("POST", "/v1/completions", json=LONG) as reply:
                pieces = reply.iter_text()
                first = next(pieces)
                streaming.set()
                return first + "".join(pieces)

        with ThreadPoolExecutor(2) as pool:
            streamed = pool.submit(stream)
            waiting = pool.submit(client.post, "/v1/completions", json={**LONG, "stream": False})
            assert streaming.wait(60)
            os.kill(old, signal.SIGKILL)
            assert waiting.result(120).status_code >= 500
            *_, last = (each for each in events(streamed.result(120)) if each != "[DONE]")
            assert "the engine" in last["error"]["message"]
        wait_for(lambda: not psutil.pid_exists(engine), "the old engine is still there")
        server.wait_ready()
        assert client.post("/v1/completions", json=SHORT).json()["choices"][0]["text"] == text
        (new,) = rank_pids(server)
        assert new != old and not psutil.pid_exists(old)
        assert "rank 1 of the model is gone (signal SIGKILL)" in server.log.read_text()
        os.kill(server.engine_pid(), signal.SIGKILL)
        wait_for(lambda: not psutil.pid_exists(new), "it outlived rank 0")
