"""Creating engines: settings, models that will not do, warm-up, and the end of an engine that no code closes."""

from __future__ import annotations

import gc
import json
import logging
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.checkpoints import save_folder
from tests.unit.inference_optimizer.engines import SHORT, small_engine, wait_until
from tonle.config.engine import EngineConfig
from tonle.errors import ConfigError, InvalidRequest, ModelError
from tonle.inference_optimizer import InferenceConfig, create_optimized_engine
from tonle.inference_optimizer.request_runner import RequestRunner


def test_no_setting_belongs_to_two() -> None:
    assert not set(InferenceConfig.names()) & set(EngineConfig.names())


def test_settings_reach_whom_they_belong_to(folder: Path) -> None:
    theirs = EngineConfig(max_batch_size=3, memory_pool_size=2**24, dtype="float32")
    ours = InferenceConfig(context_window=4, sla_seconds=9, warm_up=False)
    with create_optimized_engine(folder, config=ours, engine_config=theirs, max_tokens=5, block_size=8) as engine:
        assert (engine.config.context_window, engine.config.sla_seconds, engine.config.max_tokens) == (4, 9, 5)
        below = engine._runner._engine.config
        assert (below.max_batch_size, below.memory_pool_size, below.block_size) == (3, 2**24, 8)
        assert engine.generate("x", early_stopping=False)[1]["completion_tokens"] == 5
    assert ours.max_tokens == 256 and theirs.block_size == 16  # the caller's own objects stay as they are


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [({"max_batchsize": 4}, TypeError, r"_engine\(\) has no setting 'max_batchsize'; did you mean max_batch_size\?"),
     ({"cache_size": 4}, TypeError, r"did you mean cache_max_size\?"),
     ({"context_window": 0}, ConfigError, "context_window must be at least 1, not 0"),
     ({"sla_seconds": 0}, ConfigError, "sla_seconds must be more than 0"),
     ({"max_tokens": "5"}, ConfigError, "max_tokens must be a whole number, not '5'"),
     ({"temperature": 200.0}, InvalidRequest, "temperature must be between 0 and 100"),
     ({"max_batch_size": 0}, ConfigError, "max_batch_size must be at least 1"),
     ({"config": EngineConfig()}, ConfigError, "config must be an InferenceConfig"),
     ({"engine_config": 5}, ConfigError, "engine_config must be an EngineConfig")],
)  # fmt: skip
def test_wrong_settings_are_refused(folder: Path, settings: dict[str, Any], error: type, said: str) -> None:
    with pytest.raises(error, match=said):
        create_optimized_engine(str(folder), **settings)


def test_an_engine_that_cannot_be_used_is_stopped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object, talk: object) -> float:
        raise ModelError("too cold")

    monkeypatch.setattr(RequestRunner, "warm_up", fail)
    before = {thread for thread in threading.enumerate() if thread.name.startswith("tonle-")}
    with pytest.raises(ModelError, match="too cold"):
        create_optimized_engine(str(folder))
    assert not {thread for thread in threading.enumerate() if thread.name in ("tonle-front", "tonle-engine")} - before


def test_models_that_will_not_do(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model at"):
        create_optimized_engine(tmp_path / "nothing")
    save_folder("llama", tmp_path / "moe")
    config = tmp_path / "moe" / "config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"})
    )
    with pytest.raises(ModelError, match="no number of experts"):
        create_optimized_engine(tmp_path / "moe")
    save_folder("llama", tmp_path / "plain")
    for file in ("tokenizer_config.json", "chat_template.jinja"):
        path = tmp_path / "plain" / file
        if path.suffix == ".json":
            path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": None}))
        else:
            path.unlink(missing_ok=True)
    with pytest.raises(
        ModelError, match="no chat template, so it cannot answer questions: give one with chat_template=FILE"
    ):
        small_engine(tmp_path / "plain")


def test_the_warm_up_is_logged_and_not_counted(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tonle.inference"), small_engine(folder, warm_up=True) as engine:
        assert "warmed up in" in caplog.text and "which no metric counts" in caplog.text
        assert engine._runner._engine.get_stats()["generation_tokens"] > 0
        metrics = engine.get_metrics()
        assert metrics["total_requests"] == 0 and metrics["cache"]["num_entries"] == 0
        assert (metrics["meets_sla"], metrics["sla"]["reason"]) == (True, "no requests yet")
        engine.generate("Test", **SHORT)
        assert engine.get_metrics()["total_requests"] == 1


def test_several_live_side_by_side_and_are_freed_when_no_longer_used(folder: Path) -> None:
    kept, dropped = small_engine(folder), small_engine(folder)
    assert kept.generate("Hello", **SHORT)[0] == dropped.generate("Hello", **SHORT)[0]
    threads = list(dropped._runner._engine._threads)
    model = weakref.ref(dropped._runner._engine)
    stream = dropped.stream("Hello", max_tokens=40, early_stopping=False)
    del dropped
    gc.collect()
    assert len(list(stream)) > 1 and all(thread.is_alive() for thread in threads)  # a stream keeps its engine
    del stream
    gc.collect()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)

    def is_freed() -> bool:
        gc.collect()
        return model() is None

    wait_until(is_freed)
    assert kept.generate("Hello again", **SHORT)[1]["cache_hit"] is False
    kept.close()


def test_a_program_that_closes_nothing_ends_cleanly(folder: Path) -> None:
    code = f"""
import threading
from tonle.inference_optimizer import create_optimized_engine
engines = [create_optimized_engine({str(folder)!r}, dtype="float32", memory_pool_size=2**25) for _ in range(2)]
threading.Thread(target=lambda: engines[1].generate("x", max_tokens=900, early_stopping=False), daemon=True).start()
print(engines[0].generate("Hello", max_tokens=3, early_stopping=False)[1]["completion_tokens"])
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (0, "3\n"), ended.stderr
    assert "Fatal" not in ended.stderr and "Exception ignored" not in ended.stderr


def test_importing_it_does_not_load_torch() -> None:
    code = "import sys, tonle.inference_optimizer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
