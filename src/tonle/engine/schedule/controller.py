"""The controller: moves the scheduler's limits toward stated latencies, by what steps are seen to cost.

Does: learn the cost of a step, choose how many tokens a mixed step may have, how much of it one prompt, and how many
sequences run; say so when a target cannot be met. Does not: plan, read a clock or touch a tensor. It is told when steps
were planned and committed, so tests drive it with a clock of their own.

The gap between two tokens of an answer (ITL) is the time between the commits of two steps. Its target comes first: 99 of
100 gaps stay below. The target for the time to the first token (TTFT, 95 of 100 requests) moves what is left: how much of
a step one prompt may take.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

from tonle.engine.messages import AdaptiveStats
from tonle.engine.schedule.lasting import Lasting
from tonle.engine.schedule.limits import SchedulerLimits, TunedLimits
from tonle.engine.schedule.step_cost import Margin, StepCost, Work
from tonle.engine.schedule.step_facts import StepFacts
from tonle.engine.schedule.tuned_value import TunedValue

log = logging.getLogger("tonle.engine")

_FIRST_BLOCKS = 4  # of prompts in a mixed step, before it is known what they cost
_FIRST_SHARE = 50  # percent of a step for one prompt, as without a controller
_MIN_STEPS = 16  # seen before they say something about the next step,
_MIN_PROMPT_STEPS = 8  # so many of them with prompts before they say what prompts cost,
_MIN_GAPS = 32  # and so many between two tokens before a target is said to be out of reach
_SLOW_MEMORY = 0.99
_SLOW_SHARE = 0.02  # of steps beyond the target: more than the one in a hundred that is allowed, and then some
_FIRST_TOKENS = 64  # requests, and
_FIRST_TOKENS_S = 30.0  # seconds that TTFT looks back on
_TTFT_SLACK = 0.7  # of the target: below it, prompts share steps again
_STATS_EVERY = 8  # steps


@dataclass(frozen=True, slots=True)
class Targets:
    """At least one is set. Seconds."""

    itl_s: float | None = None
    ttft_s: float | None = None


class Controller:
    """Told of every step twice, when it is planned and when it is committed; answers a commit with new limits, or None."""

    def __init__(self, targets: Targets, limits: SchedulerLimits) -> None:
        self._targets = targets
        self._cost = StepCost(limits.max_num_seqs, limits.max_num_batched_tokens, limits.context_length)
        self._decode_margin, self._mixed_margin = Margin(), Margin()
        most, block = limits.max_num_batched_tokens, min(limits.block_size, limits.max_num_batched_tokens)
        self._budget = TunedValue(block, most, most if targets.itl_s is None else _FIRST_BLOCKS * block)
        self._max_running = TunedValue(1, limits.max_num_seqs, limits.max_num_seqs)
        self._share = TunedValue(_FIRST_SHARE, 100, _FIRST_SHARE)
        self._planned: deque[StepFacts] = deque()
        self._committed_s = float("-inf")
        self._depth = 0  # of the last mixed step
        self._most_rows = 0  # that were seen to decode together
        self._slow_share = 0.0
        self._num_gaps = 0  # steps that `_slow_share` was read from
        self._first_tokens: deque[tuple[float, float]] = deque(maxlen=_FIRST_TOKENS)  # when, TTFT
        self._missed = {"target_itl": Lasting(), "target_ttft": Lasting()}
        self._num_changes = 0
        self._num_steps = 0
        self.limits = self._now_allowed()
        self.stats = self._read_stats()
        log.info("adaptive tuning is on, %s: mixed steps begin with %d of %d tokens", _wording(targets),
                 self._budget.value, most)  # fmt: skip

    def planned(self, facts: StepFacts) -> None:
        self._planned.append(facts)

    def forget_planned(self) -> None:
        """Steps that were planned will not be committed."""
        self._planned.clear()

    def committed(self, now: float) -> TunedLimits | None:
        """The oldest planned step is done. New limits, or None if they stay."""
        facts = self._planned.popleft()
        began = self._committed_s if facts.advances else max(self._committed_s, facts.planned_s)
        seconds, self._committed_s = now - began, now
        if not 0 < seconds < float("inf"):
            return None
        self._observe(facts, seconds, now)
        changes = [*self._follow_itl(facts, now), *self._follow_ttft(facts, now)]
        self._report_missed(facts, now)
        self._num_steps += 1
        if changes:
            self._num_changes += 1
            self.limits = self._now_allowed()
            log.info("adaptive tuning: %s", "; ".join(changes))
        if changes or self._num_steps % _STATS_EVERY == 0:
            self.stats = self._read_stats()
        return self.limits if changes else None

    # -- what is seen

    def _observe(self, facts: StepFacts, seconds: float, now: float) -> None:
        work = facts.work
        if facts.advances and self._targets.itl_s is not None:
            if self._knows_steps:
                margin = self._mixed_margin if work.tokens else self._decode_margin
                margin.learn(self._cost.expected_s(work), seconds)
            self._slow_share += (1 - _SLOW_MEMORY) * ((seconds > self._targets.itl_s) - self._slow_share)
            self._num_gaps += 1
        if self._cost.learn(work, seconds):
            # Those slow steps are over. How far steps exceed what is expected stays known: a machine may become slow again.
            self._slow_share, self._num_gaps = 0.0, 0
        self._most_rows = max(self._most_rows, work.rows)
        self._depth = facts.depth or self._depth
        self._first_tokens.extend((now, now - arrived_s) for arrived_s in facts.arrivals)

    @property
    def _knows_steps(self) -> bool:
        return self._cost.num_steps >= _MIN_STEPS

    @property
    def _knows_prompts(self) -> bool:
        return self._knows_steps and self._cost.num_prompt_steps >= _MIN_PROMPT_STEPS

    def _ttft_s(self, facts: StepFacts, now: float) -> float:
        """95 of 100 recent requests had their first token by then; one that still waits counts as long as it has waited."""
        while self._first_tokens and now - self._first_tokens[0][0] > _FIRST_TOKENS_S:
            self._first_tokens.popleft()
        seen = sorted(ttft_s for _, ttft_s in self._first_tokens)
        return max(seen[int(0.95 * (len(seen) - 1) + 0.5)] if seen else 0.0, facts.waiting_s)

    # -- what follows from it

    def _follow_itl(self, facts: StepFacts, now: float) -> list[str]:
        if self._targets.itl_s is None or not facts.advances or not self._knows_steps:
            return []
        changes = []
        old, suits = self._max_running.value, self._rows_that_suit(facts)
        if facts.demand > min(old, suits) and self._max_running.follow(suits, now):  # else no sequence would notice
            changes.append(f"sequences {old} → {self._max_running.value} ({self._decoding_takes(facts)})")
        old = self._budget.value
        if facts.depth and self._knows_prompts and self._budget.follow(self._tokens_that_suit(facts), now):
            changes.append(f"tokens of a mixed step {old} → {self._budget.value} ({self._mixed_step_takes(facts)})")
        return changes

    def _tokens_that_suit(self, facts: StepFacts) -> float:
        """The largest mixed step that meets the target, with these decoding rows and at the end of the longest prompt."""
        assert self._targets.itl_s is not None
        rows, cost = facts.work.rows, self._cost
        left_s = self._targets.itl_s / self._mixed_margin.value - cost.expected_s(Work(rows, 0, facts.decode_reads))
        per_token_s = cost.per_token_s + cost.per_read_s * facts.depth
        return rows + left_s / per_token_s if per_token_s > 0 else self._budget.high

    def _rows_that_suit(self, facts: StepFacts) -> float:
        """The most sequences whose decoding meets the target, with room for the least share of a prompt, up to half of the
        target. Where not even one does, or where so many were never seen, there is no reason to hold any back."""
        assert self._targets.itl_s is not None
        rows, cost, block = facts.work.rows, self._cost, self._budget.low
        within_s = self._targets.itl_s / max(self._mixed_margin.value, self._decode_margin.value)
        prompt_s = block * (cost.per_token_s + cost.per_read_s * self._depth)
        left_s = within_s - cost.fixed_s - min(prompt_s, within_s / 2)
        per_row_s = cost.per_row_s + cost.per_read_s * facts.decode_reads / max(1, rows)
        suit = left_s / per_row_s if per_row_s > 0 else self._max_running.high
        return suit if 1 <= suit < self._most_rows else self._max_running.high

    def _follow_ttft(self, facts: StepFacts, now: float) -> list[str]:
        target_s = self._targets.ttft_s
        if target_s is None or not (facts.arrivals or facts.waiting_s > target_s):
            return []
        ttft_s, old = self._ttft_s(facts, now), self._share.value
        suits = self._share.high if ttft_s > target_s else self._share.low if ttft_s < _TTFT_SLACK * target_s else old
        if not self._share.follow(suits, now):
            return []
        return [f"share of one prompt {old} → {self._share.value} % (TTFT of 95 in 100 requests {ttft_s * 1e3:.0f} ms, "
                f"target {target_s * 1e3:g})"]  # fmt: skip

    def _report_missed(self, facts: StepFacts, now: float) -> None:
        """One line when a target turns out to be out of reach, and one when it is met again."""
        if self._targets.itl_s is not None and facts.advances:
            at_least = self._budget.value == self._budget.low or not facts.depth
            nothing_left = at_least and facts.work.rows <= self._max_running.value
            self._say(
                "target_itl",
                self._missed["target_itl"].see(
                    nothing_left and self._num_gaps >= _MIN_GAPS and self._slow_share > _SLOW_SHARE, now
                ),
                f"{self._targets.itl_s * 1e3:g} ms is out of reach: with the least share for prompts and "
                f"{self._max_running.value} sequences at most, {self._slow_share:.0%} of steps take longer. "
                "Raise target_itl_ms (--target-itl)",
            )
        if (target_s := self._targets.ttft_s) is not None and (facts.arrivals or facts.waiting_s > target_s):
            ttft_s = self._ttft_s(facts, now)
            nothing_left = self._share.value == self._share.high
            allowed, settings = "a step can hold", "target_ttft_ms (--target-ttft)"
            if self._targets.itl_s is not None:
                allowed, settings = "target_itl allows", f"{settings} or target_itl_ms (--target-itl)"
            self._say(
                "target_ttft",
                self._missed["target_ttft"].see(nothing_left and ttft_s > target_s, now),
                f"{target_s * 1e3:g} ms is out of reach: 5 in 100 requests wait {ttft_s * 1e3:.0f} ms or longer, and prompts "
                f"have all that {allowed}. Raise {settings}, or spread the load",
            )

    def _say(self, name: str, missed: bool | None, why: str) -> None:
        if missed is None:
            return
        if missed:
            log.warning("adaptive tuning: %s %s", name, why)
        else:
            log.info("adaptive tuning: %s is met again", name)
        self.stats = self._read_stats()

    # Why a limit has its new value.

    def _decoding_takes(self, facts: StepFacts) -> str:
        assert self._targets.itl_s is not None
        decode_s = self._cost.expected_s(Work(facts.work.rows, 0, facts.decode_reads)) * self._decode_margin.value
        return (
            f"to decode {facts.work.rows} together is expected to take {decode_s * 1e3:.1f} ms in 99 of 100 steps, "
            f"target {self._targets.itl_s * 1e3:g}"
        )

    def _mixed_step_takes(self, facts: StepFacts) -> str:
        assert self._targets.itl_s is not None
        rows, tokens = facts.work.rows, max(0, self._budget.value - facts.work.rows)
        work = Work(rows, tokens, facts.decode_reads + tokens * facts.depth)
        mixed_s = self._cost.expected_s(work) * self._mixed_margin.value
        if self._budget.value == self._budget.low and mixed_s > self._targets.itl_s:
            return (
                f"even the least step ({self._budget.low} tokens) is expected to take {mixed_s * 1e3:.0f} ms, with {rows} that "
                f"decode and a prompt of {facts.depth}, target {self._targets.itl_s * 1e3:g}"
            )
        return (
            f"with {rows} that decode, {tokens} tokens of a prompt of {facts.depth} are expected to take {mixed_s * 1e3:.1f} ms "
            f"in 99 of 100 steps, target {self._targets.itl_s * 1e3:g}"
        )

    def _now_allowed(self) -> TunedLimits:
        return TunedLimits(self._budget.value, self._share.value / 100, self._max_running.value)

    def _read_stats(self) -> AdaptiveStats:
        itl_s, ttft_s, cost = self._targets.itl_s, self._targets.ttft_s, self._cost
        return AdaptiveStats(
            max_num_batched_tokens=self._budget.value,
            prefill_share=self._share.value / 100,
            max_num_seqs=self._max_running.value,
            target_itl_ms=None if itl_s is None else itl_s * 1e3,
            target_ttft_ms=None if ttft_s is None else ttft_s * 1e3,
            num_changes=self._num_changes,
            unreachable=[name for name, missed in self._missed.items() if missed.lasts],
            slow_share=self._slow_share,
            step_ms=cost.fixed_s * 1e3 if self._knows_steps else None,
            row_ms=cost.per_row_s * 1e3 if self._knows_steps else None,
            token_ms=cost.per_token_s * 1e3 if self._knows_prompts else None,
            read_ms=cost.per_read_s * 1e3 if self._knows_prompts else None,
            margin=self._mixed_margin.value,
        )


def _wording(targets: Targets) -> str:
    wanted = []
    if targets.itl_s is not None:
        wanted.append(f"target_itl {targets.itl_s * 1e3:g} ms")
    if targets.ttft_s is not None:
        wanted.append(f"target_ttft {targets.ttft_s * 1e3:g} ms")
    return " and ".join(wanted)
