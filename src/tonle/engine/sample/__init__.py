"""Logits to tokens. Does: penalties, filters, draws, log-probabilities. Does not: know of blocks, schedules or text."""

from tonle.engine.sample.sampler import Sampler

__all__ = ["Sampler"]
