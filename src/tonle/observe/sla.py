"""`Sla`: whether requests meet their latency targets, since when not, how fast the allowance is used up, and why.

Does: hold p95 targets of whole requests (e2e), of the first token (ttft) and of the time between tokens (itl, a request's mean)
against the requests of the last five minutes. Does not: count refusals, which say nothing about speed, or raise alerts.

`report` is what `/health` shows: the verdict of this moment on whole requests. `verdict` does not flip with a single request: a
target counts as missed once more than 5 % of at least `MIN_REQUESTS` are beyond it, as met again once it has held for a minute.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Literal

import msgspec

from tonle.observe.seen_request import SeenRequest
from tonle.observe.target_window import PARTS, Excess, Part, Parts, TargetWindow, WindowState
from tonle.telemetry.percentile import percentile

WINDOW = 1000  # requests of `report`
WINDOW_S = 300.0
MIN_REQUESTS = 20  # before a target counts as missed
HOLD_S = 60.0  # a missed target must hold for so long
ALLOWED = 0.05  # share of requests that may be beyond a p95 target
_MAX_AGE_S = 1.0  # of a verdict

TargetName = Literal["e2e", "ttft", "itl"]
TITLES: dict[TargetName, str] = {"e2e": "Latency", "ttft": "TTFT", "itl": "ITL"}
_TELLING = ("ok", "cached", "failed", "cancelled")  # statuses: a request that was refused says nothing about speed
_CAUSES: dict[Part, str] = {
    "gateway": "work in the gateway",
    "queueing": "queueing",
    "prefill": "prefill",
    "backend": "queueing or prefill",
    "decode": "decode",
    "stalls": "decode stalled by prompts",
    "preemption": "preemption",
    "delivery": "delivery to callers",
}


class TargetVerdict(msgspec.Struct, frozen=True):
    name: TargetName
    target_s: float
    value_s: float | None  # p95 of the last five minutes; None: no request
    meets: bool
    since: float | None  # unix seconds: missed since then; None: met
    burn_rate: float  # share of requests beyond the target / 5 %
    cause: str  # "queueing at b"; empty: met
    requests: int = 0  # that were counted

    @property
    def sentence(self) -> str:
        title, target = TITLES[self.name], _seconds(self.target_s)
        if not self.meets and self.since is not None:
            began = time.strftime("%H:%M", time.localtime(self.since))
            cause = f": {self.cause}" if self.cause else ""
            if self.burn_rate <= 1:  # holds again, for less than a minute
                now = "no request in five minutes" if self.value_s is None else f"now {_seconds(self.value_s)}"
                return f"{title} p95 was over {target} since {began}{cause}; {now}"
            return f"{title} p95 over {target} since {began}{cause}"
        if self.value_s is None:
            return f"{title} p95 target {target}: no request in five minutes"
        few = (
            f", of {self.requests} request{'' if self.requests == 1 else 's'} only"
            if self.requests < MIN_REQUESTS
            else ""
        )
        return f"{title} p95 {_seconds(self.value_s)}, target {target}{few}"


class SlaVerdict(msgspec.Struct, frozen=True):
    meets: bool
    burn_rate: float  # of the worst target
    targets: list[TargetVerdict]
    sentence: str


class Sla:
    """`target_p95_s` is the target of whole requests; the others are off unless given."""

    def __init__(
        self,
        target_p95_s: float,
        *,
        ttft_p95_s: float | None = None,
        itl_p95_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.target_p95_s = target_p95_s
        self._clock = clock
        self._calls: deque[tuple[float, float, float, float, bool]] = deque(maxlen=WINDOW)
        wanted: dict[TargetName, float | None] = {"e2e": target_p95_s, "ttft": ttft_p95_s, "itl": itl_p95_s}
        self._targets = {
            name: _Target(name, target_s, now) for name, target_s in wanted.items() if target_s is not None
        }
        self._verdict: SlaVerdict | None = None
        self._judged_s = 0.0

    # -- what /health shows

    def add(self, total_s: float, queue_s: float, first_s: float, *, failed: bool) -> None:
        """For `report`. `first_s`: from arrival to the first byte."""
        self._calls.append((self._clock(), total_s, queue_s, first_s, failed))

    def report(self) -> dict[str, object]:
        """`meets_sla`, percentiles in seconds, and, if the target is missed, where the time went."""
        since_s = self._clock() - WINDOW_S
        calls = [call for call in self._calls if call[0] >= since_s]
        totals = sorted(call[1] for call in calls)
        p50, p95, p99 = (round(percentile(totals, percent), 6) for percent in (50, 95, 99))
        meets = p95 <= self.target_p95_s
        slow = [call for call in calls if call[1] > self.target_p95_s]
        report: dict[str, object] = {
            "meets_sla": meets,
            "sla_target_p95_s": self.target_p95_s,
            "requests": len(calls),
            "failed": sum(call[4] for call in calls),
            "latency_s": {"p50": p50, "p95": p95, "p99": p99},
            # 1 = exactly 5 % of the requests are slower than the target
            "burn_rate": round(len(slow) / len(calls) / ALLOWED, 3) if calls else 0.0,
        }
        if not meets:
            report["why_not"] = _why(slow)
        return report

    # -- what the dashboard, alerts and metrics show

    def ended(self, seen: SeenRequest) -> None:
        """For `verdict`. A caller that gave up counts where it had waited for longer than the target. A request that no model
        ran for says nothing about speed."""
        status = seen.status
        if not seen.computed or status not in _TELLING:
            return
        now_s = self._clock()
        parts, backend = parts_of(seen), "" if seen.is_local else seen.backend
        for name, target in self._targets.items():
            value_s = _value(name, seen)
            if value_s is not None and (status != "cancelled" or value_s > target.window.target_s):
                target.count(value_s)
                target.window.add(now_s, value_s, backend, _counted(name, parts, seen))

    def counts(self) -> dict[TargetName, tuple[int, int]]:
        """Since the start: requests held against each target, and those beyond it."""
        return {name: (target.num_counted, target.num_beyond) for name, target in self._targets.items()}

    def verdict(self) -> SlaVerdict:
        """Judged once a second at most."""
        now_s = self._clock()
        if self._verdict is None or now_s - self._judged_s >= _MAX_AGE_S:
            targets = [target.judge(now_s) for target in self._targets.values()]
            self._judged_s = now_s
            self._verdict = SlaVerdict(
                meets=all(target.meets for target in targets),
                burn_rate=max(target.burn_rate for target in targets),
                targets=targets,
                sentence="; ".join(_shown_sentences(targets)),
            )
        return self._verdict


class _Target:
    """One target, and what was said of it last."""

    def __init__(self, name: TargetName, target_s: float, now: Callable[[], float]) -> None:
        self._name = name
        self.window = TargetWindow(target_s, WINDOW_S)
        self._now = now  # unix seconds
        self._missed_since: float | None = None  # unix seconds
        self._held_since_s: float | None = None  # monotonic: a missed target holds since then
        self._cause = ""
        self.num_counted = 0  # since the start
        self.num_beyond = 0

    def count(self, value_s: float) -> None:
        self.num_counted += 1
        self.num_beyond += value_s > self.window.target_s

    def judge(self, now_s: float) -> TargetVerdict:
        state = self.window.read(now_s)
        beyond = state.slow_share > ALLOWED
        if beyond and (state.count >= MIN_REQUESTS or self._missed_since is not None):
            self._held_since_s = None
            self._cause = _words(state.excess())
            if self._missed_since is None:
                self._missed_since = self._now()
        elif self._missed_since is not None:
            if self._held_since_s is None:
                self._held_since_s = now_s
            if now_s - self._held_since_s >= HOLD_S:
                self._missed_since = self._held_since_s = None
                self._cause = ""
        return TargetVerdict(
            name=self._name,
            target_s=self.window.target_s,
            value_s=_p95(state, self.window.target_s),
            meets=self._missed_since is None,
            since=self._missed_since,
            burn_rate=state.slow_share / ALLOWED,
            cause=self._cause,
            requests=state.count,
        )


def _p95(state: WindowState, target_s: float) -> float | None:
    """The estimate, on the side of the target on which the counted requests are."""
    value_s = state.percentile(95)
    if value_s is None:
        return None
    return max(value_s, target_s) if state.slow_share > ALLOWED else min(value_s, target_s)


def _words(excess: Excess | None) -> str:
    if excess is None:
        return ""
    where = f" at {excess.backend}" if excess.backend and excess.part not in ("gateway", "delivery") else ""
    return f"{_CAUSES[excess.part]}{where}"


def _shown_sentences(targets: list[TargetVerdict]) -> list[str]:
    """Of the missed ones, if there are any."""
    missed = [target.sentence for target in targets if not target.meets]
    return missed or [target.sentence for target in targets]


def _value(name: TargetName, seen: SeenRequest) -> float | None:
    """What is held against the target; None: nothing."""
    if name == "e2e":
        return seen.total_s
    if seen.status == "failed":
        return None
    if name == "ttft":
        return seen.total_s if seen.ttft_s is None and seen.status == "cancelled" else seen.ttft_s
    return None if seen.status == "cancelled" else seen.itl_s


def parts_of(seen: SeenRequest) -> Parts:
    """Where its time went, as far as is known; the parts add up to its total."""
    total_s, sent_s, ttft_s, queueing_s = seen.total_s, seen.sent_s, seen.ttft_s, seen.queued_s
    if sent_s is None:
        sent_s = total_s
    first_s = seen.first_byte_s if ttft_s is None else ttft_s
    if first_s is None:
        first_s = total_s
    elif first_s < sent_s:
        first_s = sent_s
    last_s = total_s if seen.last_s is None else seen.last_s
    if last_s < first_s:
        last_s = first_s
    gateway_s = sent_s - queueing_s if sent_s > queueing_s else 0.0
    prefill_s = backend_s = stalls_s = preemption_s = 0.0
    if (engine := seen.engine_s) is None:
        backend_s = first_s - sent_s
    else:
        in_engine_s = min(engine.get("queue", 0.0), first_s - sent_s)
        queueing_s += in_engine_s
        prefill_s = first_s - sent_s - in_engine_s
    decode_s = last_s - first_s
    if (spent := seen.spent) is not None:
        stalls_s = min(spent.stalled_s, decode_s)
        preemption_s = min(spent.preempted_s, decode_s - stalls_s)
        decode_s -= stalls_s + preemption_s
    delivery_s = total_s - last_s if total_s > last_s else 0.0
    return gateway_s, queueing_s, prefill_s, backend_s, decode_s, stalls_s, preemption_s, delivery_s  # as `PARTS`


# Which of `PARTS` lie before the first token, and which between two tokens.
_BEFORE_FIRST = [part in ("gateway", "queueing", "prefill", "backend") for part in PARTS]
_BETWEEN = [part in ("decode", "stalls", "preemption") for part in PARTS]


def _counted(name: TargetName, parts: Parts, seen: SeenRequest) -> Parts:
    """Those that the target is about; between tokens, per token."""
    if name == "e2e":
        return parts
    if name == "ttft":
        return [seconds * counts for seconds, counts in zip(parts, _BEFORE_FIRST, strict=True)]
    gaps = max(1, seen.num_gaps) / seen.num_answers  # of one answer
    return [seconds * counts / gaps for seconds, counts in zip(parts, _BETWEEN, strict=True)]


def _seconds(seconds: float) -> str:
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 99.95 else f"{seconds:.0f} s"


def _why(slow: list[tuple[float, float, float, float, bool]]) -> dict[str, object]:
    """Where the slow requests spent their time, on average."""
    count = len(slow)
    queue_s = sum(call[2] for call in slow) / count
    first_s = sum(max(0.0, call[3] - call[2]) for call in slow) / count
    rest_s = sum(max(0.0, call[1] - call[3]) for call in slow) / count
    parts = {"queue": round(queue_s, 4), "prefill": round(first_s, 4), "decode": round(rest_s, 4)}
    return {"mostly": max(parts, key=lambda name: parts[name]), "mean_s": parts, "slow_requests": count}
