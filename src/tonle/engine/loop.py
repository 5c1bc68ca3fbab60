"""The engine's loop: take mail, plan, launch, commit the step before, publish. The whole engine is these five lines.

Runs on a thread or process of its own; nothing else touches the scheduler or the runner. A request whose answer must fit a
grammar waits until that is compiled, before the scheduler gets it; steps draw for such requests last (docs/architecture.md,
"Ahead of the host").
"""

from __future__ import annotations

import logging
import time
from collections import deque
from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from tonle.engine.adapters.loaded_adapters import LoadedAdapters
from tonle.engine.constraint import ConstraintCompiler, needs_constraint
from tonle.engine.loop_stats import note_scheduler
from tonle.engine.mailbox import Mailbox
from tonle.engine.messages import (
    ADAPTER_UNREADABLE,
    AdapterReply,
    Adapters,
    Cancel,
    DropCache,
    LoadAdapter,
    LoopStats,
    ReleaseMemory,
    Step,
    Stop,
    Submit,
    UnloadAdapter,
)
from tonle.engine.outside_blocks import OutsideBlocks
from tonle.engine.plan import AfterGuesses, Masks, Plan, StepResult
from tonle.engine.request import Request
from tonle.engine.run.runner import LaunchedStep, Runner
from tonle.engine.schedule import (
    BoundDrafts,
    Controller,
    Scheduler,
    Sequence,
    StepNotes,
    StepOutcome,
    facts_of,
    postpone,
    spent_without_steps,
    wanted_draws,
)

if TYPE_CHECKING:
    from tonle.engine.ranks.leading_decoder import LeadingDecoder

log = logging.getLogger("tonle.engine")

_READING_S = 0.005  # longest sleep while adapters are being read: what was read is taken in between steps
_MASK_S = 0.0005  # longest that a step with other rows waits for masks
_COMPILING_S = 0.001  # the same while grammars are compiled
_NO_COMPILER = (
    "this engine takes neither structured output nor a token budget for thinking: it has no tokenizer, so it does not know "
    "what its tokens say"
)
_NO_ADAPTERS = (
    "this engine takes no LoRA adapters; start it with enable_lora=True (--enable-lora), or with adapters of its own: "
    "lora={...} (--lora NAME=PATH)"
)


class Loop:
    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        mailbox: Mailbox,
        *,
        fatal: bool = False,
        controller: Controller | None = None,
        adapters: LoadedAdapters | None = None,
        compiler: ConstraintCompiler | None = None,
        ranks: LeadingDecoder | None = None,
        outside: OutsideBlocks | None = None,
    ) -> None:
        self._scheduler = scheduler
        scheduler.notes = StepNotes()
        self._runner = runner
        self._mailbox = mailbox
        self._fatal = fatal  # a broken step ends the loop: the device cannot be trusted after it
        self._launched: deque[LaunchedStep] = deque()
        self._kernel_changes = runner.kernel_changes
        self._refused: dict[int, str] = {}
        self._stats = LoopStats(profile={} if runner.profile is None else runner.profile)
        self._stopped = False
        self._controller = controller  # of the scheduler's limits; None: they stay as they are
        if controller is not None:
            scheduler.tuned, self._stats.adaptive = controller.limits, controller.stats
        self._adapters = adapters  # None: requests use the model as it is
        self._compiler = compiler  # None: requests that need a constraint are refused
        self._compiling: dict[int, float] = {}  # requests that the compiler has: handle -> when it got them
        self._ranks = ranks  # other devices that compute the model with this one; None: there are none
        self._outside = outside or OutsideBlocks(scheduler)
        self._outside.begin(self._kernel_changes, lambda: self._stats.busy_s / max(1, scheduler.prompt_tokens))
        self._late: list[Sequence] = []  # sequences of the scheduler whose masks are still being filled

    @property
    def adapters(self) -> Adapters:
        """What fronts are told about adapters before they get the `ModelCard`."""
        return Adapters([]) if self._adapters is None else self._adapters.message

    def run(self) -> None:
        with ExitStack() as parts:  # all of them are closed, also if one cannot be
            for part in (self._ranks, self._outside, self._compiler, self._adapters):
                if part is not None:
                    parts.callback(part.close)
            try:
                while not self._stopped:
                    self.step()
            except Exception:
                if self._ranks is not None:
                    self._ranks.await_loss()
                raise

    def step(self) -> None:
        changed = self._take_mail()
        changed |= self._outside.before_plan()
        if self._late:
            self._call_late()
        if self._kernel_changes != self._runner.kernel_changes and not self._launched:
            self._kernel_changes = self._runner.kernel_changes
            self._scheduler.recompute()
            self._outside.use_kernels(self._kernel_changes)
        began = time.monotonic()
        plan = self._scheduler.plan(began)
        self._outside.before_launch()
        if plan.rows:
            if self._controller is not None:
                self._tell_planned(self._controller, plan, began)
            self._launch(plan)
        if plan.bound:
            self._draw_bound(plan)
        while len(self._launched) > (self._runner.lag if plan.rows else 0):
            if (outcome := self._collect(self._launched.popleft())) is not None:
                self._publish(outcome)
            changed = False  # the state was published
        if plan.rows:
            self._stats.busy_s += time.monotonic() - began
        if changed:
            self._publish(StepOutcome())
        self._outside.after_step()

    def _take_mail(self) -> bool:
        """Handle what came. Sleeps when there is nothing to compute. True if anything came."""
        wait_s: float | None = 0.0
        if not self._launched and self._scheduler.idle:
            wait_s = None if self._adapters is None else self._adapters.wake_s
        elif not self._launched and not self._scheduler.running:
            wait_s = self._scheduler.wake_s(time.monotonic())
        if self._adapters is not None and self._adapters.is_reading:
            wait_s = self._wait_for_adapters(wait_s)
        if self._compiler is not None and self._compiler.is_busy:
            wait_s = _COMPILING_S if wait_s is None else min(wait_s, _COMPILING_S)
        wait_s = self._outside.shorten(wait_s)
        if self._late and not self._launched:
            wait_s = _MASK_S  # they may be all that runs
        mail = self._mailbox.take(wait_s)
        for message in mail:
            match message:
                case Submit(requests):
                    for request in requests:
                        self._submit(request)
                case Cancel(handles):
                    for handle in handles:
                        self._cancel(handle)
                case DropCache():
                    self._scheduler.pool.drop_idle()
                    self._forget_texts()
                    self._outside.clear()
                case ReleaseMemory():
                    self._scheduler.recompute()
                    self._forget_texts()
                    self._outside.release_memory()
                    if not self._scheduler.pool.num_held:  # else another engine may still fetch what is there
                        self._runner.release_memory()
                        if self._scheduler.drafts is not None:
                            self._scheduler.drafts.release_memory()
                        if self._ranks is not None:
                            self._ranks.release_memory()
                case LoadAdapter() | UnloadAdapter():
                    if self._adapters is None:
                        self._mailbox.publish(AdapterReply(message.reply, _NO_ADAPTERS))
                    else:
                        self._adapters.handle(message)
                case Stop():
                    self._stopped = True
        if self._adapters is not None:
            self._take_adapters(self._adapters)
        compiled = self._compiling and self._take_compiled()
        return bool(mail or compiled)

    def _forget_texts(self) -> None:
        if self._scheduler.drafts is not None:
            self._scheduler.drafts.forget_texts()

    def _submit(self, request: Request) -> None:
        if (why := self._scheduler.refusal(request)) is not None:
            self._refused[request.handle] = why
        elif not needs_constraint(request):
            self._scheduler.add(request)
        elif self._compiler is None:
            self._refused[request.handle] = _NO_COMPILER
        else:
            self._compiler.ask(request)
            self._compiling[request.handle] = time.monotonic()

    def _cancel(self, handle: int) -> None:
        if handle in self._compiling:
            assert self._compiler is not None
            del self._compiling[handle]
            self._compiler.forget(handle)
        else:
            self._scheduler.cancel(handle)

    def _take_compiled(self) -> bool:
        """Requests whose constraints are ready go to the scheduler. True if there were any."""
        assert self._compiler is not None
        done, now = self._compiler.take(), time.monotonic()
        for each in done:
            request = each.request
            compiled_s = now - self._compiling.pop(request.handle)
            # Asked again: its adapter may have been unloaded meanwhile.
            if why := each.error or self._scheduler.refusal(request):
                self._refused[request.handle] = why
            elif (ended := self._scheduler.add(request, each.constraint, compiled_s=compiled_s)) is not None:
                self._scheduler.started[request.handle] = (now, 0)
                ended.spent[request.handle] = spent_without_steps(request, now, compiled_s=compiled_s)
                self._stats.generation_tokens += len(ended.tokens)
                self._publish(ended)
        return bool(done)

    def _wait_for_adapters(self, wait_s: float | None) -> float | None:
        """How long to sleep while one is being read: not longer than that may take, and not at all if other work is left."""
        nothing_else = not self._scheduler.running and self._scheduler.waiting.peek() is None
        return _READING_S if nothing_else else wait_s

    def _take_adapters(self, adapters: LoadedAdapters) -> None:
        """Those that have been read since. Requests that wait for one that cannot be read again end."""
        for adapter in adapters.take_read():
            handles = self._scheduler.waiting.handles(adapter)
            for handle in handles:
                self._scheduler.cancel(handle)
            self._publish(StepOutcome(finished=dict.fromkeys(handles, (ADAPTER_UNREADABLE, None))))

    def _launch(self, plan: Plan) -> None:
        try:
            self._launched.append(self._runner.launch(plan))
        except Exception:
            self._break(plan)

    def _draw_bound(self, plan: Plan) -> None:
        """The draws that `launch` left open, now that the tokens ahead of them are known. `plan` is the last one launched."""
        assert self._compiler is not None
        outcomes = []
        while len(self._launched) > 1:  # the steps ahead
            outcomes.append(self._collect(self._launched.popleft()))
        if self._launched:  # else a step failed
            entries, constraints = wanted_draws(plan)
            allowed = self._runner.mask_rows(len(entries), self._compiler.mask_words)
            # Rows that are not bound wait a moment at most; where there are none, nothing is lost by waiting.
            has_others = self._runner.lag > 0 and sum(plan.samples) > len(plan.bound)
            try:
                filled = self._compiler.fill(constraints, allowed, _MASK_S if has_others else None) if entries else []
                with BoundDrafts(plan, self._compiler.mask_words, self._scheduler.limits.min_forced) as after:
                    self._runner.draw_bound(self._launched[-1], self._in_time(plan, entries, allowed, filled, after))
            except Exception:
                self._launched.pop()
                self._break(plan)
        for outcome in outcomes:  # after the draw, which the device waits for
            if outcome is not None:
                self._publish(outcome)

    def _in_time(
        self, plan: Plan, entries: list[int], allowed: np.ndarray, filled: list[bool | None], after: AfterGuesses
    ) -> Masks:
        """The masks that are there. The sequences of the others miss the step."""
        places = [place for place, is_filled in enumerate(filled) if is_filled is not None]
        if len(places) < len(entries):
            self._late += [postpone(plan, i) for i, is_filled in zip(entries, filled, strict=True) if is_filled is None]
            for place, old in enumerate(places):
                allowed[place] = allowed[old]
        return Masks(
            [entries[place] for place in places],
            allowed[: len(places)],
            [bool(filled[place]) for place in places],
            after,
        )

    def _call_late(self) -> None:
        """Sequences whose masks have come take part in steps again."""
        assert self._compiler is not None
        late, self._late = self._late, []
        for sequence in late:
            assert sequence.constraint is not None
            if sequence.done:
                self._compiler.drop_mask(sequence.constraint)
            elif self._compiler.is_late(sequence.constraint):
                self._late.append(sequence)
            else:
                sequence.is_late = False

    def _collect(self, launched: LaunchedStep) -> StepOutcome | None:
        """Wait for a step and commit it. None: it failed."""
        if (result := self._wait(launched)) is None:
            return None
        if (notes := self._scheduler.notes) is not None:
            notes.step_ended(launched.plan, time.monotonic())
        outcome = self._scheduler.commit(launched.plan, result)
        self._outside.committed(outcome)
        self._stats.num_steps += 1
        self._stats.generation_tokens += len(outcome.tokens)
        if self._controller is not None:
            self._tell_committed(self._controller)
        return outcome

    def _wait(self, launched: LaunchedStep) -> StepResult | None:
        try:
            return self._runner.collect(launched)
        except Exception:
            self._break(launched.plan)
            return None

    def _tell_planned(self, controller: Controller, plan: Plan, now: float) -> None:
        running, waiting = self._scheduler.running, self._scheduler.waiting
        waiting_s = 0.0 if (first := waiting.peek()) is None else now - first.request.arrived_s
        controller.planned(facts_of(plan, now, waiting_s=waiting_s, demand=len(running) + len(waiting)))

    def _tell_committed(self, controller: Controller) -> None:
        if (tuned := controller.committed(time.monotonic())) is not None:
            self._scheduler.tuned = tuned
        self._stats.adaptive = controller.stats

    def _break(self, plan: Plan) -> None:
        """A step failed. Its requests are tried again one by one, with those of steps launched besides it: the one at
        fault ends with an error. After a fault of the device all of them end."""
        broken = [plan, *(launched.plan for launched in self._launched)]
        self._launched.clear()
        if self._controller is not None:
            self._controller.forget_planned()
        if self._scheduler.notes is not None:
            self._scheduler.notes.forget_planned()
        ended = self._scheduler.fail(broken) if self._fatal else self._scheduler.suspect(broken)
        log.exception("a step of %d rows failed; %d requests end with an error", len(plan.rows), len(ended))
        outcome = StepOutcome(finished=dict.fromkeys(ended, ("error", None)))
        self._publish(outcome)
        if self._fatal:
            raise RuntimeError("a step failed and the device cannot be trusted any more")

    def _publish(self, outcome: StepOutcome) -> None:
        scheduler, stats = self._scheduler, self._stats
        note_scheduler(stats, scheduler, len(self._compiling))
        self._outside.note(stats)
        if self._adapters is not None and (
            scheduler.slots.are_used or stats.running_adapters or stats.waiting_adapters
        ):
            stats.running_adapters = self._adapters.names(scheduler.slots.running())
            stats.waiting_adapters = self._adapters.names(scheduler.waiting.adapters)
        started, scheduler.started = scheduler.started, {}
        refused, self._refused = self._refused | outcome.refused, {}
        self._mailbox.publish(
            Step(
                handles=outcome.handles,
                counts=outcome.counts,
                tokens=outcome.tokens,
                finished=outcome.finished,
                refused=refused,
                started=started,
                logprobs=outcome.logprobs,
                prompt_logprobs=outcome.prompt_logprobs,
                embeddings=outcome.embeddings,
                kept=outcome.kept,
                spent=outcome.spent,
                guesses=outcome.guesses,
                stats=msgspec.structs.replace(stats),  # a copy: the front keeps it while we go on counting
            )
        )
