"""Logits to tokens. Does: penalties, filters, draws, log-probabilities. Does not: know of blocks, schedules or text.

`noise.py` alone is free of torch: the front draws seeds with it.
"""
