"""The front of an engine: text and prompts in, deltas out. Torch-free; lives in the caller's (HTTP) process."""

from __future__ import annotations
