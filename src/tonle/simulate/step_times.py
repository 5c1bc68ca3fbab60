"""`StepTimes`: how long a step takes. The seam between the simulated replica and what is known about a device.

A replica with `lag` 0 computes a step in `device_s` while the host waits. With `lag` 1 the host plans and launches the next step
(`host_s`) while the device still computes the one before: the longer of the two sets the pace.
"""

from __future__ import annotations

from typing import Protocol

from tonle.engine.schedule.step_facts import StepWork


class StepTimes(Protocol):
    """Fitted to measured steps (`fitted_times.py`), or derived from a device's data sheet (`advise/roofline.py`)."""

    @property
    def lag(self) -> int:
        """Steps that may be launched before the first of them is read: `Runner.lag`."""
        ...

    @property
    def front_s(self) -> float:
        """From the moment a caller sends a request until the engine's loop can take it: HTTP, template, tokenizing, mailbox."""
        ...

    @property
    def back_s(self) -> float:
        """From the moment the loop has a step's tokens until the caller sees them: detokenizing, HTTP."""
        ...

    def host_s(self, work: StepWork) -> float:
        """Of the loop's thread: plan, launch, commit, publish."""
        ...

    def device_s(self, work: StepWork) -> float:
        """Of the device, from the start of the step to its tokens."""
        ...
