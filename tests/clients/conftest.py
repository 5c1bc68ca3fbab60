"""One `tonle gateway` in front of `tonle serve` with the default model, for all clients of this folder.

Clients that are not installed are skipped by their files. None of them may touch a network, nor tell anyone that they run.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

from tests.fakes.server import Server

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else importing it asks the network for prices
os.environ["LANGSMITH_TRACING"] = "false"

KEY = "key-of-clients"


@dataclass(frozen=True)
class Place:
    """Where clients ask."""

    url: str  # with the /v1
    model: str
    audit_dir: Path  # of the gateway


@contextlib.contextmanager
def tonle_gateway(folder: Path, backend: str) -> Iterator[str]:
    """Gives the base URL."""
    settings, log = folder / "tonle.yaml", folder / "log"
    settings.write_text(
        f"port: 0\napi_key: [{KEY}]\naudit_dir: {folder}/audit\nstate_db: {folder}/state.db\n"
        f"backends:\n  - url: {backend}\n    name: only\n"
    )
    with log.open("wb") as output:
        command = [sys.executable, "-m", "tonle", "gateway", "--config", str(settings)]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        for _ in range(1200):
            if found := re.search(r"http://127\.0\.0\.1:\d+(?=/v1)", log.read_text()):
                yield found.group()
                return
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        raise AssertionError(log.read_text())
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="session")
def places(default_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Place]]:
    folder = tmp_path_factory.mktemp("gateway")
    with tonle_gateway(folder, default_server.url) as gateway:
        urls = {"serve": f"{default_server.url}/v1", "gateway": f"{gateway}/v1"}
        with openai.OpenAI(base_url=urls["gateway"], api_key=KEY) as client:
            model = client.models.list().data[0].id
        yield {name: Place(url, model, folder / "audit") for name, url in urls.items()}


@pytest.fixture
def gateway(places: dict[str, Place]) -> Place:
    """The server is behind it, so what passes here passes there; the other fixture is for what may differ."""
    return places["gateway"]


@pytest.fixture(params=["serve", "gateway"])
def place(request: pytest.FixtureRequest, places: dict[str, Place]) -> Place:
    return places[request.param]
