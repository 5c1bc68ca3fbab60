"""Two servers with a small random model behind a gateway: adapters come, are replaced and go while requests run.

One is `tonle serve` with two front ends, one runs in this process.

The clients are `http.client`; what an adapter must answer is what `transformers` answers with merged weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from safetensors.torch import load_file, save_file

from tests.fakes.adapters import merge, write_adapter
from tests.fakes.checkpoints import save_folder, tiny_model, tiny_tokenizer
from tests.fakes.server import tonle_serve
from tests.gateway.running_gateway import ADMIN, KEY, RunningGateway, read_records, run, running_gateway
from tonle.audit.verify import verify
from tonle.config.engine import EngineConfig
from tonle.config.routing import BackendConfig
from tonle.config.serve import ServeConfig
from tonle.edge.listening import bind, url_of
from tonle.engine.inference_engine import InferenceEngine
from tonle.models.read_spec import read_spec
from tonle.models.source import resolve
from tonle.replica.serve import serve

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PROMPTS = ("the quick brown fox", "what is the capital of that land?", "សួស្ដី តើអ្នកសុខសប្បាយទេ?")
NUM_TOKENS = 12
FLAGS = ("--kv-cache-memory", "64MiB", "--max-num-seqs", "4", "--trust-salt", "--served-model-name", "m", "--device", "cpu",
         "--dtype", "float32", "--enable-lora", "--frontends", "2")  # fmt: skip


@dataclass
class World:
    folder: Path
    urls: list[str]
    digests: dict[str, str]  # by adapter
    answers: dict[str, list[list[int]]]  # tokens that the base and each adapter's merged weights answer

    def path(self, adapter: str) -> str:
        return str(self.folder / adapter)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: str

    @property
    def tokens(self) -> list[int]:
        return [token for choice in self._choices() for token in choice.get("token_ids") or ()]

    @property
    def error(self) -> str:
        return str(json.loads(self.body)["error"]["message"])

    def _choices(self) -> Iterator[Any]:
        if not self.headers["content-type"].startswith("text/event-stream"):
            yield from json.loads(self.body)["choices"]
            return
        *events, last = [line[6:] for line in self.body.splitlines() if line.startswith("data: ")]
        assert last == "[DONE]", self.body
        for event in events:
            assert "error" not in json.loads(event), event
            yield from json.loads(event)["choices"]


def post(url: str, path: str, body: Any, key: str = KEY) -> Answer:
    line = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
    try:
        line.request(
            "POST", path, json.dumps(body), {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        )
        reply = line.getresponse()
        return Answer(reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read().decode())
    finally:
        line.close()


def complete(url: str, model: str, prompt: str, **fields: Any) -> Answer:
    body = {"model": model, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, **fields}  # fmt: skip
    return post(url, "/v1/completions", body)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("adapters")
    model = folder / "m"
    save_folder("llama", model)
    spec = read_spec(resolve(model))
    adapters = {
        name: write_adapter(folder / name, spec, rank=4 * seed, seed=seed)
        for seed, name in enumerate(("khmer-qa", "medical-qa"), 1)
    }
    server = tonle_serve(model, *FLAGS, "--lora", f"at-start={folder / 'khmer-qa'}")
    with ThreadPoolExecutor() as pool:
        starting = pool.submit(server.__enter__)  # it starts while the answers are computed
        try:
            wanted = {"base": answers(tiny_model("llama"))}
            for name, adapter in adapters.items():
                wanted[name] = answers(merge(tiny_model("llama"), adapter))
            digests = {name: adapter.digest for name, adapter in adapters.items()}
            with server_here(model) as url:
                yield World(folder, [url, starting.result().url], digests, wanted)
        finally:
            server.__exit__(None, None, None)


@contextlib.contextmanager
def server_here(model: Path) -> Iterator[str]:
    """A server in this process, which has loaded torch already: a process of its own takes seconds for that."""
    listener, stop, is_ready = bind("127.0.0.1", 0), asyncio.Event(), threading.Event()
    config = EngineConfig(enable_lora=True, device="cpu", dtype="float32", memory_pool_size=2**26, max_batch_size=4)
    settings = ServeConfig(enable_lora=True, trust_salt=True)

    async def end() -> None:
        stop.set()

    with InferenceEngine(str(model), config=config) as engine:
        over = engine.on_front(serve(engine.front, settings, listener=listener, stop=stop, on_ready=is_ready.set))
        assert is_ready.wait(60)
        try:
            yield url_of(*listener.getsockname()[:2])
        finally:
            engine.on_front(end()).result(60)
            over.result(60)


def answers(model: Any) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        ids = tiny_tokenizer()(prompt, return_tensors="pt").input_ids
        answer = model.generate(ids, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
        found.append(answer[0, ids.shape[1] :].tolist())
    return found


def behind_a_gateway(world: World, folder: Path, test: Callable[[str], None], **settings: Any) -> None:
    """`test` is called on a thread, with the gateway's URL."""
    backends = lambda: tuple(BackendConfig(url=url, name=f"r{n}") for n, url in enumerate(world.urls))  # noqa: E731

    async def main() -> None:
        async with running_gateway(folder, backends=backends, **settings) as place:
            assert isinstance(place, RunningGateway)
            await asyncio.to_thread(test, place.url)

    run(main())


def test_loaded_used_and_removed_under_load(world: World, tmp_path: Path) -> None:
    def test(url: str) -> None:
        failed: list[str] = []
        seen: dict[str, int] = {"m": 0, "khmer-qa": 0}
        names = ["m"]
        removals = 0  # a request chosen before a removal may arrive after it, and is then refused
        stop = threading.Event()

        def caller(number: int) -> None:
            for turn in itertools.count(number):
                if stop.is_set():
                    return
                before, choice, index = removals, tuple(names), turn % len(PROMPTS)
                model = choice[turn % len(choice)]
                reply = complete(url, model, PROMPTS[index], stream=turn % 2 == 0)
                if reply.status == 404 and model != "m" and before != removals:
                    continue
                wanted = world.answers["base" if model == "m" else model][index]
                if reply.status != 200 or reply.tokens != wanted:
                    failed.append(f"{model}: {reply.status} {reply.body[:300]}")
                    return
                seen[model] += 1

        def wait(model: str, count: int) -> None:
            wanted = seen[model] + count
            for _ in range(6000):
                if seen[model] >= wanted or failed:
                    return
                time.sleep(0.01)
            raise AssertionError(f"{model} is not answered")

        with ThreadPoolExecutor() as pool:
            callers = [pool.submit(caller, number) for number in range(6)]
            try:
                for _ in range(3):
                    wait("m", 6)
                    body = {"lora_name": "khmer-qa", "lora_path": world.path("khmer-qa")}
                    loaded = post(url, LOAD, body, ADMIN)
                    assert loaded.status == 200, loaded.body
                    names.append("khmer-qa")  # in use from the reply on
                    wait("khmer-qa", 6)
                    names.remove("khmer-qa")  # no more are chosen; those under way are still waited for
                    removals += 1
                    removed = post(url, UNLOAD, {"lora_name": "khmer-qa"}, ADMIN)
                    assert removed.status == 200, removed.body
                    assert complete(url, "khmer-qa", "hi").status == 404
            finally:
                stop.set()
            for each in callers:
                each.result(60)
        assert not failed, failed
        assert min(seen.values()) >= 18

    behind_a_gateway(world, tmp_path, test, cache=None)
    records = read_records(tmp_path / "audit")
    used = [record for record in records if record["adapter"] == "khmer-qa" and record["status"] == "ok"]
    assert len(used) >= 18 and {record["adapter_digest"] for record in used} == {world.digests["khmer-qa"]}
    assert {record["route"]["backend"] for record in used} == {"r0", "r1"}
    others = [record for record in records if record not in used]
    assert {record["adapter_digest"] for record in others} == {None}
    assert verify(tmp_path / "audit").ok


def test_replaced_in_place_under_load(world: World, tmp_path: Path) -> None:
    """Every answer is that of the content it names, from the cache too, and none fails."""
    by_digest = {f"qa@sha256:{digest}": world.answers[name] for name, digest in world.digests.items()}

    def test(url: str) -> None:
        stop = threading.Event()

        def replace(name: str, **fields: Any) -> Answer:
            return post(url, LOAD, {"lora_name": "qa", "lora_path": world.path(name), **fields}, ADMIN)

        def caller(number: int) -> int:
            for turn in itertools.count(number):
                reply = complete(url, "qa", PROMPTS[turn % len(PROMPTS)], stream=turn % 2 == 0)
                assert reply.status == 200, reply.body
                assert reply.tokens == by_digest[reply.headers["x-tonle-adapter"]][turn % len(PROMPTS)]
                if stop.is_set():
                    return turn
            return 0

        assert replace("khmer-qa").status == 200
        with ThreadPoolExecutor() as pool:
            callers = [pool.submit(caller, number) for number in range(4)]
            try:
                for name in ("medical-qa", "khmer-qa", "medical-qa"):
                    assert replace(name, load_inplace=True).status == 200
                    reply = complete(url, "qa", PROMPTS[0])
                    assert reply.tokens == world.answers[name][0], "an answer of the former content"
                    time.sleep(0.05)
            finally:
                stop.set()
            assert all(each.result(60) for each in callers)
        assert post(url, UNLOAD, {"lora_name": "qa"}, ADMIN).status == 200

    behind_a_gateway(world, tmp_path, test)
    assert verify(tmp_path / "audit").ok


def test_requests_that_race_with_its_removal_are_answered_or_not_found(world: World, tmp_path: Path) -> None:
    """They go on naming it all the while, through the gateway and past it: a removal never breaks an answer."""
    direct = world.urls[1]

    def test(url: str) -> None:
        stop = threading.Event()

        def caller(number: int) -> set[int]:
            statuses = set()
            for turn in itertools.count(number):
                reply = complete(
                    (url, direct)[number % 2], "racing", PROMPTS[turn % len(PROMPTS)], stream=turn % 3 == 0
                )
                assert reply.status in (200, 404), reply.body
                if reply.status == 200:
                    assert reply.tokens == world.answers["medical-qa"][turn % len(PROMPTS)]
                statuses.add(reply.status)
                if stop.is_set():
                    return statuses
            return statuses

        with ThreadPoolExecutor() as pool:
            callers = [pool.submit(caller, number) for number in range(6)]
            try:
                for _ in range(8):
                    body = {"lora_name": "racing", "lora_path": world.path("medical-qa")}
                    assert post(url, LOAD, body, ADMIN).status == 200
                    assert complete(url, "racing", PROMPTS[0]).status == 200
                    assert post(url, UNLOAD, {"lora_name": "racing"}, ADMIN).status == 200
            finally:
                stop.set()
            assert set().union(*(each.result(60) for each in callers)) == {200, 404}

    behind_a_gateway(world, tmp_path, test, cache=None)
    assert verify(tmp_path / "audit").ok


def test_what_is_broken_is_refused_by_the_name_of_its_tensor(world: World, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    source = world.folder / "khmer-qa"
    (broken / "adapter_config.json").write_text((source / "adapter_config.json").read_text())
    tensors = load_file(source / "adapter_model.safetensors")
    name = next(name for name in tensors if "layers.1.self_attn.o_proj.lora_A" in name)
    save_file({**tensors, name: tensors[name][:, :-1].contiguous()}, broken / "adapter_model.safetensors")

    fifos = tmp_path / "fifos"
    fifos.mkdir()
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        os.mkfifo(fifos / file)

    def test(url: str) -> None:
        refused = post(url, LOAD, {"lora_name": "x", "lora_path": str(broken)}, ADMIN)
        assert refused.status == 400 and name in refused.error and "r0" in refused.error, refused.body
        missing = post(url, LOAD, {"lora_name": "x", "lora_path": str(tmp_path / "nowhere")}, ADMIN)
        assert missing.status == 400 and "nowhere" in missing.error
        for path in ("/proc", "/dev/zero", str(fifos), "/" + "x" * 300, "/x" * 3000, "~no-such-user/x", "a\nb"):
            refused = post(url, LOAD, {"lora_name": "x", "lora_path": path}, ADMIN)
            assert refused.status == 400, refused.body
        assert complete(url, "x", "hi").status == 404

    behind_a_gateway(world, tmp_path, test)


def test_many_changes_at_once_by_two_callers_of_one_engine(world: World) -> None:
    """Two front ends, which do not know of each other: every change is done or refused, and requests go on."""
    url = world.urls[1]

    def change(number: int) -> tuple[int, str]:
        name, body = f"n{number % 5}", {"lora_path": world.path(("khmer-qa", "medical-qa")[number % 2])}
        reply = post(url, (LOAD, UNLOAD)[number // 5 % 2], {"lora_name": name, **body})
        return reply.status, reply.body

    with ThreadPoolExecutor(50) as pool:
        asked = [pool.submit(complete, url, "m", PROMPTS[0]) for _ in range(4)]
        replies = list(pool.map(change, range(50)))
        assert {reply.result().status for reply in asked} == {200}
    assert {status for status, _ in replies} <= {200, 400, 404}, replies
    left = 0
    for number in range(5):  # what is left can be used and removed
        status = complete(url, f"n{number}", "hi").status
        assert status == post(url, UNLOAD, {"lora_name": f"n{number}"}).status
        left += status == 200
    statuses = [(status, "added" in body) for status, body in replies]
    assert left == statuses.count((200, True)) - statuses.count((200, False))


def test_any_front_end_serves_and_changes_them(world: World) -> None:
    """Of a server with two, by turns; the name is there, and gone, on the other one with the reply."""
    url = world.urls[1]
    for turn in range(12):
        adapter = ("khmer-qa", "medical-qa")[turn % 2]
        assert complete(url, "at-start", PROMPTS[0]).tokens == world.answers["khmer-qa"][0]
        assert post(url, LOAD, {"lora_name": "mine", "lora_path": world.path(adapter)}).status == 200
        for _ in range(3):  # each a new connection, to either front end
            reply = complete(url, "mine", PROMPTS[1])
            assert reply.status == 200 and reply.tokens == world.answers[adapter][1]
        assert post(url, UNLOAD, {"lora_name": "mine"}).status == 200
        assert [complete(url, "mine", "hi").status for _ in range(3)] == [404] * 3
