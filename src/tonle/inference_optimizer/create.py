"""`create_optimized_engine`: settings, a model and a warm-up to an engine that is ready."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonle.cache import ResponseCache
from tonle.config.engine import EngineConfig
from tonle.config.setting_names import unknown_setting
from tonle.errors import ConfigError, ModelError
from tonle.inference_optimizer.inference_config import InferenceConfig
from tonle.inference_optimizer.optimized_engine import OptimizedEngine, generation_config
from tonle.inference_optimizer.prompt import conversation
from tonle.inference_optimizer.request_runner import RequestRunner

if TYPE_CHECKING:  # brings torch
    from tonle.engine.inference_engine import InferenceEngine

log = logging.getLogger("tonle.inference")

# Prompts are limited by `max_context_length`: the engine's limit is the model's own.
_ENGINE = EngineConfig(max_sequence_length=None)


def create_optimized_engine(
    model_path: str | Path | None = None,
    device: str = "auto",
    enable_cache: bool = True,
    *,
    config: InferenceConfig | None = None,
    engine_config: EngineConfig | None = None,
    **settings: Any,
) -> OptimizedEngine:
    """Load a model and return an engine that is ready to answer.

    `model_path`: a folder, a GGUF file, a hub name, or None for the default model. `settings`: fields of
    `InferenceConfig` and `EngineConfig`; they win over `config` and `engine_config`.
    Raises `TypeError` for a setting that does not exist, `ConfigError` and `ModelError`.
    """
    inference, engine_settings = _split(settings, config, engine_config)
    if device != "auto":
        engine_settings = replace(engine_settings, device=device)
    generation_config({}, inference)  # quick to fail
    cache = None
    if enable_cache:
        cache = ResponseCache(inference.cache_max_size, inference.cache_ttl_seconds)
    began_s = time.monotonic()
    from tonle.engine.inference_engine import InferenceEngine

    engine = InferenceEngine(model_path, config=engine_settings).start()
    try:
        _check_template(engine)
        runner = RequestRunner(engine, inference, cache)
        log.info("%s is loaded after %.1f s", runner.model, time.monotonic() - began_s)
        if inference.warm_up:
            talk = conversation("Hello", None, inference.system_prompt)
            log.info("warmed up in %.2f s, which no metric counts", runner.warm_up(talk))
    except BaseException:
        engine.stop(drain_s=0.0)
        raise
    return OptimizedEngine(runner, inference)


def _split(
    settings: dict[str, Any], config: InferenceConfig | None, engine_config: EngineConfig | None
) -> tuple[InferenceConfig, EngineConfig]:
    """`settings` to those they belong to, checked."""
    for name, value, kind in (("config", config, InferenceConfig), ("engine_config", engine_config, EngineConfig)):
        if value is not None and not isinstance(value, kind):
            raise ConfigError(f"{name} must be an {kind.__name__}, not {value!r:.60}", param=name)
    ours, theirs = InferenceConfig.names(), EngineConfig.names()
    for name in settings:
        if name not in ours and name not in theirs:
            raise TypeError(unknown_setting("create_optimized_engine()", name, [*ours, *theirs]))
    inference = replace(
        config or InferenceConfig(), **{name: value for name, value in settings.items() if name in ours}
    )
    inference.validate()
    own = {name: value for name, value in settings.items() if name not in ours}
    return inference, replace(engine_config or _ENGINE, **own)


def _check_template(engine: InferenceEngine) -> None:
    if engine.tokenizer.chat_template is None:
        raise ModelError(
            "this model has no chat template, so it cannot answer questions: give one with chat_template=FILE (a Jinja file), "
            "or continue plain text with tonle.LLM"
        )
