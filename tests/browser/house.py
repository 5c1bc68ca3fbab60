"""What the browser is pointed at: a gateway with keys, an audit trail and an experiment, in front of real models.

Does: start and stop it, ask it questions as its users do, read what it tells programs. Does not: drive a browser.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.fakes.adapters import write_adapter
from tests.fakes.server import tonle_gateway, tonle_serve
from tonle.models.read_spec import read_spec
from tonle.models.source import resolve

ADMIN_KEY = "tonle-the-operators-secret"
QUESTIONS = ("Name three rivers.", "What is the capital of France?", "Write a haiku about rain.", "Count to ten.")
NAMES = ("replica-a", "replica-b", "replica-c")
SCOPES = {"reader": ["dashboard"], "user": ["models"]}


@dataclass(frozen=True, slots=True)
class House:
    """`tonle gateway` in front of `tonle serve` with the default model."""

    url: str
    backend_url: str  # of the first replica, which has no keys
    model: str
    admin_key: str
    reader_key: str  # scope dashboard
    user_key: str  # scope models
    folder: Path

    @property
    def audit_dir(self) -> Path:
        return self.folder / "audit"

    def ask(self, question: str, **fields: Any) -> httpx.Response:
        body = {"model": self.model, "max_tokens": 24, "messages": [{"role": "user", "content": question}], **fields}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, headers=bearer(self.user_key), timeout=120)

    def told(self, path: str) -> Any:
        """What an admin's program reads: "dashboard/api/requests", "admin/backends"."""
        return httpx.get(f"{self.url}/{path}", headers=bearer(self.admin_key), timeout=30).json()

    def make_key(self, name: str, *scopes: str) -> tuple[str, str]:
        """Its id and its secret."""
        made = _make_key(self.url, name, list(scopes))
        return made["id"], made["key"]

    def revoke(self, key_id: str) -> None:
        reply = httpx.delete(f"{self.url}/admin/keys/{key_id}", headers=bearer(self.admin_key), timeout=30)
        assert reply.is_success, reply.text

    def adapter(self, name: str) -> Path:
        """A PEFT folder for the default model."""
        path = self.folder / name
        if not path.exists():
            write_adapter(path, read_spec(resolve(None, progress=False)), modules=["q"], layers=[0], strength=0.01)
        return path

    @contextlib.contextmanager
    def load(self, users: int = 2, **fields: Any) -> Iterator[None]:
        """Requests one after the other, half of them streams, as long as it is entered."""
        stop = threading.Event()

        def user(number: int) -> None:
            for turn in itertools.count(number):
                if stop.is_set():
                    return
                question = f"{QUESTIONS[turn % len(QUESTIONS)]} ({number}.{turn})"
                with contextlib.suppress(httpx.TransportError):
                    self.ask(question, stream=turn % 2 == 0, **fields)

        threads = [threading.Thread(target=user, args=(number,), daemon=True) for number in range(users)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join(120)


@contextlib.contextmanager
def running(folder: Path, *, num_replicas: int = 1) -> Iterator[House]:
    """Its files are in `folder`."""
    with contextlib.ExitStack() as stack:
        replicas = [
            stack.enter_context(tonle_serve(None, "--enable-lora", "--trust-salt")) for _ in range(num_replicas)
        ]
        model = httpx.get(f"{replicas[0].url}/v1/models", timeout=60).json()["data"][0]["id"]
        named = zip(NAMES, replicas, strict=False)
        backends = [{"url": replica.url, "name": name} for name, replica in named]
        (folder / "tonle.yaml").write_text(yaml.safe_dump(_settings(folder, backends, model)))
        gateway = stack.enter_context(tonle_gateway("--config", str(folder / "tonle.yaml")))
        keys = {name: _make_key(gateway.url, name, scopes)["key"] for name, scopes in SCOPES.items()}
        yield House(gateway.url, replicas[0].url, model, ADMIN_KEY, keys["reader"], keys["user"], folder)


def _settings(folder: Path, backends: list[dict[str, str]], model: str) -> dict[str, Any]:
    arms = [{"name": "a", "weight": 1, "model": model}, {"name": "b", "weight": 1, "model": model}]
    return {
        "backends": backends,
        "admin_key": [ADMIN_KEY],
        "state_db": str(folder / "keys.db"),
        "history_db": str(folder / "history.db"),
        "audit_dir": str(folder / "audit"),
        "price_per_hour": 2.5,
        "sla_p95": "30s",
        "sla_ttft_p95": "5s",
        "experiments": [{"name": "same-model", "model": "river", "arms": arms}],
        "cache": "off",
    }


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def _make_key(url: str, name: str, scopes: list[str]) -> dict[str, str]:
    body = {"name": name, "scopes": scopes}
    reply = httpx.post(f"{url}/admin/keys", json=body, headers=bearer(ADMIN_KEY), timeout=30)
    assert reply.status_code == 201, reply.text
    made: dict[str, str] = reply.json()
    return made
