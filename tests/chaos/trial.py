"""One fault under load, from calm to calm, and the row it leaves in the table.

Does: load, fault, recovery, records, verify, memory; name what is wrong. Does not: know what the fault is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.chaos.client import Outcome
from tests.chaos.load import Load, percentile, wait_until
from tests.chaos.programs import Skip
from tests.chaos.rows import Row
from tests.chaos.stack import GatewayKind, Memory, Stack
from tests.chaos.trail import must_be_recorded

FLOW_S, RECOVERY_S, MEMORY_S = 60.0, 120.0, 30.0
MEMORY_SHARE = 1.10  # what may be left after a fault, against before
SMALL_MB = (
    10.0  # or this much more, of the gateway: it has some 50 MB, and allocators keep a part of what was used once
)
KILL_SLACK_S = 10.0  # a connection of a killed process breaks within this time, and a busy caller has seen it


@dataclass(slots=True)
class Effect:
    """What a fault reports about itself."""

    ended_s: float = field(default_factory=time.monotonic)  # recovery is counted from here
    outcomes: list[Outcome] = field(default_factory=list)  # of requests that the fault itself sent
    killed_s: tuple[float, float] | None = (
        None  # when the process that callers talk to was killed, and when it was gone
    )
    note: str = ""
    red: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Scene:
    """What a fault has to work with."""

    stack: Stack
    load: Load
    name: str  # ids of requests begin with it
    seconds: float

    def go_on(self, seconds: float | None = None) -> None:
        """Let the load run."""
        time.sleep(self.seconds if seconds is None else seconds)


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    act: Callable[[Scene], Effect]
    gateway: GatewayKind = "file"
    callers: int = 8
    max_tokens: int = 8
    short: bool = False  # part of the short form
    spares: bool = False  # it is between one caller, or one backend, and the gateway: others must not notice


def run_fault(stack: Stack, fault: Fault) -> Row:
    """Never raises: a fault that nothing recovers from is a red row."""
    row, began_s = Row(fault.name), time.monotonic()
    try:
        stack.use(fault.gateway)
        _run(stack, fault, row)
    except Skip as skip:
        row.skipped = str(skip)
        return row
    except Exception as error:
        row.red.append(f"{type(error).__name__}: {error}")
    row.took_s = time.monotonic() - began_s
    stack.is_suspect = bool(row.red)
    return row


def _run(stack: Stack, fault: Fault, row: Row) -> None:
    before = stack.memory()
    stack.trail.mark()
    load = Load(stack.gateway.port, fault.name, num_callers=fault.callers, max_tokens=fault.max_tokens)
    scene = Scene(stack, load, fault.name, stack.options.seconds)
    load.start()
    start_s = time.monotonic()
    try:
        if not load.wait_answered(2 * fault.callers, FLOW_S):
            row.red.append("the load did not flow even before the fault")
        scene.go_on()
        fault_s = time.monotonic()
        effect = fault.act(scene)
        row.recovery_s = load.recovery_s(effect.ended_s, RECOVERY_S)
        scene.go_on()
    finally:
        row.outcomes = load.stop()
    row.note = f"{effect.note}; {_p99s(load, start_s, fault_s, effect.ended_s)}"
    row.red += effect.red
    if fault.spares and (refused := row.count("refused")):
        row.red.append(f"{refused} requests of other callers were refused: {row.reasons('refused')}")
    row.outcomes = [*row.outcomes, *effect.outcomes]
    _read_trail(row, stack, effect)
    _weigh(row, stack, before)
    _judge(row)


def _p99s(load: Load, start_s: float, fault_s: float, ended_s: float) -> str:
    """Of the load's answers: those before the fault, and those that were under way during it."""
    before = [
        each.latency_s for each in load.outcomes if each.kind == "answered" and start_s <= each.ended_s <= fault_s
    ]
    during = [
        each.latency_s for each in load.outcomes
        if each.kind == "answered" and each.ended_s >= fault_s and each.sent_s <= ended_s
    ]  # fmt: skip
    return f"p99 of the load {percentile(before, 99):.1f} s before, {percentile(during, 99):.1f} s during"


def _read_trail(row: Row, stack: Stack, effect: Effect) -> None:
    killed_s, gone_s = effect.killed_s or (0.0, 0.0)
    for outcome in row.outcomes:
        is_cut = outcome.sent_s <= gone_s and killed_s <= outcome.ended_s <= gone_s + KILL_SLACK_S
        if outcome.kind in ("lost", "stale") and is_cut:
            outcome.kind = "cut"
    owed = [outcome.request_id for outcome in row.outcomes if must_be_recorded(outcome, killed_s)]
    num_counted = stack.trail.settle(owed)
    for outcome in row.outcomes:
        statuses = stack.trail.statuses(outcome.request_id)
        row.num_records += len(statuses)
        if len(statuses) > 1:
            row.red.append(f"{outcome.request_id} has {len(statuses)} records: {', '.join(statuses)}")
        if outcome.kind == "stale" and statuses:  # it was taken after all
            outcome.kind, outcome.detail = "lost", f"taken ({statuses[0]}) and not answered: {outcome.detail}"
        if outcome.kind == "cut" and statuses not in ([], ["interrupted"], ["ok"]):
            row.red.append(f"{outcome.request_id} was cut off and is on record as {statuses[0]}")
    row.num_owed = len(owed)
    missing = [request_id for request_id in owed if not stack.trail.statuses(request_id)]
    keyless = {outcome.request_id for outcome in row.outcomes if outcome.detail.startswith("401 ")}
    if len(missing) != num_counted or not keyless.issuperset(missing):
        row.red.append(f"{len(missing)} requests have no record and {num_counted} are counted, such as {missing[:1]}")
    row.num_counted = num_counted
    row.verify = stack.trail.verify()


def _weigh(row: Row, stack: Stack, before: Memory) -> None:
    """Memory, once it has settled. It is held to what it was before, or after the warm-up: a process that was started
    again begins small."""
    warm = stack.warm or before
    gateway_mb, servers_mb = max(before.gateway, warm.gateway), max(before.servers, warm.servers)
    most = Memory(max(MEMORY_SHARE * gateway_mb, gateway_mb + SMALL_MB), MEMORY_SHARE * servers_mb)
    after = stack.memory()

    def settled() -> bool:
        nonlocal after
        after = stack.memory()
        return after.gateway <= most.gateway and after.servers <= most.servers

    ok = wait_until(settled, MEMORY_S if stack.options.judges_memory else 0)
    row.memory = f"{before.gateway:.0f} → {after.gateway:.0f}; {before.servers:.0f} → {after.servers:.0f}"
    if not ok and stack.options.judges_memory:
        row.red.append(f"memory did not come back: {row.memory} MB ({stack.gateway.memory_of_each()})")


def _judge(row: Row) -> None:
    if lost := row.count("lost"):
        row.red.append(f"{lost} requests were lost: {row.reasons('lost')}")
    if row.verify != "in order":
        row.red.append(f"verify: {row.verify}")
    if row.recovery_s is None:
        row.red.append(f"no request was answered within {RECOVERY_S:.0f} s after the fault")
