"""`InferenceEngine` as its first readers know it: the documented examples run with only the import path changed.

python -m pytest tests/test_inference_engine.py -v
python -m pytest tests/test_inference_engine.py::TestInferenceEngineIntegration -v
python -m pytest tests/test_inference_engine.py::TestBenchmarks -v -s
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.fakes.checkpoints import save_folder
from tonle.config import no_effect
from tonle.engine import EngineConfig, GenerationConfig, InferenceEngine, RequestPriority
from tonle.engine import inference_engine as engine_module
from tonle.engine.build import build
from tonle.engine.llm import LLM
from tonle.engine.schedule import Scheduler
from tonle.errors import ConfigError, ContextOverflow, InternalError, InvalidRequest, NotFound, TonleError

GREEDY = GenerationConfig(max_length=12, do_sample=False, early_stopping=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds a complete small model under the name the examples use."""
    root = tmp_path_factory.mktemp("hub")
    save_folder("llama", root / "your-model")
    return root


@pytest.fixture(scope="module")
def live(folder: Path) -> tuple[Any, Any]:
    path = str(folder / "your-model")
    return AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)


@pytest.fixture(scope="module")
def engine(live: tuple[Any, Any]) -> Iterator[InferenceEngine]:
    with InferenceEngine(*live, EngineConfig(max_batch_size=8, max_sequence_length=256)) as made:
        yield made


QUICK_START = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from tonle.engine import InferenceEngine, EngineConfig

# Load model and tokenizer
model = AutoModelForCausalLM.from_pretrained("your-model")
tokenizer = AutoTokenizer.from_pretrained("your-model")

# Configure for production
config = EngineConfig(
    max_batch_size=16,
    enable_kv_cache=True,
    enable_metrics=True,
    batch_timeout_ms=50.0
)

# Create and start engine
engine = InferenceEngine(model, tokenizer, config)
engine.start()

try:
    # Submit inference request
    request_id = engine.submit_request("Hello, how are you today?")

    # Process continues asynchronously...
    # Check status or use callback for results
    result = engine.result(request_id, timeout=60)  # not in the example: show that it really ran

finally:
    engine.stop()
"""

ASYNC = """
import asyncio
from tonle.engine import RequestPriority

async def async_inference():
    # Submit high-priority request
    result = await engine.submit_request_async(
        "Urgent: What is 2+2?",
        priority=RequestPriority.HIGH
    )

    print(f"Generated: {tokenizer.decode(result.output_ids[0])}")
    return result

# Run async inference
result = asyncio.run(async_inference())
"""

PRIORITIES = """
from tonle.engine import RequestPriority

# Submit requests with different priorities
urgent_id = engine.submit_request(
    "Critical system alert!",
    priority=RequestPriority.CRITICAL
)

normal_id = engine.submit_request(
    "Regular query",
    priority=RequestPriority.NORMAL
)

# Critical requests are processed first
"""

CUSTOM = """
from tonle.engine import GenerationConfig

# Configure generation behavior
gen_config = GenerationConfig(
    max_length=512,
    temperature=0.8,
    top_k=50,
    top_p=0.9,
    repetition_penalty=1.1,
    do_sample=True,
    early_stopping=True
)

request_id = engine.submit_request(
    "Write a creative story",
    generation_config=gen_config
)
"""

MONITORING = """
# Get current statistics
stats = engine.get_stats()

print(f"Status: {stats['engine_status']}")
print(f"Cache entries: {stats['cache_info']['num_entries']}")

# Performance metrics
metrics = stats['performance_metrics']
if 'batch_processing_time' in metrics:
    print(f"Avg batch time: {metrics['batch_processing_time']['mean']:.3f}s")
if 'tokens_per_second' in metrics:
    print(f"Throughput: {metrics['tokens_per_second']['mean']:.1f} tok/s")

if engine.get_stats()['memory_usage'] > 0.9:
    engine.optimize_memory()  # Force cleanup
"""

PRODUCTION = """
from tonle.engine import EngineConfig
production_config = EngineConfig(
    # Batching
    max_batch_size=32,
    max_sequence_length=2048,
    batch_timeout_ms=50.0,
    enable_dynamic_batching=True,

    # Caching
    enable_kv_cache=True,
    kv_cache_max_size=1000,

    # Memory management
    memory_pool_size=2 * 1024 * 1024 * 1024,  # 2GB
    gc_threshold=0.8,

    # Monitoring
    enable_metrics=True,
    log_level="INFO"
)
production_config.validate()
"""


TUNING = """
from tonle.engine import EngineConfig, GenerationConfig

config = EngineConfig(max_batch_size=8)
stats = engine.get_stats()
memory_usage = stats.get('memory_usage', 0)
if memory_usage < 0.7:
    config.max_batch_size *= 2
assert config.max_batch_size == 16

latency_config = EngineConfig(max_batch_size=1, batch_timeout_ms=0, enable_speculative_decoding=True)
throughput_config = EngineConfig(max_batch_size=64, batch_timeout_ms=100, enable_continuous_batching=True)
memory_config = EngineConfig(memory_pool_size=4 * 1024**3, kv_cache_max_size=2000, gc_threshold=0.85)
if engine.get_stats()['memory_usage'] > 0.9:
    engine.optimize_memory()

config.max_batch_size = 16
config.max_sequence_length = 1024
config.enable_gradient_checkpointing = True
config.memory_efficient_attention = True
config.max_batch_size = 32
config.batch_timeout_ms = 100
config.enable_continuous_batching = True
config.enable_dynamic_batching = True
config.batch_timeout_ms = 10
generation_config = GenerationConfig(use_cache=True)
"""

DEBUG = """
from tonle.engine import EngineConfig, InferenceEngine

config = EngineConfig(log_level="DEBUG", enable_metrics=True, profile_performance=True)
engine = InferenceEngine(model, tokenizer, config)
engine.start()
stats = engine.get_stats()
print(f"Detailed stats: {stats}")
"""


class TestExamples:
    """The documented examples, word for word but for the import path."""

    def test_quick_start(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(folder)
        scope: dict[str, Any] = {}
        exec(QUICK_START, scope)
        assert scope["result"].finish_reason in ("stop", "length")
        assert len(scope["result"].output_ids[0]) > 0

    def test_async(self, engine: InferenceEngine, live: tuple[Any, Any], capsys: pytest.CaptureFixture[str]) -> None:
        scope: dict[str, Any] = {"engine": engine, "tokenizer": live[1]}
        exec(ASYNC, scope)
        assert capsys.readouterr().out.startswith("Generated: ")
        assert scope["result"].timings.latency_s > 0

    def test_priorities(self, engine: InferenceEngine) -> None:
        scope: dict[str, Any] = {"engine": engine}
        exec(PRIORITIES, scope)
        for name in ("urgent_id", "normal_id"):
            assert engine.result(scope[name], timeout=60).output_ids[0]

    def test_custom_generation(self, live: tuple[Any, Any]) -> None:
        with InferenceEngine(*live, EngineConfig(max_sequence_length=600)) as engine:
            scope: dict[str, Any] = {"engine": engine}
            exec(CUSTOM, scope)
            assert 0 < len(engine.result(scope["request_id"], timeout=120).output_ids[0]) <= 512

    def test_monitoring(self, engine: InferenceEngine, capsys: pytest.CaptureFixture[str]) -> None:
        engine.result(engine.submit_request("warm", GREEDY), timeout=60)
        exec(MONITORING, {"engine": engine})
        said = capsys.readouterr().out
        assert "Status: running" in said and "Avg batch time" in said and "Throughput" in said

    def test_production_config(self) -> None:
        exec(PRODUCTION, {})

    def test_tuning_and_troubleshooting(
        self, live: tuple[Any, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each configuration starts an engine, and what it asks for in vain is told."""
        monkeypatch.setattr(no_effect, "_said", set())
        scope: dict[str, Any] = {}
        with InferenceEngine(*live) as engine:
            scope["engine"] = engine
            exec(TUNING, scope)
        with caplog.at_level("INFO"):
            for name in ("latency_config", "throughput_config", "memory_config", "config"):
                with InferenceEngine(*live, replace(scope[name], memory_pool_size=2**22)) as engine:
                    assert len(engine.result(engine.submit_request("Hi", GREEDY), timeout=60).output_ids[0]) == 12
        assert {record.getMessage().partition("=")[0] for record in caplog.records} >= {
            "enable_gradient_checkpointing", "memory_efficient_attention",
        }  # fmt: skip

    def test_debug_mode(self, live: tuple[Any, Any], capsys: pytest.CaptureFixture[str]) -> None:
        scope: dict[str, Any] = {"model": live[0], "tokenizer": live[1]}
        try:
            exec(DEBUG, scope)
        finally:
            scope["engine"].stop()
            logging.getLogger("tonle").setLevel("INFO")
        assert "Detailed stats: {'engine_status': 'running'" in capsys.readouterr().out


class TestInferenceEngineIntegration:
    """Real requests through a real (small) model."""

    def test_the_reference_takes_config_positionally_and_by_name(self, engine: InferenceEngine) -> None:
        ids = [
            engine.submit_request("Hello", GREEDY, RequestPriority.LOW, None),
            engine.submit_request("Hello", config=GREEDY),
            engine.submit_request("Hello", generation_config=GREEDY),
        ]
        texts = {engine.result(i, timeout=60).text for i in ids}
        assert len(texts) == 1
        with pytest.raises(InvalidRequest, match="not both"):
            engine.submit_request("Hello", GREEDY, config=GREEDY)

    def test_a_callback_gets_the_result(self, engine: InferenceEngine) -> None:
        arrived: list[Any] = []
        done = threading.Event()
        request_id = engine.submit_request("Hi", GREEDY, callback=lambda r: (arrived.append(r), done.set()))
        assert done.wait(60)
        assert arrived[0].request_id == request_id and arrived[0].text == engine.result(request_id).text

    def test_many_threads_get_the_same_answers_as_one(self, engine: InferenceEngine) -> None:
        prompts = [f"thread {i}" for i in range(12)]
        alone = [engine.result(engine.submit_request(p, GREEDY), timeout=60).output_ids for p in prompts]
        together: dict[str, Any] = {}

        def work(prompt: str) -> None:
            together[prompt] = engine.result(engine.submit_request(prompt, GREEDY), timeout=60).output_ids

        threads = [threading.Thread(target=work, args=(p,)) for p in prompts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [together[p] for p in prompts] == alone

    def test_stream_gives_the_text_of_the_result(self, engine: InferenceEngine) -> None:
        async def go() -> tuple[str, Any]:
            pieces = [delta async for delta in engine.stream("Hello there", GREEDY)]
            assert [d.finish_reason for d in pieces][-1] == "length"
            return "".join(d.text for d in pieces), await engine.submit_request_async("Hello there", GREEDY)

        text, whole = asyncio.run(go())
        assert text == whole.text

    @pytest.mark.parametrize(("hold_clusters", "texts"), [("auto", ["a", "a"]), ("always", ["", "aa"])])
    def test_hold_clusters(self, live: tuple[Any, Any], hold_clusters: str, texts: list[str]) -> None:
        (letter,) = live[1].encode("a", add_special_tokens=False)
        only_letters = GenerationConfig(max_length=2, do_sample=False, logit_bias={letter: 100.0}, early_stopping=False)

        async def go(engine: InferenceEngine) -> list[str]:
            return [delta.text async for delta in engine.stream("Hello", only_letters)]

        with InferenceEngine(*live, EngineConfig(device="cpu", hold_clusters=hold_clusters)) as engine:
            told = asyncio.run(go(engine))
        assert told in (texts, ["".join(texts)])  # a slow reader gets both tokens at once

    def test_hold_clusters_is_checked(self) -> None:
        with pytest.raises(ConfigError, match="hold_clusters must be auto or always, not 'never'"):
            EngineConfig(hold_clusters="never").validate()

    def test_leaving_a_stream_frees_its_work(self, engine: InferenceEngine) -> None:
        long = GenerationConfig(max_length=200, do_sample=False, early_stopping=False)

        async def go() -> None:
            stream = engine.stream("Hello", long)
            async for _ in stream:
                break
            await stream.aclose()  # type: ignore[attr-defined]

        asyncio.run(go())
        _wait_idle(engine)

    def test_cancel(self, engine: InferenceEngine) -> None:
        request_id = engine.submit_request("Hello", GenerationConfig(max_length=240, early_stopping=False))
        assert engine.cancel(request_id)
        assert engine.result(request_id, timeout=60).finish_reason == "cancelled"
        assert not engine.cancel(request_id)
        _wait_idle(engine)

    def test_cancelling_an_await_frees_its_work(self, engine: InferenceEngine) -> None:
        async def go() -> None:
            long = GenerationConfig(max_length=240, early_stopping=False)
            task = asyncio.create_task(engine.submit_request_async("Hello", long))
            for _ in range(120_000):
                if engine.front.num_live:
                    break
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(go())
        _wait_idle(engine)

    def test_n_seed_and_logprobs(self, engine: InferenceEngine) -> None:
        config = GenerationConfig(max_length=8, n=3, seed=5, logprobs=2, prompt_logprobs=1, early_stopping=False)
        one = engine.result(engine.submit_request("Hello", config), timeout=60)
        two = engine.result(engine.submit_request("Hello", config), timeout=60)
        assert one.output_ids == two.output_ids and len({tuple(ids) for ids in one.output_ids}) > 1
        assert one.logprobs is not None and [len(records) for records in one.logprobs] == [8, 8, 8]
        assert all(record.top[0][1] >= record.logprob for records in one.logprobs for record in records)
        assert one.prompt_logprobs is not None and len(one.prompt_logprobs) == len(one.prompt_ids)
        assert one.prompt_logprobs[0] is None and one.prompt_logprobs[1] is not None

    def test_prompt_forms(self, engine: InferenceEngine, live: tuple[Any, Any]) -> None:
        ids = live[1].encode("Hello")
        by_ids = engine.result(engine.submit_request(ids, GREEDY), timeout=60)
        by_text = engine.result(engine.submit_request("Hello", GREEDY), timeout=60)
        assert by_ids.output_ids == by_text.output_ids
        chat = engine.result(engine.submit_request([{"role": "user", "content": "Hello"}], GREEDY), timeout=60)
        assert len(chat.prompt_ids) > len(ids)

    def test_a_live_model_without_a_tokenizer_takes_and_gives_token_ids(
        self, engine: InferenceEngine, live: tuple[Any, Any]
    ) -> None:
        ids = live[1].encode("Hello")
        known = engine.result(engine.submit_request(ids, GREEDY), timeout=60)
        with InferenceEngine(live[0], None, EngineConfig(max_sequence_length=256)) as bare:
            result = bare.result(bare.submit_request(ids, GREEDY), timeout=60)
            assert result.output_ids == known.output_ids and result.texts == [""] and result.prompt_ids == ids
            with_logprobs = GenerationConfig(max_length=4, n=2, seed=1, logprobs=1, early_stopping=False)
            sampled = bare.result(bare.submit_request(ids, with_logprobs), timeout=60)
            assert sampled.logprobs is not None and [len(each) for each in sampled.logprobs] == [4, 4]
            for prompt, config, told in (
                ("Hello", None, "a prompt of text would need: give a list of token ids instead, or pass a tokenizer"),
                ([{"role": "user", "content": "Hello"}], None, "chat messages would need"),
                (ids, GenerationConfig(stop=["."]), "use stop_token_ids instead"),
            ):
                with pytest.raises(InvalidRequest, match=told):
                    bare.submit_request(prompt, config)

            async def read() -> list[int]:
                return [token async for delta in bare.stream(ids, GREEDY) for token in delta.tokens]

            assert asyncio.run(read()) == known.output_ids[0]

    def test_without_a_tokenizer_the_model_names_the_end(self, engine: InferenceEngine, live: tuple[Any, Any]) -> None:
        ids = live[1].encode("Hello")
        first = engine.result(engine.submit_request(ids, GREEDY), timeout=60).output_ids[0][0]
        model, own = live[0], live[0].generation_config.eos_token_id
        model.generation_config.eos_token_id = first
        try:
            with InferenceEngine(model) as bare:
                ended = bare.result(bare.submit_request(ids, GenerationConfig(do_sample=False)), timeout=60)
        finally:
            model.generation_config.eos_token_id = own
        assert ended.finish_reason == "stop" and ended.output_ids == [[first]]

    def test_bad_requests_are_told_at_once(self, engine: InferenceEngine) -> None:
        with pytest.raises(InvalidRequest, match="temperature"):
            engine.submit_request("Hi", GenerationConfig(temperature=-1))
        with pytest.raises(ContextOverflow, match="256"):
            engine.submit_request("Hi", GenerationConfig(max_length=10_000))
        with pytest.raises(InvalidRequest, match="empty"):
            engine.submit_request([])
        with pytest.raises(InvalidRequest, match="string"):
            engine.submit_request(5)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="GenerationConfig"):
            engine.submit_request("Hi", {"max_length": 3})  # type: ignore[arg-type]
        for priority in ("urgent", None, 9, -3, 1.5, float("nan")):
            with pytest.raises(InvalidRequest, match="priority must be a RequestPriority"):
                engine.submit_request("Hi", GREEDY, priority)  # type: ignore[arg-type]
        with pytest.raises(NotFound):
            engine.result("missing")
        assert engine.result(engine.submit_request("Hi", GREEDY), timeout=60).text is not None  # it runs as before

    def test_bad_arguments_are_told_at_once(self, live: tuple[Any, Any]) -> None:
        with pytest.raises(ConfigError, match="EngineConfig"):
            InferenceEngine(*live, {})  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="EngineConfig"):
            LLM(*live, {})  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="max_batch_size must be a whole number"):
            LLM(*live, max_batch_size="a")
        with pytest.raises(ConfigError, match="model must be a path"):
            LLM(5)
        with LLM(*live) as llm, pytest.raises(InvalidRequest, match="prompts must be"):
            llm.generate(5)  # type: ignore[arg-type]

    def test_a_context_beyond_the_model_is_told(self, live: tuple[Any, Any], caplog: pytest.LogCaptureFixture) -> None:
        own = live[0].config.max_position_embeddings
        with LLM(*live) as llm, pytest.raises(ContextOverflow, match=f"holds {own} "):
            llm.generate("Hi", GenerationConfig(max_length=own))
        with caplog.at_level("WARNING"), LLM(*live, max_sequence_length=own + 1):
            assert f"is {own + 1}, but the model was made for {own}" in caplog.text
        caplog.clear()
        with caplog.at_level("WARNING"), InferenceEngine(*live):
            assert "made for" not in caplog.text  # the default was no wish

    def test_a_compiled_model_is_unwrapped(self, live: tuple[Any, Any], engine: InferenceEngine) -> None:
        """torch.compile does nothing before the first call, which never comes: the engine runs kernels of its own."""
        with InferenceEngine(torch.compile(live[0], mode="reduce-overhead"), live[1]) as compiled:
            tokens = compiled.result(compiled.submit_request("Hello", GREEDY), timeout=60).output_ids
        assert tokens == engine.result(engine.submit_request("Hello", GREEDY), timeout=60).output_ids

    def test_an_engine_that_has_died_says_so(self, live: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        def die(self: object, now: float) -> None:
            raise RuntimeError("out of order")

        with InferenceEngine(*live) as engine:
            with monkeypatch.context() as patch:
                patch.setattr(Scheduler, "plan", die)
                with pytest.raises(TonleError, match="out of order"):
                    engine.result(engine.submit_request("Hi", GREEDY), timeout=60)
            with pytest.raises(InternalError, match="has ended with an error"):
                engine.submit_request("Hi", GREEDY)
            engine.stop()
            engine.start()
            assert engine.result(engine.submit_request("Hi", GREEDY), timeout=60).text is not None

    def test_life(self, live: tuple[Any, Any]) -> None:
        engine = InferenceEngine(*live)
        with pytest.raises(ConfigError, match="start"):
            engine.submit_request("Hi")
        assert engine.get_stats()["engine_status"] == "stopped"
        with engine:
            engine.start()
            assert engine.get_stats()["engine_status"] == "running"
            waiting = engine.submit_request("Hi", GenerationConfig(max_length=200, early_stopping=False))
        assert len(engine.result(waiting, timeout=0).output_ids[0]) == 200  # the end of the block let it finish
        with engine:  # and again
            assert engine.result(engine.submit_request("Hi", GREEDY), timeout=60).text is not None

    def test_static_batches(self, live: tuple[Any, Any]) -> None:
        config = EngineConfig(max_batch_size=4, enable_continuous_batching=False, batch_timeout_ms=20)
        with InferenceEngine(*live, config) as engine:
            ids = [engine.submit_request(f"number {i}", GREEDY) for i in range(6)]
            assert all(len(engine.result(i, timeout=60).output_ids[0]) == 12 for i in ids)

    def test_optimize_memory_empties_the_cache(self, engine: InferenceEngine) -> None:
        engine.result(engine.submit_request("x" * 100, GREEDY), timeout=60)
        assert engine.get_stats()["cache_info"]["num_entries"] > 0
        engine.optimize_memory()
        _wait(lambda: engine.get_stats()["cache_info"]["num_entries"] == 0)

    def test_a_stopped_engine_gives_its_memory_back(
        self, live: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """On a GPU the next one needs it: the KV cache takes what is free. torch gives back what is no longer referenced."""
        held: list[weakref.ref[Any]] = []
        when_asked: list[list[Any]] = []

        def build_and_watch(*args: Any, **options: Any) -> Any:
            loop, card = build(*args, **options)
            held.extend(weakref.ref(part) for part in (loop, loop._runner._kv))
            return loop, card

        monkeypatch.setattr(engine_module, "build", build_and_watch)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: when_asked.append([part() for part in held]))
        with InferenceEngine(*live, EngineConfig(max_batch_size=2, max_sequence_length=64)) as engine:
            engine.result(engine.submit_request("hello", GREEDY))
            assert all(part() is not None for part in held) and not when_asked
        assert when_asked == [[None, None]]


class TestBenchmarks:
    """Numbers to look at (-s); no time is asserted."""

    def test_throughput(self, engine: InferenceEngine) -> None:
        config = GenerationConfig(max_length=32, do_sample=False, early_stopping=False)
        began = time.perf_counter()
        ids = [engine.submit_request(f"prompt {i}", config) for i in range(16)]
        tokens = sum(engine.result(i, timeout=120).usage.completion_tokens for i in ids)
        print(f"\n16 requests, 8 rows: {tokens / (time.perf_counter() - began):.0f} tok/s")
        assert tokens == 16 * 32

    def test_latency(self, engine: InferenceEngine) -> None:
        result = engine.result(engine.submit_request("Hello", GREEDY), timeout=60)
        assert result.timings.ttft_s is not None and result.timings.latency_s is not None
        print(f"\nTTFT {result.timings.ttft_s * 1e3:.1f} ms, whole {result.timings.latency_s * 1e3:.1f} ms")
        assert 0 < result.timings.ttft_s <= result.timings.latency_s


def _wait_idle(engine: InferenceEngine) -> None:
    _wait(lambda: engine.get_stats()["num_running"] == 0 and engine.get_stats()["memory_usage"] == 0.0)


def _wait(condition: Any) -> None:
    for _ in range(12_000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen")
