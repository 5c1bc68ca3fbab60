"""Python runs this file when an engine of the chaos run starts, because its folder is in PYTHONPATH.

Does: make every step of the engine raise while the file CHAOS_RAISE_FILE exists. Does not: touch any other process.
"""

from __future__ import annotations

import os
import sys
from typing import Any


def _raise_in_steps(path: str) -> None:
    from tonle.engine.run.runner import Runner

    launch = Runner.launch

    def launch_or_raise(self: Any, plan: Any) -> Any:
        if os.path.exists(path):  # noqa: PTH110  (cheap: it is asked in every step)
            raise RuntimeError("this step raises because a test of faults asked for it")
        return launch(self, plan)

    Runner.launch = launch_or_raise  # type: ignore[method-assign]


if "tonle.engine.process" in sys.orig_argv and "CHAOS_RAISE_FILE" in os.environ:
    _raise_in_steps(os.environ["CHAOS_RAISE_FILE"])
