"""Who runs in the next step. Does: queue, admit, chunk, preempt, finish. Does not: touch tensors or time a step."""

from tonle.engine.schedule.scheduler import Scheduler, SchedulerLimits, StepOutcome

__all__ = ["Scheduler", "SchedulerLimits", "StepOutcome"]
