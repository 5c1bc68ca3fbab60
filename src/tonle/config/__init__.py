"""Every knob, as flat data with a reason beside it; read from file < environment < flags in one place.

Does: hold defaults, validate, explain what is refused. Does not: act on a knob. Runs: anywhere, imports nothing heavy.
"""

from tonle.config.engine import EngineConfig

__all__ = ["EngineConfig"]
