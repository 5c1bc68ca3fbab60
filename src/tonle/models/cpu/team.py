"""A team of threads that run one compiled function together, and the barrier they wait at.

Python is not involved between the start and the end of a call: the barrier is one number that the threads count up.
"""

from __future__ import annotations

import os
import platform
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tonle.models.cpu.products import compiled

_SPINS = 4000  # looks at the counter before the processor is offered to others; some tens of microseconds

_sched_yield = types.ExternalFunction("sched_yield", types.int32())


@intrinsic  # type: ignore[untyped-decorator]
def _count_up(typingctx: Any, counter: Any) -> Any:
    """counter[0] += 1 as one indivisible operation."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.atomic_rmw("add", array.data, ir.Constant(ir.IntType(64), 1), "seq_cst")

    return types.int64(counter), generate


@intrinsic  # type: ignore[untyped-decorator]
def _look(typingctx: Any, counter: Any) -> Any:
    """counter[0], seeing what other threads wrote before they counted up."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.load_atomic(array.data, "acquire", 8)

    return types.int64(counter), generate


@intrinsic  # type: ignore[untyped-decorator]
def _pause(typingctx: Any) -> Any:
    """Tell the processor that we spin."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if platform.machine() in ("x86_64", "AMD64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(builder.module.declare_intrinsic("llvm.x86.sse2.pause", (), kind), [])
        return context.get_dummy_value()

    return types.void(), generate


@compiled
def barrier(counter: Any, arrivals: Any, size: Any) -> Any:
    """Wait for the other threads. `arrivals`: what the last barrier returned, 0 before the first."""
    target = arrivals + size
    _count_up(counter)
    spins = 0
    while _look(counter) < target:
        spins += 1
        if spins < _SPINS:
            _pause()
        else:
            _sched_yield()
    return target


class _Orders:
    """What a team and its helpers share. The helpers hold no more than this, so that an unused team can be freed.

    Simple queues: a garbage collection may dismiss the helpers inside any call of theirs, where a semaphore's lock could
    be held already.
    """

    def __init__(self, num_helpers: int) -> None:
        self.work: list[SimpleQueue[Callable[[int], None] | None]] = [SimpleQueue() for _ in range(num_helpers)]
        self.done: SimpleQueue[BaseException | None] = SimpleQueue()  # what each piece of work ended with

    def help(self, member: int) -> None:
        while (work := self.work[member - 1].get()) is not None:
            error: BaseException | None = None
            try:
                work(member)
            except BaseException as raised:
                error = raised
            del work  # it holds weights and cache
            self.done.put(error)
            del error

    def dismiss(self) -> None:
        for work in self.work:
            work.put(None)


class Team:
    """`size` threads: the caller and its helpers. Helpers sleep between calls, and end when the team is freed."""

    def __init__(self, size: int | None = None) -> None:
        self.size = size or num_cores()
        self.counter = np.zeros(8, dtype=np.int64)  # a cache line of its own
        self._orders = _Orders(self.size - 1)
        self._one_at_a_time = threading.Lock()  # two calls would count at the same barrier, and wait for ever
        for member in range(1, self.size):
            name = f"tonle-cpu-{member}"
            threading.Thread(target=self._orders.help, args=(member,), name=name, daemon=True).start()
        # Not at the interpreter's exit: another thread may still be in `run`, and wait for its helpers.
        weakref.finalize(self, self._orders.dismiss).atexit = False

    def run(self, work: Callable[[int], None]) -> None:
        """`work(member)` on every thread at once; returns when all are done."""
        orders = self._orders
        with self._one_at_a_time:
            self.counter[0] = 0
            for queue in orders.work:
                queue.put(work)
            try:
                work(0)
            finally:
                errors = [orders.done.get() for _ in orders.work]
        for error in errors:
            if error is not None:
                raise error


def num_cores() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
