"""One model, one gateway and one browser for all tests of this folder."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import yaml

from tests.browser import chromium
from tests.fakes.server import tonle_gateway, tonle_serve
from tonle.models.source import ModelSource

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ADMIN_KEY = "tonle-the-operators-secret"
QUESTIONS = ("Name three rivers.", "What is the capital of France?", "Write a haiku about rain.", "Count to ten.")


@dataclass(frozen=True, slots=True)
class House:
    """`tonle gateway` with keys, audit and an experiment, in front of `tonle serve` with the default model."""

    url: str
    backend_url: str
    model: str
    admin_key: str
    reader_key: str  # scope dashboard
    user_key: str  # scope models
    audit_dir: Path

    def ask(self, question: str, **fields: Any) -> httpx.Response:
        body = {"model": self.model, "max_tokens": 24, "messages": [{"role": "user", "content": question}], **fields}
        headers = {"authorization": f"Bearer {self.user_key}"}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, headers=headers, timeout=120)

    @contextlib.contextmanager
    def load(self, users: int = 2) -> Iterator[None]:
        """Requests one after the other, half of them streams, as long as it is entered."""
        stop = threading.Event()

        def user(number: int) -> None:
            for turn in itertools.count(number):
                if stop.is_set():
                    return
                question = f"{QUESTIONS[turn % len(QUESTIONS)]} ({number}.{turn})"
                self.ask(question, stream=turn % 2 == 0)

        threads = [threading.Thread(target=user, args=(number,), daemon=True) for number in range(users)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join(120)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if importlib.util.find_spec("playwright") is None or chromium.find() is None:
        pytest.skip(chromium.MISSING)
    with chromium.running() as found:
        yield found


@pytest.fixture(scope="session")
def house(browser: Browser, default_model: ModelSource, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("house")
    with tonle_serve(None, "--enable-lora", "--trust-salt") as replica:
        model = httpx.get(f"{replica.url}/v1/models", timeout=60).json()["data"][0]["id"]
        arms = [{"name": "a", "weight": 1, "model": model}, {"name": "b", "weight": 1, "model": model}]
        settings = {
            "backends": [{"url": replica.url, "name": "replica-a"}],
            "admin_key": [ADMIN_KEY],
            "state_db": str(folder / "keys.db"),
            "history_db": str(folder / "history.db"),
            "audit_dir": str(folder / "audit"),
            "price_per_hour": 2.5,
            "sla_ttft_p95": "5s",
            "experiments": [{"name": "same-model", "model": "river", "arms": arms}],
            "cache": "off",
        }
        (folder / "tonle.yaml").write_text(yaml.safe_dump(settings))
        with tonle_gateway("--config", str(folder / "tonle.yaml")) as gateway:
            keys = {
                name: _key(gateway.url, name, scopes)
                for name, scopes in (("reader", ["dashboard"]), ("user", ["models"]))
            }
            yield House(gateway.url, replica.url, model, ADMIN_KEY, keys["reader"], keys["user"], folder / "audit")


def _key(url: str, name: str, scopes: list[str]) -> str:
    reply = httpx.post(
        f"{url}/admin/keys", json={"name": name, "scopes": scopes}, headers={"authorization": f"Bearer {ADMIN_KEY}"}
    )
    assert reply.status_code == 201, reply.text
    secret: str = reply.json()["key"]
    return secret
