"""Search for the settings of a server that hold an SLO: simulated first, then measured, then confirmed (`tonle tune`).

Does: choose what to try (`space.py`, `search.py`), rank it by simulation (`stage_simulated.py`), measure the best
(`stage_measured.py`), correct the simulation (`correction.py`), judge (`verdict.py`), write results.
Does not: load torch; servers run in processes of their own.

    result = run_tune(TuneOptions(bench=…, goal=Goal(slo), out=Path("tuning")), print)
    result.settings, result.verdict.sentence
"""

from __future__ import annotations

from tonle.tune.objective import Goal, Outcome
from tonle.tune.options import TuneOptions
from tonle.tune.results import TuneResult
from tonle.tune.tuning import run_tune

__all__ = ["Goal", "Outcome", "TuneOptions", "TuneResult", "run_tune"]
