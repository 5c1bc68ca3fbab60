"""LoRA adapters in a program: loaded, used, replaced and unloaded while requests run."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.adapters import merge, write_adapter
from tests.fakes.checkpoints import tiny_model, tiny_tokenizer
from tests.parity.test_engine import reference
from tonle.config.engine import EngineConfig
from tonle.engine import LLM, GenerationConfig, InferenceEngine
from tonle.engine.adapters.open_adapters import enable_adapters
from tonle.errors import AdapterUnavailable, ConfigError, InvalidRequest, ModelError, TonleError, UnknownModel
from tonle.models.load.transformers_model import live_spec

PROMPT = list(range(20, 60))
NEW = 12
GREEDY = GenerationConfig(max_length=NEW, do_sample=False, early_stopping=False)
LONG = GenerationConfig(max_length=150, do_sample=False, early_stopping=False)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def answers(model: Any, folder: Path) -> dict[str | None, list[int]]:
    """What merged weights give, for each of six adapters in `folder` and for the model itself."""
    expected: dict[str | None, list[int]] = {None: reference(model, PROMPT, NEW)}
    for seed in range(6):
        adapter = write_adapter(folder / f"a{seed}", live_spec(model), rank=8, seed=seed)
        expected[f"a{seed}"] = reference(merge(tiny_model("llama"), adapter), PROMPT, NEW)
    assert len({tuple(tokens) for tokens in expected.values()}) == 7
    return expected


@pytest.fixture
def engine(model: Any, folder: Path, answers: Any) -> Iterator[InferenceEngine]:
    config = EngineConfig(lora={"a0": str(folder / "a0")}, max_loras=2, max_cpu_loras=3, max_sequence_length=256,
                          memory_pool_size=2**22)  # fmt: skip
    with InferenceEngine(model, tiny_tokenizer(), config) as engine:
        yield engine


def tokens(engine: InferenceEngine, adapter: str | None) -> list[int]:
    return engine.result(engine.submit_request(PROMPT, GREEDY, adapter=adapter), timeout=60).output_ids[0]


def wait(condition: Callable[[], bool]) -> None:
    for _ in range(6_000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never came to be")


def test_every_way_to_ask_takes_an_adapter(engine: InferenceEngine, answers: Any) -> None:
    async def main() -> tuple[list[int], list[int]]:
        streamed: list[int] = []
        async for delta in engine.stream(PROMPT, GREEDY, adapter="a0"):
            streamed += delta.tokens
        return streamed, (await engine.submit_request_async(PROMPT, GREEDY, adapter="a0")).output_ids[0]

    assert tokens(engine, "a0") == answers["a0"] and tokens(engine, None) == answers[None]
    assert asyncio.run(main()) == (answers["a0"], answers["a0"])
    assert engine.adapters["a0"].rank == 8 and len(engine.adapters["a0"].digest) == 64


def test_loaded_used_and_unloaded(engine: InferenceEngine, folder: Path, answers: Any) -> None:
    info = engine.load_adapter("a1", folder / "a1")
    assert engine.adapters == {"a0": engine.adapters["a0"], "a1": info} and info.path == str(folder / "a1")
    assert tokens(engine, "a1") == answers["a1"]
    with pytest.raises(InvalidRequest, match="is loaded already; unload it first, or replace it with replace=True"):
        engine.load_adapter("a1", folder / "a2")
    engine.unload_adapter("a1")
    with pytest.raises(UnknownModel, match="there is no adapter 'a1'; loaded are a0"):
        tokens(engine, "a1")
    with pytest.raises(UnknownModel):
        engine.unload_adapter("a1")
    assert tokens(engine, "a0") == answers["a0"]


def test_replaced_under_way(engine: InferenceEngine, folder: Path, model: Any, answers: Any) -> None:
    """Requests that run go on with the old content, new ones get the new, though the files are the same ones."""
    own = folder / "own"
    old = write_adapter(own, live_spec(model), rank=8, seed=1)
    engine.load_adapter("own", own)
    begun = [engine.submit_request(PROMPT, LONG, adapter="own") for _ in range(2)]
    wait(lambda: engine.get_stats()["num_running"] == 2 or engine.front.num_live < 2)  # perhaps one has ended already
    new = write_adapter(own, live_spec(model), rank=8, seed=2)
    assert engine.load_adapter("own", own, replace=True).digest == new.digest != old.digest
    assert tokens(engine, "own") == answers["a2"]
    for request_id in begun:
        assert engine.result(request_id, timeout=60).output_ids[0][:NEW] == answers["a1"]


def test_unloaded_under_way(engine: InferenceEngine, folder: Path, answers: Any) -> None:
    engine.load_adapter("a1", folder / "a1")
    begun = [engine.submit_request(PROMPT, LONG, adapter="a1") for _ in range(3)]
    engine.unload_adapter("a1")
    for request_id in begun:
        result = engine.result(request_id, timeout=60)
        assert result.output_ids[0][:NEW] == answers["a1"] and result.finish_reason == "length"


def test_more_adapters_than_slots_and_memory_under_load(engine: InferenceEngine, folder: Path, answers: Any) -> None:
    """Six adapters in two slots and three places in memory, while one of them is loaded and unloaded all the time."""
    for seed in range(1, 5):
        engine.load_adapter(f"a{seed}", folder / f"a{seed}")
    wrong: list[object] = []

    def ask(name: str | None) -> None:
        for _ in range(6):
            try:
                if (got := tokens(engine, name)) != answers[name]:
                    wrong.append((name, got))
            except TonleError as error:
                wrong.append(error)

    threads = [
        threading.Thread(target=ask, args=(name,))
        for name in (None, *(f"a{seed}" for seed in range(5)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    num_changes = 0
    while any(thread.is_alive() for thread in threads):
        engine.load_adapter("a5", folder / "a5")
        assert tokens(engine, "a5") == answers["a5"]
        engine.unload_adapter("a5")
        num_changes += 1
    for thread in threads:
        thread.join()
    assert wrong == [] and num_changes > 0


@pytest.mark.parametrize("gone", [False, True])
def test_files_that_cannot_be_read_again_end_requests_without_a_path(
    engine: InferenceEngine, folder: Path, model: Any, answers: Any, gone: bool, caplog: pytest.LogCaptureFixture
) -> None:
    own = folder / "changed"
    write_adapter(own, live_spec(model), rank=8, seed=1)
    engine.load_adapter("changed", own)
    for seed in range(1, 5):  # it leaves the memory
        engine.load_adapter(f"a{seed}", folder / f"a{seed}")
        tokens(engine, f"a{seed}")
    if gone:
        shutil.rmtree(own)
    else:
        write_adapter(own, live_spec(model), rank=8, seed=2)
    with pytest.raises(AdapterUnavailable) as refused:
        tokens(engine, "changed")
    assert refused.value.message == (
        "adapter changed is not available any more: its files cannot be read again; ask the operator to load it again"
    )
    assert refused.value.status == 503 and refused.value.param == "adapter"
    assert "adapter changed had to be read again" in caplog.text and str(own) in caplog.text
    assert tokens(engine, "a1") == answers["a1"]
    write_adapter(own, live_spec(model), rank=8, seed=2)
    engine.load_adapter("changed", own, replace=True)
    assert tokens(engine, "changed") == answers["a2"]


def test_what_cannot_be_loaded(engine: InferenceEngine, folder: Path, model: Any, answers: Any) -> None:
    with pytest.raises(ModelError, match=r"adapter x cannot be loaded: .*missing"):
        engine.load_adapter("x", folder / "missing")
    write_adapter(folder / "wide", live_spec(model), rank=17, seed=1)
    with pytest.raises(ModelError, match="max_lora_rank"):
        engine.load_adapter("x", folder / "wide")
    write_adapter(folder / "alien", live_spec(tiny_model("llama", hidden_size=32)), rank=4)
    with pytest.raises(ModelError, match=r"q_proj\.lora_A"):
        engine.load_adapter("x", folder / "alien")
    assert set(engine.adapters) == {"a0"} and tokens(engine, "a0") == answers["a0"]


def test_a_start_with_a_broken_adapter_names_it(model: Any, folder: Path) -> None:
    write_adapter(folder / "alien", live_spec(tiny_model("llama", hidden_size=32)), rank=4)
    engine = InferenceEngine(model, None, EngineConfig(lora={"alien": str(folder / "alien")}, memory_pool_size=2**20))
    with pytest.raises(ModelError, match=r"adapter alien cannot be loaded: .*q_proj\.lora_A"):
        engine.start()


def test_an_adapter_of_the_start_cannot_have_the_models_name(model: Any, folder: Path, answers: Any) -> None:
    own = type(model).__name__  # what a live model is called that has no name of its own
    with pytest.raises(ConfigError, match=f"adapter {own}: the model itself is served under that name"):
        LLM(model, tiny_tokenizer(), lora={own: str(folder / "a0")}, memory_pool_size=2**20)


def test_an_adapter_of_the_start_raises_the_rank(model: Any, folder: Path) -> None:
    write_adapter(folder / "wide", live_spec(model), rank=17, seed=1)
    write_adapter(folder / "wider", live_spec(model), rank=18, seed=1)
    config = EngineConfig(lora={"wide": str(folder / "wide")}, memory_pool_size=2**20, max_sequence_length=128)
    with InferenceEngine(model, None, config) as engine:
        engine.load_adapter("again", folder / "wide")
        with pytest.raises(ModelError, match="max_lora_rank"):
            engine.load_adapter("wider", folder / "wider")


def test_without_adapters_the_setting_is_named(model: Any, folder: Path) -> None:
    config = EngineConfig(memory_pool_size=2**20, max_sequence_length=128)
    with InferenceEngine(model, None, config) as engine:
        with pytest.raises(InvalidRequest, match="enable_lora=True"):
            engine.load_adapter("a0", folder / "a0")
        assert engine.adapters == {}


@pytest.mark.parametrize(("settings", "words"), [
    ({"max_loras": 0}, "max_loras must be at least 1"), ({"max_cpu_loras": 0}, "max_cpu_loras must be at least 1"),
    ({"max_lora_rank": 257}, "max_lora_rank must be between 1 and 256"), ({"lora": {"../x": "/x"}}, "cannot be called"),
    ({"lora": {"x": ""}}, "has no path"), ({"lora": ["x=y"]}, r"lora must be a dict \{NAME: PATH\}"),
    ({"lora": "demo-adapter"}, r"lora must be a dict \{NAME: PATH\}, not 'demo-adapter'"),
])  # fmt: skip
def test_settings_that_make_no_sense(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig(**settings).validate()


def test_a_decoder_without_adapters_is_refused() -> None:
    class Bare:
        pass

    with pytest.raises(ConfigError, match="this model runs on Bare, which takes no LoRA adapters") as refused:
        enable_adapters(Bare(), EngineConfig(enable_lora=True))
    assert refused.value.param == "enable_lora"


def test_a_batch(model: Any, folder: Path, answers: Any) -> None:
    settings: dict[str, Any] = {"memory_pool_size": 2**20, "max_sequence_length": 128}
    with LLM(model, tiny_tokenizer(), enable_lora=True, **settings) as llm:
        llm.load_adapter("a3", folder / "a3")
        assert set(llm.adapters) == {"a3"}
        (adapted,) = llm.generate(PROMPT, GREEDY, adapter="a3")
        (plain,) = llm.generate(PROMPT, GREEDY)
        assert (adapted.output_ids[0], plain.output_ids[0]) == (answers["a3"], answers[None])
        chat = [{"role": "user", "content": "Hello"}]
        assert llm.chat(chat, GREEDY, adapter="a3")[0].output_ids != llm.chat(chat, GREEDY)[0].output_ids
        with pytest.raises(InvalidRequest, match=r"adapter must be a name or None, not \['a3', None\]"):
            llm.generate([PROMPT, PROMPT], GREEDY, adapter=["a3", None])  # type: ignore[arg-type]
        llm.unload_adapter("a3")
        with pytest.raises(UnknownModel):
            llm.generate(PROMPT, GREEDY, adapter="a3")


def test_the_state_names_the_adapters_in_use(engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    front, told = engine.front, list[list[str]]()
    deliver = front.deliver
    monkeypatch.setattr(front, "deliver", lambda message: (deliver(message), told.append(front.stats.running_adapters)))
    request_id = engine.submit_request(PROMPT, LONG, adapter="a0")
    wait(lambda: ["a0"] in told)
    engine.cancel(request_id)
    wait(lambda: engine.front.stats.running_adapters == [] == engine.front.stats.waiting_adapters)
