"""A draft model, from its files to a `DraftModel`: checked against the model whose tokens it guesses, and its cache.

Does: load, compare vocabularies, divide the memory for keys and values. Does not: guess (`speculate/draft_model.py`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from tonle.config.engine import EngineConfig
from tonle.engine.kv_dtype import asked_kv_dtype, kv_dtype_of
from tonle.engine.machine import AnyDecoder, Machine, block_bytes
from tonle.engine.schedule import SchedulerLimits
from tonle.engine.speculate.draft_model import DraftModel, own_blocks
from tonle.engine.text import Text, load_text
from tonle.errors import ConfigError
from tonle.models.cpu.open import open_cpu
from tonle.models.inputs import KVCache
from tonle.models.load.other import other_architecture_of
from tonle.models.source import ModelSource, resolve

log = logging.getLogger("tonle.engine")


@dataclass(slots=True)
class OpenDraft:
    """A draft model that has been loaded."""

    decoder: Any  # one of the decoders
    kv_dtype: torch.dtype

    def share(self, num_bytes: int, per_block: int, config: EngineConfig) -> int:
        """Of `num_bytes` for both caches, what is left for the model's, one block of which takes `per_block`."""
        own = block_bytes(self.decoder, config, self.kv_dtype)
        return num_bytes * per_block // (per_block + own)

    def drafter(self, machine: Machine, limits: SchedulerLimits, vocab_size: int, length: int) -> DraftModel:
        """Guesses of at most `length` tokens, below `vocab_size`."""
        spec, num_blocks = self.decoder.spec, machine.kv.num_blocks
        kv = KVCache(
            num_layers=spec.num_layers,
            num_blocks=num_blocks + limits.max_num_seqs * own_blocks(length, limits.block_size),
            block_size=limits.block_size,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=self.kv_dtype,
            device=self.decoder.device,
        )
        return DraftModel(
            self.decoder,
            kv,
            num_blocks=num_blocks,
            max_rows=limits.max_num_seqs,
            max_tokens=limits.max_num_batched_tokens,
            max_length=length,
            context_length=spec.max_positions,
            vocab_size=vocab_size,
            own_vocab_size=spec.vocab_size,
        )


def open_draft(
    model: ModelSource | Any, config: EngineConfig, decoder: AnyDecoder, lag: int, text: Text | None
) -> OpenDraft | None:
    """The model that `speculation_model` names. None: this device makes no guesses. Raises `ConfigError`, `ModelError`."""
    if decoder.device.type != "cpu" or lag:
        return None  # `_drafts` says so
    assert config.speculation_model is not None
    source = resolve(config.speculation_model)
    known = text if text is not None or not isinstance(model, ModelSource) else load_text(model)
    if other_architecture_of(source) is not None:
        raise ConfigError(
            f"{source.name} runs through transformers, which is too slow for guesses; use another speculation_model, or none",
            param="speculation_model",
        )
    drafting = open_cpu(
        source,
        activation_bits=config.activation_bits,
        cache_dtype=asked_kv_dtype(config),
        block_size=config.block_size,
    )
    opened = OpenDraft(drafting, kv_dtype_of(drafting, config))
    _check_vocabulary(known, decoder.spec.vocab_size, source, opened.decoder.spec.vocab_size)
    log.info("guesses come from the draft model %s", source.name)
    return opened


def _check_vocabulary(text: Text | None, vocab_size: int, source: ModelSource, draft_size: int) -> None:
    """A guess is a token id: it must mean the same in both models."""
    if text is None:
        raise ConfigError(
            "a speculation_model needs a model with a tokenizer, to compare vocabularies", param="speculation_model"
        )
    draft = load_text(source)
    count = min(vocab_size, draft_size)
    same = text.special_tokens == draft.special_tokens and all(
        text.token_bytes(token) == draft.token_bytes(token) for token in range(count)
    )
    if not same:
        raise ConfigError(
            f"the speculation_model {source.name} has another vocabulary than the model; a draft model must have the same "
            "tokenizer. Use a smaller model of the same family",
            param="speculation_model",
        )
