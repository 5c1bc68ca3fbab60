"""From an API key and an adapter's name down to the texts that guesses come from: a real server over a real engine, so that all
that lies between is as it is in use."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.fakes.adapters import write_adapter
from tests.fakes.checkpoints import tiny_model, tiny_tokenizer
from tonle.config.engine import EngineConfig
from tonle.config.serve import ServeConfig
from tonle.edge.listening import bind, url_of
from tonle.engine.build import build
from tonle.engine.front import Front
from tonle.engine.mailbox import ThreadMailbox
from tonle.engine.messages import Stop
from tonle.engine.speculate import Speculator
from tonle.engine.speculate.draft_cost import Worth
from tonle.engine.speculate.recent_answers import RecentAnswers, TenantAnswers
from tonle.engine.text import Text
from tonle.models.load.transformers_model import live_spec
from tonle.replica.serve import build_server

KEYS = ("first-key", "second-key")
MODELS = ("tiny", "adapted", "other")
LENGTH = 40


class Watched(RecentAnswers):
    """Notes whose texts are looked through, and to whose a text is added."""

    def __init__(self) -> None:
        super().__init__()
        self.looked_through: set[bytes] = set()
        self.added: list[bytes] = []

    def of(self, salt: bytes) -> TenantAnswers | None:
        self.looked_through.add(salt)
        return super().of(salt)

    def add(self, salt: bytes, answer: list[int]) -> None:
        self.added.append(salt)
        super().add(salt, answer)


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[str, Watched]]:
    """A server with two keys, its engine on a thread, and the texts of that engine."""
    aio = asyncio.get_running_loop()
    model = tiny_model("llama")
    lora = {name: str(folder / name) for name in MODELS[1:]}
    for seed, path in enumerate(lora.values()):
        write_adapter(Path(path), live_spec(model), seed=seed)
    mailbox = ThreadMailbox(lambda message: aio.call_soon_threadsafe(front.deliver, message) and None)
    front = Front(Text.from_live(tiny_tokenizer()), "tiny", mailbox.put)
    engine, card = build(model, EngineConfig(max_sequence_length=256, memory_pool_size=2**22, lora=lora), mailbox)
    front.deliver(engine.adapters)
    front.deliver(card)
    assert engine._scheduler.drafts is not None
    drafter = engine._scheduler.drafts._drafter.drafter
    assert isinstance(drafter, Speculator)
    drafter.answers = answers = Watched()
    # Whether guesses pay is measured. On a busy machine they may not, and then no text is looked through.
    drafter._cost_with_few.worth = lambda *args: Worth(0.0, None, False)  # type: ignore[method-assign]
    thread = threading.Thread(target=engine.run, daemon=True)
    thread.start()
    server, listener = build_server(front, ServeConfig(api_key=KEYS)), bind("127.0.0.1", 0)
    await server.start(listener)
    try:
        yield url_of(*listener.getsockname()[:2]), answers
    finally:
        await server.stop(drain_s=1)
        mailbox.put(Stop())
        thread.join(120)


def test_guesses_come_from_answers_to_the_same_key_and_adapter_only(tmp_path: Path) -> None:
    body: dict[str, Any] = {"prompt": [5, 6, 7, 8] * 4, "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True}

    async def ask(client: httpx.AsyncClient, answers: Watched, key: str, model: str) -> tuple[bytes, str]:
        """Whose texts the request used, and its answer."""
        answers.looked_through.clear()
        answers.added.clear()
        reply = await client.post(
            "/v1/completions", json={**body, "model": model}, headers={"Authorization": f"Bearer {key}"}
        )
        assert reply.status_code == 200, reply.text
        (salt,) = answers.added
        assert answers.looked_through == {salt}
        return salt, reply.json()["choices"][0]["text"]

    async def main() -> None:
        async with served(tmp_path) as (url, answers), httpx.AsyncClient(base_url=url, timeout=120) as client:
            found: dict[bytes, tuple[str, str]] = {}
            for key in KEYS:
                texts = []
                for model in MODELS:
                    salt, text = await ask(client, answers, key, model)
                    assert salt and salt not in found, "texts of another tenant or adapter"
                    found[salt] = key, model
                    texts.append(text)
                assert len(set(texts)) == len(MODELS), "adapters act"
            for salt, (key, model) in found.items():
                assert (await ask(client, answers, key, model))[0] == salt, "its own are found again"
                tenant = answers.of(salt)
                assert tenant is not None and len(tenant) == 2 * (LENGTH + 1), "two answers, and their ends"

    asyncio.run(main())
