"""`PerformanceOptimizer`: `optimized_generate` on an engine that is started on first use and kept.

Does: turn a call into requests, wait, choose the best candidates. Does not: read token ids (`prompts.py`), compute
(`tonle.engine`). Thread-safe.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Self

import msgspec
import torch

from tonle.config import no_effect
from tonle.config.setting_names import unknown_setting
from tonle.engine import GenerationConfig, GenerationResult, InferenceEngine
from tonle.engine.request import MAX_N
from tonle.engine.sample.noise import child_seed
from tonle.errors import ConfigError, InvalidRequest
from tonle.performance_optimizer.model_settings import own_settings, token_ids
from tonle.performance_optimizer.optimization_config import OptimizationConfig
from tonle.performance_optimizer.prompts import Prompts, read_prompts
from tonle.performance_optimizer.stats import GenerationStats, collect, ranked

log = logging.getLogger("tonle.performance_optimizer")

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
            "logit_bias", "min_tokens", "seed", "early_stopping", "stop_token_ids", "use_cache")  # fmt: skip
_KEYWORDS = ("max_length", "max_new_tokens", "attention_mask", "pad_token_id", "do_sample", *SAMPLING)


class PerformanceOptimizer:
    """`model`: a live transformers model (its weights are shared), a path, a hub name, or None (the default model).

    The engine starts with the first call and stays until `close()`. `tokenizer` is needed for nothing but the text of
    candidates of a live model.
    """

    def __init__(self, model: Any = None, config: OptimizationConfig | None = None, tokenizer: Any = None) -> None:
        if config is not None and not isinstance(config, OptimizationConfig):
            raise ConfigError(f"config must be an OptimizationConfig, not {config!r}", param="config")
        self.config = copy.copy(config or OptimizationConfig())
        self._model = model
        self._tokenizer = tokenizer
        self._own: dict[str, Any] = {}  # settings of the model's own
        self._engine: InferenceEngine | None = None
        self._closed = False
        self._lock = threading.Lock()  # of starting and closing
        no_effect.explain_once(log, self.config.asked_for())

    # -- life

    @property
    def engine(self) -> InferenceEngine:
        """The engine, started if need be."""
        with self._lock:
            if self._closed:
                raise ConfigError("this PerformanceOptimizer was closed; make a new one")
            if self._engine is None:
                self._engine = self._start()
            return self._engine

    def close(self) -> None:
        """Stop the engine and give its memory back. Calls under way end with an error."""
        with self._lock:
            self._closed = True
            if self._engine is not None:
                self._engine.stop(drain_s=0.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- generating

    def optimized_generate(
        self,
        input_ids: Any,
        max_length: int | None = None,
        *,
        max_new_tokens: int | None = None,
        attention_mask: Any = None,
        pad_token_id: int | None = None,
        do_sample: bool | None = None,
        **sampling: Any,
    ) -> tuple[torch.Tensor, GenerationStats]:
        """Continue each prompt, as `model.generate` of transformers does.

        `input_ids`: a tensor [batch, prompt], a list of token ids, or a list of such lists, of any lengths.
        `max_length` counts prompt and new tokens, `max_new_tokens` new ones only: give one; 128 new tokens otherwise.
        `do_sample`: None = True where there are several candidates, else as the model's generation_config has it.
        `sampling`: fields of `GenerationConfig`; those left out take the model's defaults.

        Returns a tensor [batch, longest] on the device of `input_ids`, each row being the input row as given, the
        continuation and padding; and what it took.
        """
        for name in sampling:
            if name not in SAMPLING:
                raise TypeError(unknown_setting("optimized_generate()", name, _KEYWORDS))
        engine = self.engine
        pad_id, is_padding = self._padding(engine, pad_token_id)
        prompts = read_prompts(input_ids, attention_mask, pad_id=pad_id if is_padding else None)
        config = self._request(prompts, max_length, max_new_tokens, do_sample, sampling)
        began, before = time.monotonic(), engine.get_stats()["speculation"]
        results = _run(engine, prompts.stripped, config)
        seconds, after = time.monotonic() - began, engine.get_stats()["speculation"]
        guesses = {name: after[name] - before[name] for name in after}  # of calls in other threads, too
        candidates = [ranked(result) for result in results]
        output = prompts.output([of_prompt[0]["new_ids"] for of_prompt in candidates], pad_id)
        stats = collect(
            results, candidates, seconds=seconds, mode=_mode(config), device=self._device(), guesses=guesses
        )
        return output, stats

    def _request(
        self,
        prompts: Prompts,
        max_length: int | None,
        max_new_tokens: int | None,
        do_sample: bool | None,
        sampling: dict[str, Any],
    ) -> GenerationConfig:
        """What the engine is asked for, the same for each prompt but for the seed."""
        candidates = self.config.num_candidates
        if do_sample is None:
            do_sample = candidates > 1 or bool(self._own.get("do_sample"))
        new_tokens = _new_tokens(prompts.longest, max_length, max_new_tokens)
        config = GenerationConfig(max_length=new_tokens, do_sample=do_sample, logprobs=0, **sampling)
        if candidates > 1 and not config.greedy:
            config.n = candidates
        config.validate()
        return config

    def _padding(self, engine: InferenceEngine, given: int | None) -> tuple[int, bool]:
        """The padding token, and whether it means padding where it stands at the ends of a prompt: as in transformers."""
        eos_ids = token_ids(self._own.get("eos_token_id")) or sorted(engine.tokenizer.eos_ids)
        pad_id = self._own.get("pad_token_id") if given is None else given
        if pad_id is None:
            return (eos_ids or [0])[0], False
        return pad_id, pad_id not in eos_ids

    # -- inside

    def _start(self) -> InferenceEngine:
        self._own = own_settings(self._model)
        config = self.config.engine_config(gpu=self._device().startswith("cuda"))
        try:
            return InferenceEngine(self._model, self._tokenizer, config).start()
        except ConfigError as error:
            if error.param != "kv_cache_dtype" or self.config.is_set("kv_cache_dtype"):
                raise
            log.warning("level %s would use an fp8 KV cache, but %s", self.config.level.name, error.message)
            return InferenceEngine(self._model, self._tokenizer, replace(config, kv_cache_dtype="auto")).start()

    def _device(self) -> str:
        """Where the model runs: a live one stays where it is, unless the config names a device."""
        if hasattr(self._model, "state_dict") and self.config.device == "auto":
            return str(getattr(self._model, "device", "cpu"))
        if self.config.on_gpu():
            return "cuda" if self.config.device == "auto" else self.config.device
        return "cpu"


def _new_tokens(prompt_tokens: int, max_length: int | None, max_new_tokens: int | None) -> int | None:
    """None: as many as the model's default says."""
    if max_length is not None and max_new_tokens is not None:
        raise InvalidRequest("give max_length (prompt and new tokens) or max_new_tokens, not both", param="max_length")
    for name, value in (("max_length", max_length), ("max_new_tokens", max_new_tokens)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise InvalidRequest(f"{name} must be a whole number of at least 1, not {value!r}", param=name)
    if max_length is None:
        return max_new_tokens
    if max_length <= prompt_tokens:
        raise InvalidRequest(
            f"max_length counts prompt and new tokens together, and the longest prompt already has {prompt_tokens}: "
            f"max_length={max_length} leaves no new one; give more, or give max_new_tokens instead",
            param="max_length",
        )
    return max_length - prompt_tokens


def _run(engine: InferenceEngine, prompts: list[list[int]], config: GenerationConfig) -> list[GenerationResult]:
    """All prompts at once; the engine batches them. An error of one ends the others."""
    begun: list[tuple[str, Future[GenerationResult]]] = []
    try:
        for row, prompt in enumerate(prompts):
            begun.append(engine.begin(prompt, _with_seed(config, row), None))
        return [future.result() for _, future in begun]
    except BaseException:
        for request_id, _ in begun:
            engine.cancel(request_id)
        raise


def _with_seed(config: GenerationConfig, row: int) -> GenerationConfig:
    """Equal prompts of a batch differ; the engine gives each candidate a seed of its own in turn."""
    if config.seed is None or row == 0:
        return config
    return msgspec.structs.replace(config, seed=child_seed(config.seed, row * MAX_N))


def _mode(config: GenerationConfig) -> str:
    if config.greedy:
        return "greedy: one candidate per prompt, as all would be equal"
    if config.n == 1:
        return "sampled: one candidate per prompt"
    return f"sampled: {config.n} candidates per prompt, the best by mean log-probability is returned"
