"""The engine's loop: take mail, plan, launch, commit the step before, publish. The whole engine is these five lines.

Runs on a thread or process of its own; nothing else touches the scheduler or the runner.
"""

from __future__ import annotations

import logging
import time
from collections import deque

import msgspec

from tonle.engine.adapters.loaded_adapters import LoadedAdapters
from tonle.engine.mailbox import Mailbox
from tonle.engine.messages import (
    ADAPTER_UNREADABLE,
    AdapterReply,
    Adapters,
    Cancel,
    DropCache,
    LoadAdapter,
    LoopStats,
    Step,
    Stop,
    Submit,
    UnloadAdapter,
)
from tonle.engine.plan import Plan
from tonle.engine.run.runner import LaunchedStep, Runner
from tonle.engine.schedule import Controller, Scheduler, StepOutcome, facts_of

log = logging.getLogger("tonle.engine")

_READING_S = 0.005  # longest sleep while adapters are being read: what was read is taken in between steps
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
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._mailbox = mailbox
        self._fatal = fatal  # a broken step ends the loop: the device cannot be trusted after it
        self._launched: deque[LaunchedStep] = deque()
        self._refused: dict[int, str] = {}
        self._stats = LoopStats(profile={} if runner.profile is None else runner.profile)
        self._stopped = False
        self._controller = controller  # of the scheduler's limits; None: they stay as they are
        if controller is not None:
            scheduler.tuned, self._stats.adaptive = controller.limits, controller.stats
        self._adapters = adapters  # None: requests use the model as it is

    @property
    def adapters(self) -> Adapters:
        """What fronts are told about adapters before they get the `ModelCard`."""
        return Adapters([]) if self._adapters is None else self._adapters.message

    def run(self) -> None:
        try:
            while not self._stopped:
                self.step()
        finally:
            if self._adapters is not None:
                self._adapters.close()

    def step(self) -> None:
        changed = self._take_mail()
        began = time.monotonic()
        plan = self._scheduler.plan(began)
        if plan.rows:
            if self._controller is not None:
                self._tell_planned(self._controller, plan, began)
            self._launch(plan)
        while len(self._launched) > (self._runner.lag if plan.rows else 0):
            self._collect(self._launched.popleft())
            changed = False  # `_collect` published the state
        if plan.rows:
            self._stats.busy_s += time.monotonic() - began
        if changed:
            self._publish(StepOutcome())

    def _take_mail(self) -> bool:
        """Handle what came. Sleeps when there is nothing to compute. True if anything came."""
        wait_s: float | None = 0.0
        if not self._launched and self._scheduler.idle:
            wait_s = None if self._adapters is None else self._adapters.wake_s
        elif not self._launched and not self._scheduler.running:
            wait_s = self._scheduler.wake_s(time.monotonic())
        if self._adapters is not None and self._adapters.is_reading:
            wait_s = self._wait_for_adapters(wait_s)
        mail = self._mailbox.take(wait_s)
        for message in mail:
            match message:
                case Submit(requests):
                    for request in requests:
                        if (why := self._scheduler.refusal(request)) is not None:
                            self._refused[request.handle] = why
                        else:
                            self._scheduler.add(request)
                case Cancel(handles):
                    for handle in handles:
                        self._scheduler.cancel(handle)
                case DropCache():
                    self._scheduler.pool.drop_idle()
                case LoadAdapter() | UnloadAdapter():
                    if self._adapters is None:
                        self._mailbox.publish(AdapterReply(message.reply, _NO_ADAPTERS))
                    else:
                        self._adapters.handle(message)
                case Stop():
                    self._stopped = True
        if self._adapters is not None:
            self._take_adapters(self._adapters)
        return bool(mail)

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

    def _collect(self, launched: LaunchedStep) -> None:
        try:
            result = self._runner.collect(launched)
        except Exception:
            self._break(launched.plan)
            return
        self._stats.num_steps += 1
        self._stats.generation_tokens += len(result.tokens)
        outcome = self._scheduler.commit(launched.plan, result)
        if self._controller is not None:
            self._tell_committed(self._controller)
        self._publish(outcome)

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
        ended = self._scheduler.fail(broken) if self._fatal else self._scheduler.suspect(broken)
        log.exception("a step of %d rows failed; %d requests end with an error", len(plan.rows), len(ended))
        outcome = StepOutcome(finished=dict.fromkeys(ended, ("error", None)))
        self._publish(outcome)
        if self._fatal:
            raise RuntimeError("a step failed and the device cannot be trusted any more")

    def _publish(self, outcome: StepOutcome) -> None:
        scheduler, pool, stats = self._scheduler, self._scheduler.pool, self._stats
        stats.num_running = len(scheduler.running)
        stats.num_waiting = len(scheduler.waiting)
        stats.num_free_blocks = pool.num_free
        stats.num_cached_blocks = pool.num_idle
        stats.kv_usage = pool.num_held / pool.num_blocks
        stats.prefix_queries = scheduler.prefix_queries
        stats.prefix_hits = scheduler.prefix_hits
        stats.num_preemptions = scheduler.num_preemptions
        stats.prompt_tokens = scheduler.prompt_tokens
        if self._adapters is not None and (
            scheduler.slots.are_used or stats.running_adapters or stats.waiting_adapters
        ):
            stats.running_adapters = self._adapters.names(scheduler.slots.running())
            stats.waiting_adapters = self._adapters.names(scheduler.waiting.adapters)
        started, scheduler.started = scheduler.started, {}
        refused, self._refused = self._refused, {}
        self._mailbox.publish(
            Step(
                handles=outcome.handles,
                counts=[1] * len(outcome.handles),
                tokens=outcome.tokens,
                finished=outcome.finished,
                refused=refused,
                started=started,
                logprobs=outcome.logprobs,
                prompt_logprobs=outcome.prompt_logprobs,
                embeddings=outcome.embeddings,
                stats=msgspec.structs.replace(stats),  # a copy: the front keeps it while we go on counting
            )
        )
