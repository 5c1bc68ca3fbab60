"""Every setting, declared once with its default and help; read from file < environment < flags in one place.

Does: hold defaults, validate, explain what is refused. Does not: act on a setting. Runs: anywhere, imports nothing heavy.
"""

from tonle.config.engine import EngineConfig

__all__ = ["EngineConfig"]
