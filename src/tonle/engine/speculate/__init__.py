"""Guesses of what comes next, from text that was seen before.

Does: index, guess, weigh what pays. Does not: decide who runs (`engine/schedule/drafts.py` takes guesses into plans).
"""

from tonle.engine.speculate.ahead import AheadSpeculator
from tonle.engine.speculate.speculator import Speculator

__all__ = ["AheadSpeculator", "Speculator"]
