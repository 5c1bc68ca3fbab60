"""`AdapterSlots`: which LoRA adapter is in which slot of the device, and which one gets a slot next.

Does: count the running sequences of each adapter, set sequences aside whose adapter has no slot, choose slots for them. Does not:
read files or hold tensors (`engine/adapters`), or touch the device: loads go into the plan.

No adapter starves. A slot that no sequence holds goes to the adapter whose first sequence is most urgent. If there is none, a
slot is reserved for it: it takes no newcomers, so it is free once its sequences have ended. Only a few slots at a time are
emptied like that; the others go on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from tonle.engine.plan import Plan
from tonle.engine.schedule.queue import WaitingQueue
from tonle.engine.schedule.sequence import Sequence

_EMPTIED_SHARE = 4  # of the slots one in so many, and at least one, may be kept from newcomers at a time


class AdaptersInMemory(Protocol):
    """The adapters that requests may name, as the host has them."""

    def knows(self, adapter: int) -> bool: ...

    def want(self, adapter: int) -> bool:
        """Whether it is in memory. If it is not, it is read meanwhile. It stays there until it was loaded, or `unwant`."""
        ...

    def unwant(self, adapter: int) -> None: ...


class AdapterSlots:
    def __init__(self, num_slots: int, memory: AdaptersInMemory | None, waiting: WaitingQueue) -> None:
        self._memory = memory  # None: the engine takes no adapters
        self._waiting = waiting
        self._adapters = [0] * num_slots  # by slot; 0 = none
        self._holders = [0] * num_slots  # by slot: running sequences
        self._used = [0] * num_slots  # by slot: when it was last held or let go; larger is later
        self._slot_of: dict[int, int] = {}  # adapter -> the slot it is in
        self._reserved: dict[int, int] = {}  # adapter -> the slot it gets; in order
        self._num_held = 0  # of all slots
        self._clock = 0

    # -- asked by the scheduler

    def knows(self, adapter: int) -> bool:
        return self._memory is not None and self._memory.knows(adapter)

    def is_used(self, adapter: int) -> bool:
        """Whether a sequence runs or waits with it."""
        slot = self._slot_of.get(adapter)
        return adapter in self._waiting.adapters or (slot is not None and self._holders[slot] > 0)

    @property
    def are_used(self) -> bool:
        """Whether any sequence runs or waits with an adapter."""
        return self._num_held > 0 or bool(self._waiting.adapters)

    def running(self) -> list[int]:
        """Adapters of running sequences."""
        return [adapter for adapter, held in zip(self._adapters, self._holders, strict=True) if held]

    @property
    def is_unsettled(self) -> bool:
        """Whether `settle` has something to do."""
        return bool(self._reserved) or self._waiting.has_aside

    def settle(self) -> None:
        """Slots for the adapters that sequences were set aside for, the most urgent first."""
        for adapter in [a for a in self._reserved if a not in self._waiting.adapters]:  # its sequences were cancelled
            self._give_up(adapter)
        for adapter in self._waiting.adapters_aside():
            if self._has_slot(adapter):
                self._waiting.recall(adapter)

    def next_waiting(self) -> Sequence | None:
        """The first that can run as far as adapters go. Those before it are set aside."""
        while (sequence := self._waiting.peek()) is not None:
            if not sequence.request.adapter or self._has_slot(sequence.request.adapter):
                return sequence
            self._waiting.set_aside()
        return None

    def hold(self, adapter: int, plan: Plan) -> int:
        """A sequence begins to run with it. Returns its slot, which `plan` loads if need be."""
        slot = self._slot_of.get(adapter)
        if slot is None:
            slot = self._reserved.pop(adapter)
            assert self._holders[slot] == 0, f"slot {slot} is held, and cannot take adapter {adapter}"
            self._slot_of.pop(self._adapters[slot], None)
            self._adapters[slot], self._slot_of[adapter] = adapter, slot
            plan.adapter_loads.append((slot, adapter))
        self._holders[slot] += 1
        self._num_held += 1
        self._touch(slot)
        return slot

    def release(self, adapter: int) -> None:
        """One of its running sequences ended, or was preempted."""
        slot = self._slot_of[adapter]
        self._holders[slot] -= 1
        self._num_held -= 1
        self._touch(slot)

    def force(self, adapter: int) -> bool:
        """A sequence with it is to run before all others: whether there is a slot for it, whatever was reserved."""
        if adapter in self._slot_of:
            return True
        slot = self._reserved.get(adapter)
        if slot is None or self._holders[slot]:
            if (slot := next((s for s, held in enumerate(self._holders) if not held), None)) is None:
                return False
            for other in [a for a, s in self._reserved.items() if s == slot or a == adapter]:
                self._give_up(other)
            self._reserved[adapter] = slot
        return self._memory is not None and self._memory.want(adapter)

    def forget_loads(self, plans: Iterable[Plan]) -> None:
        """These plans failed, and their sequences hold nothing any more: what they loaded may not be there."""
        for slot, adapter in (load for plan in plans for load in plan.adapter_loads):
            if self._memory is not None and adapter not in self._reserved:
                self._memory.unwant(adapter)  # the step may have failed before this was loaded
            if self._adapters[slot] == adapter and not self._holders[slot]:
                self._adapters[slot] = 0
                del self._slot_of[adapter]

    # -- choosing

    def _has_slot(self, adapter: int) -> bool:
        """Whether newcomers of this adapter may run now. If not, it is seen to that they may later."""
        slot = self._slot_of.get(adapter)
        if slot is not None:  # reserved for another: this one's turn comes when that one has it
            return slot not in self._reserved.values()
        slot = self._reserved.get(adapter)
        if slot is None:
            if (slot := self._choose()) is None:
                return False
            self._reserved[adapter] = slot
        assert self._memory is not None
        return self._memory.want(adapter) and not self._holders[slot]

    def _choose(self) -> int | None:
        """The slot that suffers least: one that no sequence holds, else the one that few hold. None: not now."""
        reserved = set(self._reserved.values())
        left = [slot for slot in range(len(self._adapters)) if slot not in reserved]
        if idle := [slot for slot in left if not self._holders[slot]]:
            return min(idle, key=lambda slot: (self._adapters[slot] in self._waiting.adapters, self._used[slot]))
        emptied = sum(1 for slot in reserved if self._holders[slot])
        if not left or emptied >= max(1, len(self._adapters) // _EMPTIED_SHARE):
            return None
        return min(left, key=lambda slot: (self._holders[slot], self._used[slot]))

    def _give_up(self, adapter: int) -> None:
        """It does not get the slot that was reserved for it."""
        del self._reserved[adapter]
        assert self._memory is not None
        self._memory.unwant(adapter)

    def _touch(self, slot: int) -> None:
        self._clock += 1
        self._used[slot] = self._clock

    # -- truth

    def verify(self, running: Iterable[Sequence]) -> None:
        """Recount against the running sequences; raises AssertionError on any disagreement."""
        counted = Counter(s.request.adapter for s in running if s.request.adapter)
        assert {a: s for s, a in enumerate(self._adapters) if a} == self._slot_of, "an adapter is in two slots"
        held = {a: n for a, n in zip(self._adapters, self._holders, strict=True) if n}
        assert held == counted, f"held adapters: {held}, counted {dict(counted)}"
        assert self._num_held == sum(self._holders)
        reserved = list(self._reserved.values())
        assert len(set(reserved)) == len(reserved), "a slot is reserved twice"
        assert not self._reserved.keys() & self._slot_of.keys(), "a slot is reserved for an adapter that has one"
