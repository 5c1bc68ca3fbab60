"""Who runs in the next step. Does: queue, admit, chunk, preempt, finish, tune limits. Does not: touch tensors or read a clock."""

from tonle.engine.schedule.bound import postpone, wanted_draws
from tonle.engine.schedule.bound_drafts import BoundDrafts
from tonle.engine.schedule.controller import Controller, Targets
from tonle.engine.schedule.drafts import Drafts
from tonle.engine.schedule.limits import SchedulerLimits, TunedLimits
from tonle.engine.schedule.outcome import StepOutcome
from tonle.engine.schedule.scheduler import Scheduler
from tonle.engine.schedule.sequence import Sequence
from tonle.engine.schedule.sequence_notes import spent_without_steps
from tonle.engine.schedule.step_facts import StepWork, facts_of, work_of
from tonle.engine.schedule.step_notes import StepNotes

__all__ = ["BoundDrafts", "Controller", "Drafts", "Scheduler", "SchedulerLimits", "Sequence", "StepNotes", "StepOutcome",
           "StepWork", "Targets", "TunedLimits", "facts_of", "postpone", "spent_without_steps", "wanted_draws",
           "work_of"]  # fmt: skip
