"""The plan, carried out. Does: rows, inputs, forward, sampling. Does not: decide anything."""

from tonle.engine.run.runner import Runner

__all__ = ["Runner"]
